"""DP-FedCL: MP-FedCL with prototypes from DBSCAN (Qiao et al., 2023)."""

from collections.abc import Sequence

from torch import Tensor

from mpfedcl.experiment.method_settings import DbscanSettings
from mpfedcl.methods.mp_fedcl import CONTRAST_SEARCH_SPACE, MpFedCL
from mpfedcl.prototypes import Prototypes, dbscan_prototypes


class DpFedCL(MpFedCL):
    """MP-FedCL with the means of DBSCAN clusters as prototypes; their number differs by class.

    Clients have different numbers of prototypes, so only missing slots are filled with class means.
    """

    name = "dp-fedcl"
    summary = "as MP-FedCL, prototypes from DBSCAN's clusters"
    sends = "its model, prototypes of DBSCAN's clusters"
    clustering = "dbscan"
    settings: DbscanSettings
    defaults = {"prototypes__padding": "fill"}
    search_space = {**CONTRAST_SEARCH_SPACE, "dbscan__eps": (None, 0.1, 0.2, 0.4)}

    def summarize(
        self, embeddings: Sequence[Tensor], labels: Sequence[Tensor], seeds: Sequence[int]
    ) -> list[Prototypes]:
        """Return the means of DBSCAN's clusters."""
        return dbscan_prototypes(
            embeddings,
            labels,
            num_classes=self.num_classes,
            eps=self.settings.eps,
            min_samples=self.settings.min_samples,
            min_cluster_size=self.experiment.prototypes.min_cluster_size,
        )
