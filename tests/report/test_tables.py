"""Tables in a terminal: whole numbers, within its width."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from mpfedcl.report.tables import TextTable, clients_table
from mpfedcl.report.wording import describe_mean


def shown(grid: TextTable, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    grid.show(console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@given(
    columns=st.lists(st.integers(1, 14), min_size=1, max_size=9),
    width=st.integers(40, 100),
    num_rows=st.integers(1, 4),
)
def test_no_number_is_cut_off(columns: list[int], width: int, num_rows: int) -> None:
    cells = [[str(row + 1) * size for size in columns] for row in range(num_rows)]
    names = [f"method-{row}" for row in range(num_rows)]
    rows = [[name, *line] for name, line in zip(names, cells, strict=True)]
    lines = shown(TextTable("title", ["", *(f"c{n}" for n in range(len(columns)))], rows), width)
    assert max(map(len, lines)) <= width
    for name, line in zip(names, cells, strict=True):
        # In parts or not, a row's numbers stand behind its name, all of them and in order.
        parts = [text.split()[1:] for text in lines if text.split()[:1] == [name]]
        assert [number for part in parts for number in part] == line


def test_a_table_that_fits_stays_in_one_part() -> None:
    grid = TextTable("title", ["", "a", "b"], [["row", "1.0", "2.0"]])
    exactly = len(" row   1.0   2.0 ")
    assert sum("row" in line for line in shown(grid, exactly)) == 1
    assert sum("row" in line for line in shown(grid, exactly - 1)) == 2
    # Words may be folded, so they ask for no more than the longest of them.
    words = TextTable("title", ["", "a"], [["row", "some words that are folded"]])
    assert sum("row" in line for line in shown(words, 20)) == 1


def test_of_many_clients_the_lowest_are_listed() -> None:
    accuracies: dict[str, float | None] = {f"client-{n:02}": float(n) for n in range(41)}
    table = clients_table("title", {"new": None, **accuracies})
    assert table.rows == [[f"client-{n:02}", f"{n}.0"] for n in range(20)]
    assert table.note == "The lowest; 22 more: accuracy_per_client in summary.json."


@pytest.mark.parametrize("count", [1, 20])
def test_few_clients_are_listed(count: int) -> None:
    accuracies = {f"c{number}": 50.0 for number in range(count)}
    assert clients_table("title", accuracies).rows == [[name, "50.0"] for name in accuracies]


def test_mean_is_said_to_be_over_the_evaluated_clients() -> None:
    spread = {"clients": 100_000, "mean": 61.5, "quartiles": [50.0, 60.0, 75.0]}
    assert (
        describe_mean({"a": 20.0}, [str(n) for n in range(100_000)], spread) == "mean over clients"
    )
    told = describe_mean({"a": 20.0}, [str(n) for n in range(200_000)], spread)
    assert told == "mean over 100,000 of 200,000 clients (the others were not evaluated)"


def test_clients_have_a_column_of_another_metric() -> None:
    values: dict[str, dict[str, float | None]] = {"a": {"nll": 0.31279}, "b": {"nll": None}}
    table = clients_table("title", {"a": 50.0, "b": None, "c": 1.0}, "nll", values)
    assert table.columns == ["client", "accuracy %", "NLL"]
    assert table.rows == [["a", "50.0", "0.313"], ["b", "-", "-"], ["c", "1.0", "-"]]
