"""From runs to tables: made-up runs whose numbers can be added up by hand."""

from typing import Any

import pytest

from mpfedcl import Experiment
from mpfedcl.report.paper_tables import build_tables
from mpfedcl.studies.paper import measures
from mpfedcl.studies.paper.item import Cell, Curves, FinishedRun, PaperItem, Published, Track
from mpfedcl.studies.paper.results import collect_result

ACCURACY = {
    "mp-fedcl": (70.0, 72.0, 74.0),
    "fedavg": (60.0, 61.0, 65.0),
    "local": (69.0, 75.0, 70.0),
}


def lookup(_track: Track, experiment: Experiment, seed: int) -> FinishedRun:
    value = ACCURACY[experiment.method][seed] + experiment.partition.alpha
    records = [
        {
            "round": number,
            "accuracy": {"local_test": {"personal_prototype": value - 5 + number}},
            "seconds": {"train": 1.0},
        }
        for number in range(1, 6)
    ]
    return FinishedRun(records, "personal_prototype")


def make(axis: str = "", columns: tuple[str, ...] = ("1", "2")) -> PaperItem:
    cells = tuple(
        Cell(
            method,
            column,
            Experiment(method=method).replace(partition__alpha=float(column)),
            measures.OWN_TEST,
            published=Published(50.0, 1.5) if method == "fedavg" else None,
        )
        for method in ACCURACY
        for column in columns
    )
    rows = {"mp-fedcl": "MP-FedCL", "fedavg": "FedAvg", "local": "Local"}
    titles = {column: f"set {column}" for column in columns}
    return PaperItem("made-up", "A table", "About it.", rows, titles, cells, axis)


def test_numbers_are_read_a_seed_and_marked_by_paired_differences() -> None:
    result = collect_result(make(), (0, 1, 2), lookup)
    cell = result["cells"][0]
    assert (cell["row"], cell["column"], cell["values"]) == ("mp-fedcl", "1", [71.0, 73.0, 75.0])
    marks = {c["row"]: c["mark"] for c in result["cells"] if c["column"] == "1"}
    # 10, 11, 9 points ahead of FedAvg: clear. 1, -3, 4 ahead of Local: anybody's.
    assert marks == {"mp-fedcl": "best", "fedavg": None, "local": "within"}


def test_tables_show_ours_and_the_paper_s_beside_them() -> None:
    ours, beside = build_tables(collect_result(make(), (0, 1, 2), lookup))
    assert ours.columns == ["", "set 1", "set 2"]
    assert ours.rows[0] == ["MP-FedCL", "▲73.0(1.6)", "▲74.0(1.6)"]
    assert ours.rows[1] == ["FedAvg", "63.0(2.2)", "64.0(2.2)"]
    assert ours.rows[2][1] == "≈72.3(2.6)"
    assert beside.rows == [["FedAvg", "50.0(1.5)  +13.0", "50.0(1.5)  +14.0"]]


def test_verdicts_say_what_the_seeds_say() -> None:
    said = collect_result(make(), (0, 1, 2), lookup)["verdicts"]
    assert said == [
        "local test set, paper: MP-FedCL against FedAvg: better: set 1 +10.0, set 2 +10.0.",
        "local test set, paper: MP-FedCL against Local: no clear difference: set 1 +0.7, set 2 +0.7.",
    ]
    assert collect_result(make(), (0,), lookup)["verdicts"] == []


def test_one_seed_has_no_deviation() -> None:
    ours, _ = build_tables(collect_result(make(), (1,), lookup))
    assert ours.rows[1] == ["FedAvg", "62.0", "63.0"]


def test_an_axis_turns_the_table_and_draws_lines() -> None:
    result = collect_result(make(axis="alpha"), (0, 1, 2), lookup)
    ours, _ = build_tables(result)
    assert ours.columns == ["alpha", "MP-FedCL", "FedAvg", "Local"]
    assert ours.rows[0][:2] == ["set 1", "73.0(1.6)"]
    (figure,) = result["figures"]
    line = figure["lines"][0]
    assert (line["name"], line["x"]) == ("MP-FedCL", [1.0, 2.0])
    assert line["mean"] == pytest.approx([73.0, 74.0])
    assert line["std"] == pytest.approx([(8 / 3) ** 0.5] * 2)


def test_curves_are_means_by_round() -> None:
    curves = Curves("over rounds", {"MP-FedCL": Experiment().replace(partition__alpha=1.0)})
    item = PaperItem("c", "Curves", "About.", {}, {}, curves=(curves,))
    (figure,) = collect_result(item, (0, 1, 2), lookup)["figures"]
    assert figure["lines"][0]["x"] == [1, 2, 3, 4, 5]
    assert figure["lines"][0]["mean"] == pytest.approx([69.0, 70.0, 71.0, 72.0, 73.0])


def test_a_number_that_a_seed_lacks_is_a_dash() -> None:
    def some(track: Track, experiment: Experiment, seed: int) -> FinishedRun:
        run = lookup(track, experiment, seed)
        last: Any = run.records[-1]
        if seed == 1:
            last["accuracy"]["local_test"]["personal_prototype"] = None
        return run

    ours, beside = build_tables(collect_result(make(), (0, 1, 2), some))
    assert ours.rows[0] == ["MP-FedCL", "-", "-"]
    assert beside.rows[0] == ["FedAvg", "50.0(1.5)", "50.0(1.5)"]


def test_what_was_chosen_for_the_tuned_track_is_shown_method_by_method() -> None:
    result = collect_result(make(), (0, 1, 2), lookup)
    assert len(build_tables(result)) == 2
    scores = {"score": 71.26, "default_score": 60.0, "standard_error": None}
    result["chosen"] = [
        {"row": "fedavg", "set": "one", "changes": {}, **scores},
        {"row": "mp-fedcl", "set": "one", "changes": {"train__lr": 0.3, "a__b": 2}, **scores},
    ]
    assert build_tables(result)[-1].rows == [
        ["MP-FedCL", "one", "lr 0.3, b 2", "71.3", "-", "60.0"],
        ["FedAvg", "one", "the paper's", "71.3", "-", "60.0"],
    ]
