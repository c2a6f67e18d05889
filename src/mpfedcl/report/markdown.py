"""Names and numbers in Markdown and in the YAML before it: whatever they are, they stay text."""

import json
import re
from collections.abc import Iterable

_SPECIAL = re.compile(r"([\\`*_\[\]<>|&~$@]|:(?=//)|(?<=www)\.)", re.IGNORECASE)
"""What Markdown acts on within a line; and in addresses, of which some readers make links that
nobody has marked as such."""
_LONGEST = 80


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
