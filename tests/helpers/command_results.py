"""What a command answers, and what its answers are held to."""

import re
from collections.abc import Callable
from typing import NamedTuple


class Said(NamedTuple):
    """What a command answered."""

    code: int
    out: str
    err: str


Cli = Callable[..., Said]
"""The fixture `cli`: words of a command to its answer."""

Refused = Callable[..., str]
"""The fixture `refused`: words of a command to the sentence that refuses them."""


def assert_one_sentence(said: Said) -> str:
    assert said.code == 2, said.err
    assert said.out == ""
    assert said.err.startswith("mpfedcl: ")
    assert said.err.endswith((".\n", "?\n"))
    assert said.err.count("\n") == 1
    assert "Traceback" not in said.err
    return said.err


def assert_fits(text: str) -> None:
    # A path is never folded, so that it can be copied.
    assert max(len(line) for line in text.splitlines() if "/" not in line) <= 100


def without_progress(err: str) -> str:
    """Return the lines on standard error except for the number of completed rounds."""
    return re.sub(r"^.+: [\d,]+ of [\d,]+ rounds\b.*\n", "", err, flags=re.MULTILINE)
