"""A table of the paper inside a report: ours and theirs."""

from pathlib import Path
from typing import Any

import pytest
from report_documents import cell_texts, document_of

from handwritten_runs import paper_result, write_json
from small_experiments import Json


def test_a_paper_table_has_ours_and_theirs(tmp_path: Path) -> None:
    write_json(tmp_path / "result.json", paper_result())
    (section,) = document_of(tmp_path)["sections"]
    paper, tuned = section["tables"]
    assert paper["columns"] == ["", "MNIST", "Digit-5"]
    assert cell_texts(paper) == [["FedAvg", "77.0(0.8)", "-"], ["MP-FedCL", "79.0(0.8)", "-"]]
    assert paper["rows"][0][1]["note"] == "paper 66.4(2.89), +10.6"
    assert paper["rows"][1][1] == {
        "text": "79.0(0.8)",
        "mark": "best",
        "note": "paper 79.9(3.76), -0.9",
    }
    assert cell_texts(tuned) == [["MP-FedCL", "90.0"]]
    assert "global test set" in tuned["caption"]
    assert section["figures"][0]["lines"][0]["mean"] == [70.0, 80.0, None]


def test_what_the_tuned_track_was_given_is_a_table(tmp_path: Path) -> None:
    scores = {"score": 71.26, "default_score": None, "standard_error": 2.0}
    chosen = [
        {"row": "mp", "set": "Digit-5", "changes": {"contrast__weight": 3.0}, **scores},
        {"row": "fedavg", "set": "Digit-5", "changes": {}, **scores},
    ]
    write_json(tmp_path / "result.json", paper_result(chosen=chosen))
    (section,) = document_of(tmp_path)["sections"]
    assert cell_texts(section["tables"][-1]) == [
        ["FedAvg", "Digit-5", "the defaults", "71.3", "2.0", "-"],
        ["MP-FedCL", "Digit-5", "contrast.weight 3.0", "71.3", "2.0", "-"],
    ]


def paper_cells(tmp_path: Path, *cells: Json, **changes: Any) -> Json:
    """Return the section of a table with these cells in a row of its own each."""
    whole = {
        "track": "paper",
        "test": "local_test",
        "predictor": "global_classifier",
        "column": "mnist",
    }
    given = [{**whole, "row": f"r{place}", **cell} for place, cell in enumerate(cells)]
    rows = [{"key": cell["row"], "title": cell["row"]} for cell in given]
    write_json(tmp_path / "result.json", paper_result(cells=given, rows=rows, **changes))
    section: Json = document_of(tmp_path)["sections"][0]
    return section


def test_a_seed_without_a_value_leaves_no_difference(tmp_path: Path) -> None:
    published = {"mean": 60.0, "std": None}
    section = paper_cells(tmp_path, {"values": [50.0, None, 52.0], "published": published})
    assert section["tables"][0]["rows"][0][1] == {"text": "-", "note": "paper 60"}


@pytest.mark.parametrize(
    ("better", "words"),
    [
        (("higher", "higher"), "the highest mean of a column"),
        (("lower", "lower"), "the lowest mean of a column"),
        (("lower", "higher"), "the best mean of a column"),
        ((None, None), "the best mean of a column"),
    ],
)
def test_best_is_not_always_highest(
    tmp_path: Path, better: tuple[str | None, str | None], words: str
) -> None:
    cells = [{"values": [9.0], "better": each, "mark": "best"} for each in better]
    (note,) = paper_cells(tmp_path, *cells)["tables"][0]["notes"]
    assert note.startswith(f"best: {words}.")


def test_counts_are_shown_in_full(tmp_path: Path) -> None:
    cell = {"values": [798474.0, 798474.0], "unit": "numbers", "published": {"mean": 798470.0}}
    (row,) = paper_cells(tmp_path, cell)["tables"][0]["rows"]
    assert row[1] == {"text": "798,474", "note": "paper 798,470, +4"}


def test_a_result_that_is_a_picture_says_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "partitions.png").touch()
    section = paper_cells(tmp_path, figures=[], notes=["A note."])
    assert section["tables"] == []
    assert section["notes"] == ["It is a picture: partitions.png in this folder.", "A note."]
    by_classifier = {"values": [1.0], "predictor": "global_classifier"}
    assert paper_cells(tmp_path, by_classifier, notes=[])["notes"] == []
    by_prototype = {"values": [1.0], "predictor": "personal_prototype"}
    (note,) = paper_cells(tmp_path, by_prototype, notes=[])["notes"]
    assert note.startswith("Predicted as in the paper, on every test")


def test_a_quick_table_says_that_it_means_nothing(tmp_path: Path) -> None:
    assert paper_cells(tmp_path, {"values": [1.0]})["warning"] is None
    warning = paper_cells(tmp_path, {"values": [1.0]}, quick=True)["warning"]
    assert warning.startswith("Quick: a few rounds and one seed;")
