"""What a run says of one sample."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class NearestPrototype:
    """The nearest prototype: whose it is, of which class, and how many images it stands for.

    Methods that compare with averages over clients (FedProto) have the client `global`.
    """

    client: str
    class_name: str
    count: int


@dataclass(frozen=True)
class ClassifierReading:
    """A class of the classifier, and its probability."""

    label: str
    probability: float


@dataclass(frozen=True)
class Prediction:
    """What a run predicts for one image, as `Predictor.predict` returns it.

    Example:
        >>> said = ClassifierReading("7", 0.9)
        >>> nearest = NearestPrototype("client-3", "1", count=40)
        >>> prediction = Prediction("1", 0.31, 0.02, False, nearest, said)
        >>> prediction.to_json()["nearest"]["client"]
        'client-3'
    """

    label: str
    """The class of the nearest prototype, or the classifier's: by which the run is judged."""
    distance: float | None
    """To the nearest prototype, in the space where prototypes are compared."""
    margin: float | None
    """How much farther the nearest prototype of another class is."""
    unknown: bool | None
    """Whether the distance is above the threshold; None where there is none to compare with."""
    nearest: NearestPrototype | None
    classifier: ClassifierReading
    probability: float | None = None
    """Of the label; None where the nearest prototype decides, which gives no probability."""
    second: ClassifierReading | None = None
    """The second best class, where there are probabilities and another class."""
    set: tuple[str, ...] | None = None
    """With a `coverage`: the classes among which the truth is, the likeliest first."""
    probabilities: dict[str, float] | None = None
    """Of all classes, where asked for."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        told = asdict(self)
        return told | {"set": None if self.set is None else list(self.set)}
