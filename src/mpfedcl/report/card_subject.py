"""What a model card is about: a finished run, and what its things are called."""

from dataclasses import dataclass
from typing import Any

from mpfedcl.experiment import Experiment
from mpfedcl.experiment.wording import describe_data
from mpfedcl.prototypes import PrototypePool


@dataclass(frozen=True)
class CardSubject:
    """The run that a card describes."""

    experiment: Experiment
    about: str
    """The method in one line."""
    summary: dict[str, Any]
    partition: dict[str, Any]
    pool: PrototypePool | None
    files: list[str]
    """Files of tensors that the run has left."""
    trains: bool = True
    """False: clients sent sums once."""

    @property
    def data(self) -> str:
        """What the data are called."""
        return describe_data(self.experiment, self.partition)[0]

    @property
    def is_network(self) -> bool:
        """Whether clients were on machines of their own, with data of their own."""
        return bool(self.partition.get("network"))

    @property
    def title(self) -> str:
        """What the models are called."""
        return f"{self.method} on {self.data}"

    @property
    def method(self) -> str:
        """What the method is called."""
        return str(self.summary.get("method_name") or self.experiment.method)

    @property
    def noun(self) -> str:
        """What a sample is; those of a frozen encoder's features were images."""
        is_flat = len(self.partition.get("input_shape") or ()) == 1
        return "vector" if is_flat and "encoder" not in self.partition else "image"

    @property
    def accuracies(self) -> dict[str, float]:
        """The clients that were read, and how well each does on its local test set."""
        predictors = self.summary["accuracy_per_client"] or {}
        return {name: value for name, value in predictors.items() if value is not None}
