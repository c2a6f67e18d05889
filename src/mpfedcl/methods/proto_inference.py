"""Prototypes for inference (Qiao et al., 2023)."""

from typing import ClassVar, Literal

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.methods._prototypes import SharesPrototypes
from mpfedcl.methods.fedavg import FedAvg
from mpfedcl.prototypes import PrototypePool


class ProtoInference(SharesPrototypes, FedAvg):
    """FedAvg; class means are averaged once, in the last round, and the nearest one predicts.

    In all other rounds clients send only models. Accuracies of those rounds are computed as if that
    round were the last.
    """

    name = "proto-inference"
    summary = "FedAvg; at the end averaged class means predict"
    family = "prototypes"
    paper = "Qiao et al., arXiv 2023"
    interpretation = (
        "The formula is ours, after the paper's abstract: each owner of a class counts once."
    )
    sends = "its model; in the last round also class means"
    primary_predictor = "personal_prototype"
    primary_predictor_global = "global_prototype"
    totals_suffice = False
    clustering: ClassVar[Literal["kmeans", "mean", "dbscan"]] = "mean"

    def __init__(self, experiment: Experiment, num_classes: int) -> None:
        super().__init__(experiment, num_classes)
        if experiment.privacy.has_budget:
            raise InvalidInput(
                f"privacy.epsilon is {experiment.privacy.epsilon:g}; with method {self.name} it "
                "must be left out: its model is fedavg's, and its prototypes have no noise."
            )

    def shares_in(self, round_number: int) -> bool:
        """Share prototypes in the last round only."""
        return round_number == self.experiment.rounds

    def reference(self, pool: PrototypePool) -> PrototypePool:
        """Return one prototype per class, averaged over the clients that hold it."""
        return pool.averaged_over_owners()
