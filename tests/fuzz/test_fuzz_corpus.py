"""What once failed under the fuzzer is tried again, and a few inputs that are always the same."""

from functools import cache
from pathlib import Path

import pytest
from fuzz_target import Target
from fuzzer import CORPUS, TARGETS, fuzz

SAVED = sorted(path for path in CORPUS.glob("*/*") if path.is_file())
FEW = 60
SLOW = {"flags": 8}
"""Each parse takes a long time."""


@cache
def target(name: str) -> Target:
    return TARGETS[name]()


@pytest.mark.parametrize("path", SAVED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_saved_inputs_are_accepted_or_rejected(path: Path) -> None:
    kind = target(path.parent.name.replace("-", " "))
    kind.runs(kind.from_bytes(path.read_bytes()))


@pytest.mark.whole
@pytest.mark.parametrize("name", TARGETS)
def test_mutated_inputs_are_accepted_or_rejected(name: str) -> None:
    count = SLOW.get(name, FEW)
    outcome = fuzz(target(name), seed=0, seconds=60, most=count, keep=False)
    assert outcome.faults == {}
    assert outcome.tried == count
    # A fuzzer whose inputs are all refused at the door tests the door alone.
    assert outcome.taken > 0
