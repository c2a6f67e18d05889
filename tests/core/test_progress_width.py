"""What stands beside a bar is cut off where it does not fit; the round never is."""

from io import StringIO
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from mpfedcl.cli.federation import RunFollower
from mpfedcl.core.progress import ProgressBar

NAMES = [f"hospital-of-a-long-name-{number}" for number in range(6)]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_federation_progress_shows_the_round_at_any_width(tmp_path: Path, width: int) -> None:
    console = Console(file=StringIO(), force_terminal=True, width=width, color_system=None)
    bar = ProgressBar(console)
    follower = RunFollower(cast("Any", None), tmp_path, bar, bar.add_task("", note=""), "")
    status = {"round": 17, "rounds": 120, "answered": 2, "waiting": NAMES, "missing": NAMES[:2]}
    follower.status = {"what": "training", **status}
    follower._show()
    console.print(bar.make_tasks_table(bar.tasks))
    (line,) = cast("StringIO", console.file).getvalue().splitlines()
    assert line.startswith("round 17 of 120 ")
    assert " 16/120 " in line
    assert "…" in line
    assert len(line) <= width


def test_clients_that_cannot_take_part_are_reported_once(tmp_path: Path) -> None:
    console = Console(file=StringIO(), width=200)
    bar = ProgressBar(console, "rounds")
    follower = RunFollower(cast("Any", None), tmp_path, bar, bar.add_task("", note=""), "")
    waiting = {"what": "waiting for clients", "here": [], "wanted": 2}
    for refused in ({}, {"a": "no data."}, {"a": "no data."}, {"a": "no data.", "b": "too old."}):
        follower.status = {**waiting, "refused": refused}
        follower._show()
    lines = cast("StringIO", console.file).getvalue().splitlines()
    told = [line for line in lines if "take part" in line]
    assert told == ["a does not take part: no data.", "b does not take part: too old."]
