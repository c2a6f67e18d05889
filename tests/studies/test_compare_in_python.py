"""`mpfedcl.compare`: the comparison of the command, from Python."""

import json
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev

import pytest
from torch import nn

from comparison_command import MATCHED, METHODS, SEEDS, modified
from mpfedcl import Experiment, InvalidInput, compare
from mpfedcl.methods import find_method
from small_experiments import Json, Say, assert_same_run, read_summary, small

pytestmark = pytest.mark.whole


def without_seconds(path: Path) -> Json:
    content: Json = json.loads((path / "comparison.json").read_text())
    for entry in content["methods"].values():
        assert len(entry.pop("seconds")) == len(SEEDS)
    return content


def _refuse(*_: int) -> None:
    pytest.fail("a finished run was run again")


def test_compare_equals_the_command(images: Path, compared: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    base = small(images, **MATCHED)
    found = compare(
        base, METHODS, tmp_path / "mine", seeds=SEEDS, on_progress=lambda *both: told.append(both)
    )
    runs = len(METHODS) * len(SEEDS)
    assert told == [(done, 2 * runs) for done in range(1, 2 * runs + 1)]
    assert without_seconds(found.path) == without_seconds(compared)
    names = {path: {each.name for each in path.iterdir()} for path in (found.path, compared)}
    assert names[found.path] == names[compared]
    for run in found.runs:
        assert_same_run(run.path, compared / run.path.name)
        assert run.accuracy == read_summary(run.path)["accuracy"]
        assert run.accuracy_global == read_summary(run.path)["accuracy_global"]
    # Once more, nothing is run.
    before = {name: time for name, time in modified(found.path).items() if "-seed" in name}
    again = compare(base, METHODS, found.path, seeds=SEEDS, on_progress=_refuse)
    assert {name: time for name, time in modified(found.path).items() if "-seed" in name} == before
    assert repr(again) == repr(found)


def test_automatic_choices_are_no_other_settings(images: Path, tmp_path: Path) -> None:
    """Each finds out how often it is evaluated; the same call still knows them again."""
    base = small(images, evaluate_every="auto", workers="auto", rounds=4)
    found = compare(base, ["fedavg", "local"], tmp_path / "both", seeds=[0])
    chosen = [each.experiment.evaluate_every for each in found.runs]
    assert "auto" not in chosen
    again = compare(base, ["fedavg", "local"], found.path, seeds=[0], on_progress=_refuse)
    assert repr(again) == repr(found)
    with pytest.raises(InvalidInput, match="other settings"):
        compare(base.replace(evaluate_every=3), ["fedavg", "local"], found.path, seeds=[0])


def test_differences_by_hand(images: Path, compared: Path, said: Say) -> None:
    said("report", compared, "--csv")
    lines = (compared / "differences.csv").read_text().splitlines()
    rows = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:]]
    assert [(row["test"], row["method"], row["than"]) for row in rows] == [
        (test, *pair) for test in ("local_test", "global_test") for pair in combinations(METHODS, 2)
    ]
    for row in rows:
        name = "accuracy" if row["test"] == "local_test" else "accuracy_global"
        one, other = (
            [read_summary(compared / f"{row[key]}-seed{seed}")[name] for seed in SEEDS]
            for key in ("method", "than")
        )
        gaps = [a - b for a, b in zip(one, other, strict=True)]
        assert float(row["difference"]) == pytest.approx(fmean(gaps), abs=1e-4)
        # Student's t of one degree of freedom, over the root of two seeds.
        reach = 12.7062 * stdev(gaps) / 2**0.5
        assert float(row["high"]) - float(row["low"]) == pytest.approx(2 * reach, abs=1e-2)


def test_methods_that_do_not_fit_are_left_out_with_a_warning(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of all methods two: all would be forty runs.
    few = {name: find_method(name) for name in ("local", "ditto")}
    monkeypatch.setattr("mpfedcl.studies.comparison.built_in_methods", lambda: few)
    base = small(images, rounds=1, share_model=False)
    with pytest.warns(UserWarning, match="^ditto is left out: share_model is False"):
        found = compare(base, "all", tmp_path / "all", seeds=[0])
    assert found.methods == ["local"]


@pytest.mark.parametrize(
    ("methods", "changes", "sentence"),
    [
        ("fedavgg", {}, "fedavgg"),
        ([], {}, "methods is"),
        ("local", {"seeds": []}, "seeds is"),
        ("local", {"jobs": -1}, "jobs is -1; it must be auto, or 1 or more"),
    ],
)
def test_bad_arguments_are_refused(
    tmp_path: Path, methods: list[str], changes: Json, sentence: str
) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        compare(Experiment(), methods, tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


def test_runs_of_a_model_that_cannot_be_imported_stay_in_this_process(
    images: Path, tmp_path: Path
) -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    base, methods = small(images, rounds=1, model__hidden=()), ["fedavg", "local"]
    with pytest.raises(InvalidInput, match="jobs is 2; it must be 1, because other processes can"):
        compare(base, methods, tmp_path / "two", seeds=[0], jobs=2, model=module)
    found = compare(base, methods, tmp_path / "auto", seeds=[0], jobs="auto", model=module)
    assert found.methods == methods


def test_default_folder(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = compare(small(images, rounds=1), "local", seeds=[0])
    assert str(found.path) == "runs/comparison"
    assert "one seed" in repr(found)


def test_smallest_value_of_an_error_is_best(images: Path, tmp_path: Path, said: Say) -> None:
    base = small(images, metric="nll", **MATCHED)
    found = compare(base, ["fedavg", "local", "fedprox"], tmp_path / "all", seeds=[0])
    content = json.loads((found.path / "comparison.json").read_text())
    differences = rows_of(found.frame("differences", library="columns"))
    metrics = rows_of(found.frame("metrics", library="columns"))
    for test in ("local_test", "global_test"):
        values = {
            each.experiment.method: read_summary(each.path)["metrics"][test]["nll"]
            for each in found.runs
        }
        assert content["differences"][test]["best"] == min(values, key=lambda name: values[name])
        listed = [each for each in metrics if each["judged"] and each["test"] == test]
        assert {r["method"]: r["value"] for r in listed if r["client"] is None} == values
        for name, entry in content["methods"].items():
            assert [each["nll"] for each in entry["metrics"][test]] == [values[name]]
        for row in differences:
            if row["test"] == test:
                # What is below the other one is better.
                advantage = values[row["than"]] - values[row["method"]]
                assert row["difference"] == pytest.approx(advantage)
    assert "NLL of the last round: one seed" in repr(found)
    for each in found.runs:
        assert each.accuracy == read_summary(each.path)["accuracy"]
    code, out, _ = said("report", found.path)
    assert code == 0, out
    page = (found.path / "report.html").read_text()
    assert "Metrics of the primary predictors on the local test set, last round" in page


def rows_of(columns: Json) -> list[Json]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
