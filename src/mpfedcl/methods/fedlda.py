"""FedLDA: linear discriminant analysis from sufficient statistics, one-shot."""

from mpfedcl.gaussian import ClientMeans, Components, Covariance, unpack_symmetric
from mpfedcl.methods import OneShot, Tensors
from mpfedcl.methods._one_shot import degrees_of, describe_metric, fit_classes


class FedLDA(OneShot):
    """FedGauss without personalization: one Gaussian per class, with a common covariance.

    The scores are x' S^-1 mu_c - mu_c' S^-1 mu_c / 2 with the class means mu_c [d] and the shrunk
    pooled covariance within classes S [d, d].
    """

    name = "fedlda"
    summary = "linear discriminant analysis of frozen features, one-shot"
    paper = "as FedCGS and GH-OFL"
    second_moment = "within"

    def fit(self, sums: Tensors, groups: ClientMeans) -> tuple[Components, Tensors]:
        """Return one Gaussian per class with the pooled covariance within classes."""
        degrees = degrees_of(sums, groups)
        within = unpack_symmetric(sums["within"], groups.vectors.shape[1]) / degrees
        components, shrinkage = fit_classes(
            Covariance.decompose(within), degrees, sums, wide=not self.is_noisy
        )
        return components, describe_metric(within, shrinkage)
