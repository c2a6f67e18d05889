"""SP-FedCL: the single-prototype sibling."""

from collections.abc import Sequence

from torch import Tensor

from mpfedcl.experiment import Experiment
from mpfedcl.methods.mp_fedcl import MpFedCL
from mpfedcl.prototypes import Prototypes, mean_clients


class SpFedCL(MpFedCL):
    """MP-FedCL with one prototype a class, its mean; no clustering."""

    name = "sp-fedcl"
    summary = "as MP-FedCL with one prototype a class, its mean"

    def __init__(self, experiment: Experiment, num_classes: int) -> None:
        super().__init__(experiment, num_classes)
        self.num_prototypes = 1

    def summarize(
        self, embeddings: Sequence[Tensor], labels: Sequence[Tensor], seeds: Sequence[int]
    ) -> list[Prototypes]:
        """Return each class's mean."""
        return mean_clients(
            embeddings,
            labels,
            num_classes=self.num_classes,
            min_cluster_size=self.experiment.prototypes.min_cluster_size,
        )
