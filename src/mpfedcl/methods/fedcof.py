"""FedCOF, covariance from class means (Goswami et al., 2025), one-shot."""

from typing import Any

from mpfedcl.gaussian import ClientMeans, Components, Covariance
from mpfedcl.methods import Broadcast, OneShot, Tensors
from mpfedcl.methods._one_shot import class_means, describe_metric, fit_classes


class FedCOF(OneShot):
    """Linear discriminant analysis whose covariance S [d, d] comes from the clients' class means.

    S = sum_ic n_ic (m_ic - mu_c)(m_ic - mu_c)' / (G - K), with the mean m_ic [d] of class c on
    client i, G pairs of client and class, and K classes: a small message, for many clients. The
    formula assumes that the means of clients differ only by chance. If G - K is below d, the
    covariance is rank-deficient, and the record has a warning.
    """

    name = "fedcof"
    summary = "as fedlda from class sums alone; needs many clients"
    paper = "Goswami et al., 2025"
    sends = "counts and sums per class"
    totals_suffice = False
    has_private_sums = False
    _shortage: str | None = None

    def fit(self, sums: Tensors, groups: ClientMeans) -> tuple[Components, Tensors]:
        """Return one Gaussian per class, with the covariance of the clients' means."""
        present, means, _ = class_means(sums)
        everywhere = sums["sums"].double() / sums["counts"].double().clamp(min=1).unsqueeze(1)
        away = groups.counts.sqrt().unsqueeze(1) * (groups.vectors - everywhere[groups.labels])
        degrees, size = len(groups.counts) - len(present), means.shape[1]
        self._shortage = None
        if degrees < size:
            self._shortage = (
                f"fedcof has {degrees} degrees of freedom for {size} features: with so few clients "
                "its covariance is a guess; fedlda sends the true one."
            )
        spread = away.T @ away / max(1, degrees)
        components, shrinkage = fit_classes(
            Covariance.decompose(spread), max(1.0, degrees), sums, wide=not self.is_noisy
        )
        return components, describe_metric(spread, shrinkage)

    def remarks(self, broadcast: Broadcast) -> dict[str, Any]:
        """Warn if there are too few clients."""
        return {"warnings": [self._shortage]} if self._shortage else super().remarks(broadcast)
