"""The section of a search: every setting tried, at every step, and what was chosen."""

import html
from pathlib import Path
from typing import Any

import pytest
from report_documents import cell_texts, document_of

from handwritten_runs import HOSTILE, write_json, write_tuning
from mpfedcl.core.errors import InvalidInput
from mpfedcl.report.html import render_page

Json = dict[str, Any]


def section_of(path: Path) -> Json:
    (section,) = document_of(path)["sections"]
    return dict(section)


def write_both(path: Path, **changes: Any) -> Path:
    """Write the searches of two methods as `mpfedcl tune` does, the second with changes."""
    write_tuning(path / "fedavg", "fedavg")
    write_tuning(path / "local", "local", **changes)
    return path


def test_every_setting_is_shown_with_its_scores_and_its_end(tmp_path: Path) -> None:
    write_tuning(tmp_path, "fedavg")
    (search,) = section_of(tmp_path)["searches"]
    table = search["table"]
    assert table["columns"] == [
        "trial",
        "hyperparameters",
        "round 1",
        "round 2",
        "round 4",
        "outcome",
    ]
    # The longest first; a dash is a missing score, a blank is no run.
    assert cell_texts(table) == [
        ["2", "train.lr 0.1, contrast.weight 3.0", "44.0", "55.0", "66.0", "chosen"],
        ["0", "defaults", "40.0", "50.0", "60.0", "ran to the end"],
        ["1", "train.lr 0.03", "42.0", "52.0", "", "stopped after round 2"],
        ["4", "contrast.weight 3.0", "41.0", "", "", "stopped after round 1"],
        ["3", "train.lr 0.3", "-", "", "", "stopped after round 1"],
    ]
    assert [row[0].get("strong") for row in table["rows"]] == [True] + 4 * [False]
    assert table["notes"][0] == (
        "Search space: train.lr 0.01, 0.03, 0.1, 0.3; contrast.weight 1.0, 3.0. "
        "Defaults: train.lr 0.01, contrast.weight 1.0."
    )


def test_lines_end_at_the_round_of_the_stop(tmp_path: Path) -> None:
    write_tuning(tmp_path, "fedavg")
    (axes,) = section_of(tmp_path)["searches"][0]["figure"].figure().axes
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines] == [
        ([1, 2, 4], [40.0, 50.0, 60.0]),
        ([1, 2], [42.0, 52.0]),
        ([1, 2, 4], [44.0, 55.0, 66.0]),
        ([], []),
        ([1], [41.0]),
    ]


def test_the_chosen_values_of_all_methods_and_the_defaults(tmp_path: Path) -> None:
    section = section_of(write_both(tmp_path))
    assert section["title"] == "Tuning of 2 methods on mnist-sample"
    chosen = ["train.lr 0.1, contrast.weight 3.0", "66.0", "1.9", "60.0", "5", "13"]
    assert cell_texts(section["tables"][0]) == [["fedavg", *chosen], ["local", *chosen]]
    setting, rule, choice = section["about"]
    assert setting == "mnist-sample, label skew Dir(0.05), 4 rounds."
    assert rule.startswith(
        "5 trials ran to round 1, the best 3 to round 2, the best 2 to round 4, and the defaults "
        "always to the end, by 20 % of each client's training samples, seed 7."
    )
    assert "test samples were not used" in choice


def test_searches_that_differ_say_their_own_rule(tmp_path: Path) -> None:
    section = section_of(write_both(tmp_path, validation=0.1))
    assert "seed 7 (fedavg)" in section["about"][1]
    assert "by 10 % of each client's training samples, seed 7 (local)" in section["about"][1]


def test_the_folder_of_one_method_is_enough(tmp_path: Path) -> None:
    whole = section_of(write_both(tmp_path))
    alone = section_of(tmp_path / "local")
    for name in ("title", "table"):
        assert alone["searches"][0][name] == whole["searches"][1][name]
    assert alone["title"] == "Tuning of local on mnist-sample"


def test_without_any_score_there_is_no_chart(tmp_path: Path) -> None:
    content = write_tuning(tmp_path, "fedavg")
    for trial in content["trials"]:
        trial["scores"] = dict.fromkeys(trial["scores"])
    write_json(tmp_path / "tuning.json", content | {"standard_error": None, "chosen": 0})
    section = section_of(tmp_path)
    assert section["searches"][0]["figure"] is None
    assert cell_texts(section["tables"][0])[0][1:5] == ["defaults", "-", "-", "-"]


def test_hostile_names_are_only_text(tmp_path: Path) -> None:
    content = write_tuning(tmp_path, "fedavg")
    content["trials"][1]["changes"] = {HOSTILE[0]: HOSTILE[1]}
    write_json(tmp_path / "tuning.json", content)
    page = render_page(document_of(tmp_path))
    assert HOSTILE[0] not in page
    assert html.escape(HOSTILE[1], quote=False) in page


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"chosen": 9}, "chosen is 9"),
        ({"rungs": []}, "rungs are missing"),
        ({"trials": []}, "chosen is 2"),
        ({"base": {"rounds": 0}}, "rounds is 0"),
        ({"base": {"unheard": 1}}, "unheard is not a setting"),
        ({"predictor": "by hand"}, "predictor is wrong"),
        ({"format": 9}, "format 9"),
    ],
)
def test_a_damaged_search_is_told_in_one_sentence(tmp_path: Path, changes: Json, says: str) -> None:
    write_json(tmp_path / "tuning.json", write_tuning(tmp_path, "fedavg") | changes)
    with pytest.raises(InvalidInput, match=says) as refusal:
        section_of(tmp_path)
    assert "\n" not in str(refusal.value)
    assert "tuning.json" in str(refusal.value)


@pytest.mark.parametrize("text", ["{", "3", '{"methods": {}}'])
def test_what_is_no_search_at_all(tmp_path: Path, text: str) -> None:
    (tmp_path / "tuning.json").write_text(text)
    with pytest.raises(InvalidInput, match=r"tuning\.json"):
        section_of(tmp_path)
