"""Values and names as text: rounded, finite, and safe in Markdown and YAML whatever a name is."""

import json
import math
import re
from collections.abc import Iterable, Sequence

Numbers = Sequence[float | None]
_SPECIAL = re.compile(r"([\\`*_\[\]<>|&~$@]|:(?=//)|(?<=www)\.)", re.IGNORECASE)
"""Characters that Markdown acts on within a line, and those in addresses, which some readers turn
into links."""
_LONGEST = 80


def rounded(value: float | None, digits: int = 2) -> float | None:
    """Return a number with so many decimals; None for what is not a finite number."""
    if value is None or not math.isfinite(value):
        return None
    return round(value, digits)


def round_significant(value: float | None, digits: int = 4) -> float | None:
    """Return a number with so many significant digits; None for what is not a finite number."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def choose_evenly(count: int, most: int) -> list[int]:
    """Return at most `most` places of `count`, evenly spread, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [round(place * (count - 1) / (most - 1)) for place in range(most)]


def finite_values(values: Numbers) -> list[float]:
    """Return the numbers among the values."""
    return [value for value in values if value is not None and math.isfinite(value)]


def mean(values: Sequence[float]) -> float | None:
    """Return the mean, None of nothing."""
    return sum(values) / len(values) if values else None


def deviation(values: Sequence[float]) -> float | None:
    """Return the standard deviation (ddof 1), None of fewer than two values."""
    middle = mean(values)
    if middle is None or len(values) < 2:
        return None
    return math.sqrt(sum((value - middle) ** 2 for value in values) / (len(values) - 1))


def printable_name(name: str) -> str:
    """Return a name on one line, without signs that cannot be seen, and not too long."""
    seen = "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name
    )
    return seen if len(seen) <= _LONGEST else f"{seen[: _LONGEST - 1]}…"


def escape_markdown(name: str) -> str:
    """Return a name for the midst of a line or a cell, where Markdown sees nothing but letters."""
    return _SPECIAL.sub(r"\\\1", printable_name(name).strip()) or "(no name)"


def code_block(text: str, language: str = "") -> str:
    """Return a block of code; no line in it can end it."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    ticks = "`" * max(3, longest + 1)
    return f"{ticks}{language}\n{text}\n{ticks}\n"


def yaml_string(value: str) -> str:
    """Return a string as YAML takes it; what JSON takes in quotes, YAML takes too."""
    return json.dumps(printable_name(value), ensure_ascii=False)


def enumerate_names(names: Iterable[str], most: int) -> str:
    """Return names in a row, the first `most` of them and how many more there are."""
    several = list(names)
    more = f" and {len(several) - most:,} more" if len(several) > most else ""
    return ", ".join(several[:most]) + more
