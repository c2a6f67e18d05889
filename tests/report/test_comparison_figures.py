"""What the figures of a comparison show: every seed, intervals, diverged seeds, few columns."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from report_documents import document_of
from scipy import stats
from test_document import write_comparison

from mpfedcl.report.comparison_content import MOST_CLIENTS, PARTS, client_grid, sorted_parts
from mpfedcl.report.comparison_figures import comparison_figures
from mpfedcl.report.seed_figures import draw_differences, draw_seeds
from small_experiments import Json


def comparison(values: dict[str, list[float | None]], **more: Any) -> Json:
    """Return what comparison.json would hold."""
    seeds = [*range(len(next(iter(values.values()))))]
    methods = {
        name: {
            "accuracy": numbers,
            "accuracy_global": numbers,
            "accuracy_per_client": {"north": numbers, "south": numbers},
            "bytes": [0 if name == "local" else 10**6] * len(seeds),
            "seconds": [1.0] * len(seeds),
            "diverged": [],
        }
        for name, numbers in values.items()
    }
    return {"seeds": seeds, "methods": methods, "differences": {"level": 0.95}, **more}


THREE: dict[str, list[float | None]] = {
    "fedavg": [50.0, 52.0, 57.0],
    "mp-fedcl": [61.0, 60.0, 71.0],
    "local": [30.0, None, 33.0],
}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """All figures that are written, as they are."""
    found: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: found.append(self))
    return found


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
    found: list[Any] = [figure._suptitle, figure._supxlabel, *figure.texts]  # type: ignore[attr-defined]
    return " ".join(each.get_text() for each in found if each).replace("\n", " ")


def test_every_seed_is_a_mark_and_a_diverged_one_a_cross(drawn: list[Figure]) -> None:
    content = comparison(THREE)
    content["methods"]["fedavg"]["diverged"] = [2]
    draw_seeds(content, "title", Path("seeds.png"))
    (axes,) = drawn[0].axes
    assert [x for x, marker in points(axes, 1) if marker != "|"] == [61, 60, 71]
    # Seed 2 of fedavg has kept a model; seed 1 of local has no number, and stands left of 0.
    assert [x for x, marker in points(axes, 0) if marker == "x"] == [57]
    (lost,) = [x for x, marker in points(axes, 2) if marker == "x"]
    assert lost < 0
    said = texts(drawn[0]).replace("\u00a0", " ")
    assert "standard deviation over seeds (ddof 1)" in said
    assert "a seed that diverged" in said


def test_the_forest_has_the_intervals_of_a_paired_t_test(drawn: list[Figure]) -> None:
    draw_differences(comparison(THREE), "title", Path("differences.png"))
    (axes,) = drawn[0].axes
    expected = stats.ttest_rel(THREE["mp-fedcl"], THREE["fedavg"]).confidence_interval(0.95)
    lines: list[Any] = list(axes.lines)
    bar = next(line for line in lines if len(line.get_xdata()) == 2 and line.get_linewidth() > 2)
    assert list(bar.get_xdata()) == pytest.approx([expected.low, expected.high])
    # Its seeds stand below it.
    assert sorted(x for x, _ in points(axes, 0.24)) == [8, 11, 14]
    assert "reference: fedavg" in texts(drawn[0])
    assert "95 % interval" in texts(drawn[0])
    assert any("1 ✗ without a number" in each.get_text() for each in axes.texts)
    assert [each.get_text() for each in axes.get_yticklabels()] == ["mp-fedcl", "local"]


def test_another_reference_and_one_seed(drawn: list[Figure]) -> None:
    draw_differences(comparison({"a": [1.0], "b": [3.0]}), "t", Path("d.png"), reference="b")
    assert points(drawn[0].axes[0], 0)[0][0] == -2
    assert "no interval" in texts(drawn[0])


def draw_all(content: Json, folder: Path) -> set[str]:
    """Draw what there is into a folder; return the names of the files."""
    folder.mkdir()
    for name, draw in comparison_figures(content, "title").items():
        draw(folder / f"{name}.png")
    return {path.stem for path in folder.iterdir()}


def test_all_figures_with_and_without_what_is_new(tmp_path: Path) -> None:
    # Runs of an older version have no bins.
    drawn = draw_all(comparison(THREE), tmp_path / "before")
    assert drawn == {"seeds", "differences", "clients", "costs"}
    content = comparison(THREE)
    found = {"error": [4.0], "bins": [[10.0, 5.0, 0.4], [30.0, 29.0, 0.95]]}
    content["methods"]["fedavg"]["calibration"] = {"local_test": found, "global_test": found}
    assert "reliability" in draw_all(content, tmp_path / "now")


# Clients


def per_client(values: Mapping[str, Sequence[float | None]]) -> Json:
    return {"methods": {"one": {"accuracy_per_client": values}}}


def test_named_clients_are_columns_the_worst_first() -> None:
    found = client_grid(per_client({"north": [80.0, 60.0], "south": [40.0, None]}))
    assert found.columns == ["south", "north"]
    assert found.rows == {"one": [40, 70]}


def test_clients_that_are_dealt_anew_are_sorted_in_each_run() -> None:
    """With another seed client-0 is somebody else: its mean over seeds would hide the worst."""
    found = client_grid(per_client({"client-0": [0.0, 100.0], "client-1": [100.0, 0.0]}))
    assert found.rows == {"one": [0, 100]}
    assert found.columns == ["worst", "best"]
    alone = client_grid(per_client({"client-0": [9.0], "client-1": [3.0]}))
    assert alone.columns == ["client-1", "client-0"]


def test_a_thousand_clients_are_few_columns() -> None:
    values = {f"client-{n}": [float(n) / 10, None] for n in range(1000)}
    found = client_grid(per_client(values))
    assert len(found.columns) == PARTS < MOST_CLIENTS
    assert found.rows["one"][0] == pytest.approx(sum(range(50)) / 500)
    assert found.rows["one"][-1] == pytest.approx(sum(range(950, 1000)) / 500)


def test_parts_of_fewer_numbers_than_parts() -> None:
    found = sorted_parts([3.0, None, 1.0, math.nan], parts=4)
    assert [each for each in found if not math.isnan(each)] == [1, 3]
    assert len(found) == 4


# The page


def test_the_page_has_differences_clients_and_looks(tmp_path: Path) -> None:
    path = write_comparison(tmp_path / "both", ("fedavg", "mp-fedcl"), (0, 1, 2))
    document = document_of(path)
    (section,) = document["sections"]
    first = section["differences"]["tests"]["local_test"]["first"]
    assert first["reference"] == 0
    # The difference is 10 for every seed.
    assert first["rows"] == [
        {"group": 1, "mean": 10, "low": 10, "high": 10, "seeds": [10] * 3, "lost": [False] * 3}
    ]
    assert section["differences"]["tests"]["local_test"]["best"]["reference"] == 1
    assert section["heat"]["columns"] == ["worst", "2", "best"]
    assert section["heat"]["values"] == [[29, 36, 43]] * 2
    assert [group["style"]["color"] for group in document["groups"]] == [2, 1]
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
    assert [group["diverged"] for group in document["groups"]] == [
        [False] * 3,
        [False, True, False],
    ]
    notes = " ".join(document["sections"][0]["tables"][0]["notes"])
    assert "Diverged: local, seed 1." in notes
    (row,) = document["sections"][0]["differences"]["tests"]["local_test"]["first"]["rows"]
    assert row["lost"] == [False, True, False]
