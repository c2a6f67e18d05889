"""The paper's tables and figures: what is run, what is computed from it, and the page."""

import ast
import json
from pathlib import Path
from typing import Any

import numpy
import pytest

import mpfedcl
import mpfedcl.methods
from mpfedcl import Experiment
from reproduction import paper, paper_page
from reproduction.__main__ import STUDIES
from reproduction.items import DOMAINS, ITEMS, METHODS, PREDICTORS, PUBLISHED, Cell, Item, Sets
from reproduction.paper import MEASURES, Finished, Paper, reproduce
from reproduction.runs import Runs
from reproduction.tables import DOCS, mark_best, markdown, mean_std, paired_difference

REPRODUCTION = DOCS.parent / "reproduction"


@pytest.fixture
def all_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sets:
    """All sets of the paper, as far as their files' names go."""
    for dataset, domains in DOMAINS.items():
        for domain in domains:
            (tmp_path / dataset).mkdir(exist_ok=True)
            (tmp_path / dataset / f"{domain}.npz").touch()
    monkeypatch.setenv("MPFEDCL_DATA", str(tmp_path))
    return Sets()


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> Sets:
    """Only the digits inside the package."""
    monkeypatch.delenv("MPFEDCL_DATA", raising=False)
    return Sets()


# The table of experiments


def test_only_the_public_api_is_used() -> None:
    for file in REPRODUCTION.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mpfedcl"):
                public = {"mpfedcl": mpfedcl.__all__, "mpfedcl.methods": mpfedcl.methods.__all__}
                assert node.module in public, file
                assert {each.name for each in node.names} <= {*public[node.module]}, file
            if isinstance(node, ast.Import):
                names = [each.name for each in node.names if each.name.startswith("mpfedcl")]
                assert set(names) <= {"mpfedcl"}, file


def test_every_study_has_a_module() -> None:
    for name in STUDIES:
        assert (REPRODUCTION / f"{name.replace('-', '_')}.py").is_file()


def test_every_published_value_has_a_cell(all_data: Sets) -> None:
    def count(values: Any) -> int:
        return sum(map(count, values.values())) if isinstance(values, dict) else 1

    tables = {
        "label": count(PUBLISHED["label_skew"]),
        "feature": count(PUBLISHED["feature_skew_digits"]),
        "efficiency": count(PUBLISHED["efficiency"]),
        "time": count(PUBLISHED["equal_time"]),
        "sent": 2 * len(PUBLISHED["sent"]),
    }
    for name, wanted in tables.items():
        cells = [cell for cell in ITEMS[name](all_data).cells if cell.published]
        assert len(cells) == wanted, name
        assert {cell.track for cell in cells} == {"paper"}


def test_rounds_of_the_paper(all_data: Sets) -> None:
    cells = [cell for cell in ITEMS["label"](all_data).cells if cell.track == "paper"]
    rounds = {cell.row: cell.experiment.rounds for cell in cells}
    assert rounds == {**dict.fromkeys(METHODS, 60), "fedavg": 110, "fedprox": 100, "fedproto": 100}
    tuned = [cell for cell in ITEMS["label"](all_data).cells if cell.track == "tuned"]
    assert {cell.experiment.rounds for cell in tuned} == {60}


def test_stand_ins_have_no_published_values(no_data: Sets) -> None:
    assert no_data.chosen == {"mnist": "mnist-sample"}
    assert len(no_data.missing) == 4
    for build in ITEMS.values():
        assert not any(cell.published for cell in build(no_data).cells)


def test_predictors_are_those_of_the_paper() -> None:
    assert PREDICTORS.keys() == METHODS.keys()
    for method, predictor in PREDICTORS.items():
        assert mpfedcl.find_method(method).primary_predictor == predictor


# From records to values


def record(number: int, accuracy: float | None, seconds: float = 1.0) -> dict[str, Any]:
    table = {"local_test": {"p": accuracy}, "global_test": {"p": accuracy and accuracy / 2}}
    return {
        "round": number,
        "accuracy": None if accuracy is None else table,
        "accuracy_per_client": {"a": accuracy},
        "seconds": {"train": seconds, "evaluate": 100.0, "checkpoint": 100.0},
        "bytes": {"up": 1e6, "down": 2e6},
        "sent": {"parameters": 7},
    }


RUN = Finished([record(n, a) for n, a in enumerate([None, 20.0, None, 40.0, 30.0], 1)], "p")


@pytest.mark.parametrize(
    ("measure", "argument", "wanted"),
    [
        ("last", "local_test", 30.0),
        ("last", "global_test", 15.0),
        ("client", "a", 30.0),
        ("after", 4, 40.0),
        ("after", 3, None),
        ("after", 60, 30.0),
        ("rounds to", 25, 4),
        ("rounds to", 50, None),
        ("megabytes to", 20, 6.0),
        ("megabytes to", 50, None),
        ("sent", "parameters", 7),
    ],
)
def test_measures(measure: str, argument: Any, wanted: float | None) -> None:
    assert MEASURES[measure].compute(RUN, argument, None) == wanted


def test_accuracy_at_the_same_training_time() -> None:
    def compare(run: Finished, other: Finished) -> float | None:
        return MEASURES["same time"].compute(run, None, other)

    slow = Finished([record(n, 10.0 * n, seconds=2.0) for n in range(1, 6)], "p")
    # Two rounds of two seconds fit into five; evaluation and checkpoints do not count.
    assert compare(slow, RUN) == 20.0
    assert compare(RUN, RUN) == 30.0
    assert compare(RUN, slow) == 30.0


def test_paired_differences_and_marks() -> None:
    found = paired_difference([3.0, 4.0, 5.0], [1.0, 2.0, 3.5])
    assert found is not None
    assert found.mean == pytest.approx(11 / 6)
    # t(0.975, 2) = 4.303, the deviation of 2, 2, 1.5 is 0.2887.
    assert found.high - found.mean == pytest.approx(4.3027 * 0.288675 / 3**0.5, rel=1e-4)
    assert found.verdict == "better"
    assert paired_difference([1.0, None], [None, 2.0]) is None
    values: dict[str, list[float | None]]
    values = {"a": [3.0, 4.0, 5.0], "b": [2.9, 4.1, 4.8], "c": [1.0, 2.0, 3.1], "d": [None, 9, 9]}
    assert mark_best(values) == {"a": "best", "b": "within", "c": None, "d": None}
    assert mark_best({"a": [1.0], "b": [1.0], "c": [0.5]}) == {"a": "best", "b": "best", "c": None}


def test_markdown_and_mean() -> None:
    assert (
        markdown(["", "n"], [["x", "▲1.0(0.5)"]]) == "|  | n |\n| --- | ---: |\n| x | ▲1.0(0.5) |\n"
    )
    assert mean_std([1.0, 3.0]) == "2.0(1.4)"
    assert mean_std([1.0, 3.0], ddof=0) == "2.0(1.0)"
    assert mean_std([1.0, None]) == "-"


# The page


@pytest.mark.parametrize("name", ITEMS)
def test_the_page_shows_the_stored_results(name: str) -> None:
    page = (DOCS / "reproduction.md").read_text(encoding="utf-8")
    assert f"<!-- {name} -->\n\n{paper_page.format_item(name, DOCS)}\n<!-- end -->" in page


@pytest.mark.parametrize("name", ITEMS)
def test_stored_verdicts_follow_from_the_values(name: str) -> None:
    result = json.loads((DOCS / "results" / f"{name}.json").read_text(encoding="utf-8"))
    assert paper.compare_with_others(result) == result["verdicts"]


# A tiny study end to end


def tiny(method: str, **changes: Any) -> Experiment:
    settings = {"clients": 2, "rounds": 3, "model__hidden": (16, 8), "personal_models": True}
    return Experiment(method=method).replace(evaluate_predictors="all", **settings, **changes)


@pytest.mark.thorough
@pytest.mark.whole
def test_a_study_runs_is_resumed_and_is_rendered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both tracks, lines, curves and pictures on the embedded digits."""
    rng = numpy.random.default_rng(0)
    images = rng.integers(0, 255, (60, 28, 28), dtype=numpy.uint8)
    (tmp_path / "data" / "mnist").mkdir(parents=True)
    labels = numpy.arange(60) % 10
    numpy.savez(tmp_path / "data" / "mnist" / "mnist.npz", x_test=images, y_test=labels)
    monkeypatch.setenv("MPFEDCL_DATA", str(tmp_path / "data"))
    runs = {"FedAvg": tiny("fedavg"), "MP-FedCL": tiny("mp-fedcl")}
    cells = [
        Cell(method, "2", tiny(method), ("last", test), "panel", (50.0, 1.0), track)
        for method in ("fedavg", "mp-fedcl")
        for test in ("local_test", "global_test")
        for track in ("paper", "tuned")
    ]
    item = Item(
        "Title",
        "About.",
        {"fedavg": "FedAvg", "mp-fedcl": "MP-FedCL"},
        {"2": "two"},
        tuple(cells),
        compares_tests=True,
        curves={"curves": runs},
        pictures={"embeddings": runs, "partitions": runs},
    )
    monkeypatch.setitem(ITEMS, "tiny", lambda _: item)
    monkeypatch.setattr(paper, "DOCS", tmp_path / "docs")
    quick = Runs(tmp_path / "runs", quick=True)
    reproduce(["tiny"], tmp_path / "out", quick, seeds=(0,))
    docs = tmp_path / "out" / "docs"
    result = json.loads((docs / "results" / "tiny.json").read_text())
    assert [len(each["values"]) for each in result["cells"]] == [1] * len(cells)
    assert {each["row"] for each in result["chosen"]} == {"fedavg", "mp-fedcl"}
    assert result["figures"][0]["lines"][0]["x"][-1] == 3
    for name in ("tiny", "embeddings", "partitions"):
        assert (docs / "images" / "paper" / f"{name}.png").is_file()
    page = (docs / "reproduction.md").read_text()
    assert "| MP-FedCL |" in page
    # A run that is there is not run again; one that is too short is resumed.
    path = quick.path(quick.prepare(runs["FedAvg"]))
    before = (path / "rounds.jsonl").read_text()
    again = Paper(tmp_path / "out", Runs(tmp_path / "runs", quick=True), (0,)).measure("tiny", item)
    assert again["cells"] == result["cells"]
    assert (path / "rounds.jsonl").read_text() == before
    longer = Runs(tmp_path / "runs").records(runs["FedAvg"].replace(rounds=4))
    kept = [json.loads(line)["accuracy"] for line in before.splitlines()]
    assert [each["accuracy"] for each in longer[:3]] == kept
    assert len(longer) == 4
