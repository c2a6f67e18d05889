"""The names that encoders may have, known before torch is."""

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment.close_names import did_you_mean

_ALONE = ("none", "resnet18", "random-filters", "random-resnet18")
_WITH_REST = ("random-filters", "random-resnet18", "onnx", "torchvision")
"""Kinds that more may follow behind a colon: a seed, a file, a name."""


def check_encoder_name(name: str) -> None:
    """Refuse a name that is of no kind; what follows the kind is checked where it is used."""
    kind, _, rest = name.partition(":")
    if kind not in (_WITH_REST if rest else _ALONE):
        raise unknown_encoder(name)


def unknown_encoder(name: str) -> InvalidInput:
    """Return the refusal of a name."""
    allowed = f"{', '.join(_ALONE)}, onnx:FILE or torchvision:NAME"
    question = did_you_mean(name, _ALONE)
    return InvalidInput(f"encoder.name is {name!r}; it must be {allowed}{question}.")
