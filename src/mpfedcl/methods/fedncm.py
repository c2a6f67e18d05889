"""FedNCM, nearest class mean (Legate et al., NeurIPS 2023), one-shot."""

from mpfedcl.gaussian import ClientMeans, Components, Covariance
from mpfedcl.methods import OneShot, Tensors
from mpfedcl.methods._one_shot import class_means, fit_classes

_ROUNDING = 1e-12
"""Scatter per sample that is no more than the rounding of means of norm 1."""


class FedNCM(OneShot):
    """Clients send class counts [C] and feature sums [C, d]; the nearest class mean predicts."""

    name = "fedncm"
    summary = "nearest class mean of frozen features, one-shot"
    paper = "Legate et al., NeurIPS 2023"
    sends = "counts and sums per class"

    def fit(self, sums: Tensors, groups: ClientMeans) -> tuple[Components, Tensors]:
        """Return the class means, with a spherical covariance."""
        _, means, counts = class_means(sums)
        degrees = max(1.0, float(counts.sum()) - len(counts))
        # Features have norm 1, so the means determine the scatter around them.
        scatter = float((counts * (1 - means.square().sum(1))).sum())
        if scatter < _ROUNDING * float(counts.sum()):
            scatter = 0.0
        covariance = Covariance.spherical(scatter / degrees, means)
        return fit_classes(covariance, degrees, sums, wide=not self.is_noisy)[0], {}
