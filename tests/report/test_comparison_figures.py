"""The figures of a comparison: every seed, intervals, diverged seeds, clients."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from report_documents import document_of, groups_in
from scipy import stats
from test_document import write_comparison

from mpfedcl import load
from mpfedcl.methods import TESTS
from mpfedcl.report.document import MOST_CLIENTS, client_grid, describe_heat
from mpfedcl.report.drawings import (
    comparison_drawings,
    differences_drawing,
    seeds_drawing,
)
from mpfedcl.report.figures import style_of
from small_experiments import Json

Values = dict[str, list[float | None]]


def groups_of(values: Values) -> list[Json]:
    """Return groups as a document has them, with these accuracies per seed."""
    clients = [{"name": each, "accuracy": 50.0} for each in ("north", "south")]
    return [
        {
            "name": name,
            "style": style_of(name),
            "shared_test": True,
            "end": dict.fromkeys(TESTS, numbers),
            "seeds": [*range(len(numbers))],
            "diverged": [False] * len(numbers),
            "bytes": {"up": 0 if name == "local" else 10**6},
            "seconds": {"train": 1.0},
            "curves": {"accuracy": {test: {} for test in TESTS}, "virtual_seconds": None},
            "judged_by": dict.fromkeys(TESTS, "global_classifier"),
            "calibration": dict.fromkeys(TESTS),
            "one_shot": False,
            "runs": [SimpleNamespace(num_clients=2, described={"clients": clients})],
        }
        for name, numbers in values.items()
    ]


THREE: Values = {
    "fedavg": [50.0, 52.0, 57.0],
    "mp-fedcl": [61.0, 60.0, 71.0],
    "local": [30.0, None, 33.0],
}


def points(axes: Axes, row: float) -> list[tuple[float, str]]:
    """Return what stands in a row of a figure: places and markers, of lines of one point."""
    lines: list[Any] = list(axes.lines)
    return [
        (float(line.get_xdata()[0]), str(line.get_marker()))
        for line in lines
        if len(line.get_xdata()) == 1
        and math.isclose(line.get_ydata()[0], row)
        and line.get_marker() != "None"
    ]


def texts(figure: Figure) -> str:
    found: Any = figure._suptitle  # type: ignore[attr-defined]
    return str(found.get_text()).replace("\n", " ")


def test_every_seed_is_a_mark_and_a_diverged_one_a_cross() -> None:
    groups = groups_of(THREE)
    groups[0]["diverged"] = [False, False, True]
    drawn = seeds_drawing(groups).figure()
    (axes,) = drawn.axes
    assert [x for x, marker in points(axes, 1) if marker != "|"] == [61, 60, 71]
    # Seed 2 of fedavg has kept a model; seed 1 of local has no number, and stands left of 0.
    assert [x for x, marker in points(axes, 0) if marker == "x"] == [57]
    (lost,) = [x for x, marker in points(axes, 2) if marker == "x"]
    assert lost < 0
    assert "standard deviation over seeds (ddof 1)" in texts(drawn)
    assert "a seed that diverged" in texts(drawn)


def test_the_forest_has_the_intervals_of_a_paired_t_test() -> None:
    groups = groups_of(THREE)
    drawing = differences_drawing(groups)
    assert drawing
    drawn = drawing.figure()
    (axes,) = drawn.axes
    expected = stats.ttest_rel(THREE["mp-fedcl"], THREE["fedavg"]).confidence_interval(0.95)
    lines: list[Any] = list(axes.lines)
    bar = next(line for line in lines if len(line.get_xdata()) == 2 and line.get_linewidth() > 2)
    assert list(bar.get_xdata()) == pytest.approx([expected.low, expected.high], abs=1e-3)
    # Its seeds stand below it.
    assert sorted(x for x, _ in points(axes, 0.24)) == [8, 11, 14]
    assert "Difference in accuracy to fedavg" in texts(drawn)
    assert "95 % interval" in texts(drawn)
    assert [each.get_text() for each in axes.get_yticklabels()] == ["mp-fedcl", "local"]


def test_one_seed_has_no_interval_and_one_method_no_difference() -> None:
    drawing = differences_drawing(groups_of({"a": [1.0], "b": [3.0]}))
    assert drawing
    drawn = drawing.figure()
    assert points(drawn.axes[0], 0)[0][0] == 2
    assert "no interval" in texts(drawn)
    assert differences_drawing(groups_of({"a": [1.0]})) is None


@pytest.mark.whole
def test_all_figures_with_and_without_probabilities(tmp_path: Path) -> None:
    groups = groups_of(THREE)
    drawn = comparison_drawings(groups, is_ranked=True)
    assert [*drawn] == ["accuracy", "seeds", "differences", "clients", "costs"]
    found = {"error": "4.0", "bins": [[10.0, 5.0, 0.4], [30.0, 29.0, 0.95]]}
    groups[0]["calibration"] = dict.fromkeys(TESTS, found)
    drawn = comparison_drawings(groups, is_ranked=True)
    assert "reliability" in drawn
    assert "differences" not in comparison_drawings(groups, is_ranked=False)
    for name, drawing in drawn.items():
        drawing.save(tmp_path / f"{name}.png")
        assert all(each.startswith("<svg ") for each in drawing.svgs())


# Clients


def test_named_clients_are_columns_the_worst_first() -> None:
    found = client_grid([{"north": [80.0, 60.0], "south": [40.0, None]}])
    assert found["columns"] == ["south", "north"]
    assert found["values"] == [[40, 70]]


def test_clients_of_a_partition_are_sorted_in_each_run() -> None:
    """With another seed client-0 is another client: its mean over seeds would hide the worst."""
    found = client_grid([{"client-0": [0.0, 100.0], "client-1": [100.0, 0.0]}])
    assert found["values"] == [[0, 100]]
    assert found["columns"] == ["worst", "best"]
    alone = client_grid([{"client-0": [9.0], "client-1": [3.0]}])
    assert alone["columns"] == ["client-1", "client-0"]


def test_a_thousand_clients_are_few_columns() -> None:
    values = {f"client-{n}": [float(n) / 10, None] for n in range(1000)}
    found = client_grid([values, {"client-0": [None]}])
    assert len(found["columns"]) == 20 < MOST_CLIENTS
    assert found["values"][0] == pytest.approx([99.9 * rank / 19 for rank in range(20)])
    assert all(map(math.isnan, found["values"][1]))


# The page


def test_the_page_has_differences_clients_and_looks(tmp_path: Path) -> None:
    path = write_comparison(tmp_path / "both", ("fedavg", "mp-fedcl"), (0, 1, 2))
    document = document_of(path)
    (section,) = document["sections"]
    # The difference is 10 for every seed.
    differences = load(path).frame("differences", "columns")
    assert (differences["method"], differences["than"]) == (["fedavg"] * 2, ["mp-fedcl"] * 2)
    for name in ("difference", "low", "high"):
        assert differences[name] == pytest.approx([-10] * 2)
    heat = describe_heat(section["groups"])
    assert heat
    assert heat["columns"] == ["worst", "50 %", "best"]
    assert heat["values"] == [pytest.approx([29, 36, 43])] * 2
    assert [group["style"].color for group in groups_in(document)] == [2, 1]
    fairness = section["tables"][1]
    assert [cell["text"] for cell in fairness["rows"][0]][1:4] == ["29.0(0.0)"] * 2 + ["43.0(0.0)"]


def test_a_diverged_seed_is_named_on_the_page(tmp_path: Path) -> None:
    path = write_comparison(tmp_path / "both", ("fedavg", "local"), (0, 1, 2))
    rounds = path / "local-seed1" / "rounds.jsonl"
    text = rounds.read_text().splitlines()
    text[-1] = text[-1].replace('"unchanged": false', '"unchanged": true')
    text[-1] = text[-1].replace('"rejected": {}', '"rejected": {"client-0": "loss is nan"}')
    rounds.write_text("\n".join(text) + "\n")
    document = document_of(path)
    assert [group["diverged"] for group in groups_in(document)] == [
        [False] * 3,
        [False, True, False],
    ]
    notes = " ".join(document["sections"][0]["tables"][0]["notes"])
    assert "Diverged: local, seed 1." in notes
