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

from mpfedcl import load, run
from mpfedcl.methods import TESTS
from mpfedcl.report.document import MOST_CLIENTS, describe_heat
from mpfedcl.report.drawings import comparison_drawings, differences_drawing
from mpfedcl.report.figures import style_of
from small_experiments import Json, read_records, small

Values = dict[str, list[float | None]]


def groups_of(values: Values) -> list[Json]:
    """Return groups as a document has them, with these accuracies per seed."""
    clients = [{"name": each, "accuracy": 50.0} for each in ("north", "south")]
    return [
        {
            "name": name,
            "style": style_of(name),
            "shared_test": True,
            "metric": "accuracy",
            "end": dict.fromkeys(TESTS, numbers),
            "seeds": [*range(len(numbers))],
            "diverged": [False] * len(numbers),
            "bytes": {"up": 0 if name == "local" else 10**6},
            "seconds": {"train": 1.0},
            "curves": {"accuracy": {test: {} for test in TESTS}, "virtual_seconds": None},
            "judged_by": dict.fromkeys(TESTS, "global_classifier"),
            "one_shot": False,
            "runs": [SimpleNamespace(num_clients=2, described={"clients": clients})],
        }
        for name, numbers in values.items()
    ]


def lines_of(drawing: Any) -> dict[str, list[float]]:
    axes = drawing.figure().axes[0]
    return {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}


@pytest.mark.usefixtures("small_models")
def test_rounds_show_the_primary_metric(images: Path, tmp_path: Path) -> None:
    paths = []
    for method in ("fedavg", "local"):
        experiment = small(images, method, rounds=3, metric="nll", evaluate_every=1)
        paths.append(run(experiment, tmp_path / method).path)
    several, one = document_of(*paths), document_of(paths[0])
    for document in (several, one):
        groups = groups_in(document)
        drawing = comparison_drawings(groups, is_ranked=True)["accuracy"]
        assert drawing.title == "NLL per round"
        assert drawing.figure().axes[0].get_ylabel() == "NLL"
        found = lines_of(drawing)
        assert list(found) == ["fedavg", "local"] if len(groups) > 1 else [*found]
        for path, values in zip(paths, found.values(), strict=False):
            records = read_records(path)
            assert values == pytest.approx([each["metric"]["local_test"] for each in records])
    # Groups with several metrics have accuracy in common.
    mixed = [{**groups_in(several)[0], "metric": "macro_f1"}, groups_in(several)[1]]
    assert comparison_drawings(mixed, is_ranked=False)["accuracy"].title == "Accuracy per round"


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
def test_all_figures(tmp_path: Path) -> None:
    groups = groups_of(THREE)
    drawn = comparison_drawings(groups, is_ranked=True)
    assert [*drawn] == ["accuracy", "differences", "clients", "costs"]
    assert "differences" not in comparison_drawings(groups, is_ranked=False)
    for name, drawing in drawn.items():
        drawing.save(tmp_path / f"{name}.png")
        assert all(address.startswith("data:image/svg") for _, address in drawing.images())


# Clients


def groups_with(by_client: list[dict[str, list[float | None]]]) -> list[Json]:
    """Return groups whose clients have these accuracies per seed."""
    groups = []
    for row in by_client:
        seeds = range(max(map(len, row.values())))
        runs = [
            SimpleNamespace(
                num_clients=len(row),
                described={
                    "clients": [{"name": name, "accuracy": row[name][seed]} for name in row]
                },
            )
            for seed in seeds
        ]
        groups.append({"runs": runs, "seeds": [*seeds]})
    return groups


def test_named_clients_are_columns_the_worst_first() -> None:
    found = describe_heat(groups_with([{"north": [80.0, 60.0], "south": [40.0, None]}]))
    assert found
    assert found["columns"] == ["south", "north"]
    assert found["values"] == [[40, 70]]


def test_other_clients_for_each_seed_have_no_columns() -> None:
    """With another seed client-0 is another client: its mean over seeds would hide the worst."""
    assert (
        describe_heat(groups_with([{"client-0": [0.0, 100.0], "client-1": [100.0, 0.0]}])) is None
    )
    alone = describe_heat(groups_with([{"client-0": [9.0], "client-1": [3.0]}]))
    assert alone
    assert alone["columns"] == ["client-1", "client-0"]


def test_many_clients_have_no_columns() -> None:
    values: dict[str, list[float | None]] = {
        f"domain-{n}": [float(n)] for n in range(MOST_CLIENTS + 1)
    }
    assert describe_heat(groups_with([values])) is None


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
