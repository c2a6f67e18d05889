"""A report of methods with a reading for each test, and of one-shot methods."""

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from report_documents import document_of, groups_in

from handwritten_runs import VERSIONS, Json, accuracy_of, write_json, write_run
from mpfedcl.methods import PREDICTORS


def write_one_shot(path: Path, **settings: Any) -> Path:
    """Write a run of a method that trains nothing, with a reading for each test."""
    write_run(path, rounds=1, method="fedgauss", **settings)
    judged = {"predictor": "personal_classifier_prior", "predictor_global": "global_classifier"}
    write_json(path / "summary.json", {"format": 2, **judged, "versions": VERSIONS})
    return path


def test_one_shot_beside_sixty_rounds_is_ranked(tmp_path: Path) -> None:
    write_run(tmp_path / "fedavg", rounds=6, method="fedavg")
    write_one_shot(tmp_path / "fedgauss", encoder__name="random-filters")
    section, *_ = document_of(tmp_path / "fedavg", tmp_path / "fedgauss")["sections"]
    headline = section["tables"][0]
    assert not any("None is marked" in note for note in headline["notes"])
    assert "One-shot, without rounds of training: fedgauss." in headline["notes"]
    assert any("none (fedavg) and random-filters (fedgauss)" in note for note in headline["notes"])
    assert headline["rows"][1][0]["note"] == "personal, classifier + prior; global, classifier"
    first = fmean(accuracy_of(1, client) for client in range(3))
    # As written: 10 less on the global test set, and one less from reading to reading.
    assert [cell["text"] for cell in headline["rows"][1][1:3]] == [
        f"{first - PREDICTORS.index('personal_classifier_prior'):.1f}",
        f"{first - 10 - PREDICTORS.index('global_classifier'):.1f}",
    ]


def test_an_encoder_that_is_not_the_methods_own_is_an_obstacle(tmp_path: Path) -> None:
    write_run(tmp_path / "fedavg", rounds=6, method="fedavg")
    write_one_shot(tmp_path / "fedgauss", encoder__name="resnet18")
    section, *_ = document_of(tmp_path / "fedavg", tmp_path / "fedgauss")["sections"]
    assert any(
        "None is marked as best: encoders differ." in n for n in section["tables"][0]["notes"]
    )


def test_each_test_has_its_own_reading(tmp_path: Path) -> None:
    document = document_of(write_one_shot(tmp_path / "run"))
    (group,), (section,) = groups_in(document), document["sections"]
    assert group["one_shot"]
    assert group["judged_by"] == {
        "local_test": "personal_classifier_prior",
        "global_test": "global_classifier",
    }
    strong = {
        row[0]["text"]: [cell["strong"] for cell in row[1:]] for row in section["tables"][0]["rows"]
    }
    assert strong.pop("personal, classifier + prior") == [True, False]
    assert strong.pop("global, classifier") == [False, True]
    assert not any(any(each) for each in strong.values())
    assert "one-shot" in section["about"][0]


@pytest.mark.parametrize(
    ("settings", "judged"),
    [
        ({"partition__test": "matched"}, ("personal_prototype", "global_prototype")),
        ({"partition__test": "shared"}, ("global_prototype", "global_prototype")),
        ({"share_model": False}, ("personal_prototype", "personal_prototype")),
    ],
)
def test_the_readings_of_a_run_that_has_not_ended(
    settings: Json, judged: tuple[str, str], tmp_path: Path
) -> None:
    path = write_run(tmp_path / "run", finished=False, **settings)
    (group,) = groups_in(document_of(path))
    assert tuple(group["judged_by"].values()) == judged
