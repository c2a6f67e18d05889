"""FedNCM, nearest class mean (Legate et al., NeurIPS 2023), one-shot."""

from mpfedcl.gaussian import ClientMeans, Components, Covariance
from mpfedcl.methods import OneShot, Tensors
from mpfedcl.methods._one_shot import class_means, fit_classes


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
        covariance = Covariance.spherical(max(0.0, scatter) / degrees, means)
        return fit_classes(covariance, degrees, sums)[0], {}
