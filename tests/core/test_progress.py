"""Lines in place of a bar, where there is no terminal."""

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from mpfedcl.core.progress import LINES, ProgressBar, is_milestone


def log(total: int | None, notes: list[str], unit: str = "rounds") -> list[str]:
    """Return the lines of a log in which so many rounds are done one by one."""
    said = io.StringIO()
    with ProgressBar(Console(file=said, width=200), unit) as bar:
        task = bar.add_task("fedavg", total=None, note="")
        bar.update(task, total=total)
        for note in notes:
            bar.update(task, advance=1, note=note)
    return said.getvalue().splitlines()


def test_long_run_prints_a_line_every_few_rounds() -> None:
    lines = log(60, [f"accuracy {number} %  loss 1.0" for number in range(1, 61)])
    assert len(lines) == LINES
    assert lines[0] == "fedavg: 3 of 60 rounds, accuracy 3 % loss 1.0"
    assert lines[-1] == "fedavg: 60 of 60 rounds, accuracy 60 % loss 1.0"


def test_short_run_prints_a_line_for_each_round() -> None:
    assert log(2, ["", ""]) == ["fedavg: 1 of 2 rounds", "fedavg: 2 of 2 rounds"]


def test_repeated_status_is_printed_once() -> None:
    notes = ["0 of 2 clients", "0 of 2 clients", "1 of 2 clients", "0 of 2 clients"]
    assert log(None, notes) == ["fedavg: 0 of 2 clients", "fedavg: 1 of 2 clients"]


def test_work_without_a_unit_prints_nothing() -> None:
    assert log(5, ["x"] * 5, unit="") == []


@given(total=st.integers(0, 5000), steps=st.lists(st.integers(0, 400), max_size=60))
def test_milestones_are_few_and_include_the_end(total: int, steps: list[int]) -> None:
    done, told = 0, [0]
    for step in [*steps, total]:
        done = min(total, done + step)
        told += [done] if is_milestone(done, total, told[-1]) else []
    assert len(told) <= LINES + 2
    assert told == sorted(set(told))
    assert not total or told[-1] == total
