"""The data sets by name: what they are, where they come from, and how they are used by default."""

from dataclasses import dataclass
from typing import Literal

from mpfedcl.errors import InvalidInput


@dataclass(frozen=True)
class DatasetSpecification:
    """A named data set and the defaults of an experiment on it."""

    name: str
    summary: str
    source: str
    clients: int
    prototypes_per_class: int
    min_size: int
    test: Literal["shared", "matched"]
    train_size: int | None = None
    embedded: bool = False
    pixel_mean: float = 0.5
    pixel_deviation: float = 0.5
    """Inputs are (pixel / 255 - mean) / deviation: known constants, nobody's data are asked."""
    class_names: tuple[str, ...] = ()
    """The classes the set must have, in order; empty where the files decide."""


_MNIST = "Y. LeCun, C. Cortes, C. J. C. Burges: The MNIST database (CC BY-SA 3.0)"
_DIGITS = tuple("0123456789")

SPECIFICATIONS = {
    spec.name: spec
    for spec in (
        DatasetSpecification(
            name="mnist-sample",
            summary="2,000 training and 1,000 test digits of MNIST, inside the package",
            source=_MNIST,
            clients=5,
            prototypes_per_class=2,
            min_size=10,
            test="shared",
            embedded=True,
            class_names=_DIGITS,
            pixel_mean=0.1307,
            pixel_deviation=0.3081,
        ),
        DatasetSpecification(
            name="mnist",
            summary="MNIST, 2,000 of its training digits drawn by seed, all 10,000 test digits",
            source=_MNIST,
            clients=5,
            prototypes_per_class=2,
            min_size=10,
            test="shared",
            train_size=2000,
            class_names=_DIGITS,
            pixel_mean=0.1307,
            pixel_deviation=0.3081,
        ),
        DatasetSpecification(
            name="folder",
            summary="your own images: ROOT/<domain>/<class>/*.png|jpg or ROOT/<domain>.npz",
            source="yours",
            clients=5,
            prototypes_per_class=4,
            min_size=1,
            test="matched",
        ),
    )
}


def specification(name: str) -> DatasetSpecification:
    """Return the specification of a data set by name."""
    if name not in SPECIFICATIONS:
        raise InvalidInput(
            f"dataset.name is {name!r}; it must be one of {', '.join(SPECIFICATIONS)}."
        )
    return SPECIFICATIONS[name]
