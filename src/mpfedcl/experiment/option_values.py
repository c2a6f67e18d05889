"""Settings of a user's own class, which nobody here knows: names and texts."""

import math
from typing import Annotated, Any

from pydantic import BeforeValidator


def _take_numbers(given: Any) -> Any:
    """Take numbers and truths of a file as the texts that a command line would give."""
    if not isinstance(given, dict):
        return given
    return {name: _as_text(value) for name, value in given.items()}


def _as_text(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    is_number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return str(value) if is_number else value


OptionValues = Annotated[dict[str, str], BeforeValidator(_take_numbers)]
