"""Attack programs follow the message format: each sends what it claims, and only it is left out."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "attacks"), str(ROOT / "tests" / "network")]

from one_message import IN_ROUND, OF_OBJECTS, try_message

pytestmark = pytest.mark.whole


@pytest.mark.parametrize("name", [name for name in IN_ROUND if "archive" in name])
def test_client_that_sends_an_archive_is_left_out(name: str) -> None:
    found = try_message(name, bad=IN_ROUND[name])
    assert found.ok, found.seen


@pytest.mark.parametrize("name", OF_OBJECTS)
def test_client_with_a_forged_update_is_left_out(name: str) -> None:
    forge, most_memory = OF_OBJECTS[name]
    found = try_message(name, forge=forge, most_memory=most_memory)
    assert found.ok, found.seen
