"""Prototypes for inference (Qiao et al., 2023)."""

from typing import ClassVar, Literal

from mpfedcl.methods import Experiment, FedAvg, InvalidInput, PrototypePool, SharesPrototypes


class ProtoInference(SharesPrototypes, FedAvg):
    """FedAvg; class means are averaged once, in the last round, and the nearest one predicts.

    In all other rounds clients send only models; accuracies are computed as if each were the last.
    """

    name = "proto-inference"
    summary = "FedAvg; at the end averaged class means predict"
    paper = "Qiao et al., arXiv 2023"
    interpretation = (
        "The formula is ours, after the paper's abstract: each owner of a class counts once."
    )
    sends = "its model; in the last round also class means"
    primary_predictor = "personal_prototype"
    primary_predictor_global = "global_prototype"
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
