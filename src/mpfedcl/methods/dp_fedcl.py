"""DP-FedCL: as many prototypes as density suggests."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from mpfedcl.experiment import Experiment
from mpfedcl.methods.mp_fedcl import MpFedCL
from mpfedcl.prototypes import Prototypes, dbscan_clients


class DpFedCL(MpFedCL):
    """MP-FedCL with the means of DBSCAN's clusters, as many as each class turns out to have.

    The clients' numbers of prototypes differ, so only missing slots are filled with class means.
    """

    name = "dp-fedcl"
    summary = "as MP-FedCL with the means of DBSCAN's clusters, as many as there are"
    defaults: ClassVar[Mapping[str, Any]] = {"prototypes__padding": "fill"}

    def __init__(self, experiment: Experiment, num_classes: int) -> None:
        super().__init__(experiment, num_classes)
        self.num_prototypes = None

    def summarize(
        self, embeddings: Sequence[Tensor], labels: Sequence[Tensor], seeds: Sequence[int]
    ) -> list[Prototypes]:
        """Return the means of DBSCAN's clusters a class."""
        return dbscan_clients(
            embeddings,
            labels,
            num_classes=self.num_classes,
            eps=self.experiment.dbscan.eps,
            min_samples=self.experiment.dbscan.min_samples,
            min_cluster_size=self.experiment.prototypes.min_cluster_size,
        )
