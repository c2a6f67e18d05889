"""The numbers that the paper prints: published.toml, read."""

import tomllib
from importlib import resources
from typing import Any

MeanAndDeviation = tuple[float, float]


def _with_pairs(values: Any) -> Any:
    """Return nested tables with their lists, mean and deviation, as pairs."""
    if isinstance(values, dict):
        return {name: _with_pairs(each) for name, each in values.items()}
    return tuple(values)


_FILE = resources.files("mpfedcl.studies.paper") / "published.toml"
_NUMBERS = _with_pairs(tomllib.loads(_FILE.read_text(encoding="utf-8")))
LABEL_SKEW: dict[str, dict[str, MeanAndDeviation]] = _NUMBERS["label_skew"]
FEATURE_SKEW_DIGITS: dict[str, dict[str, MeanAndDeviation]] = _NUMBERS["feature_skew_digits"]
EFFICIENCY: dict[str, dict[str, dict[str, MeanAndDeviation]]] = _NUMBERS["efficiency"]
EQUAL_TIME: dict[str, dict[str, dict[str, MeanAndDeviation]]] = _NUMBERS["equal_time"]
SENT: dict[str, tuple[int, int]] = _NUMBERS["sent"]
