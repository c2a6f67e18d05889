"""Searches: on validation images alone, written down whole, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest

from command_results import without_progress
from mpfedcl import Experiment, InvalidInput, run
from mpfedcl.api import tune
from mpfedcl.report.document import build_document
from mpfedcl.report.result_folders import find_result_folders
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.studies.tuning import Rung, Search, choose_settings, keep_best
from small_experiments import (
    Say,
    flags,
    read_records,
    save_domains_of_vectors,
    save_images,
    small,
)
from tuning_command import BUDGET, METHODS, ROUNDS, content, load, words

pytestmark = pytest.mark.whole

# What is searched, and what comes of it


@pytest.mark.parametrize("method", METHODS)
def test_result_agrees_with_the_records(tuned: Path, method: str) -> None:
    found = load(tuned / method)
    assert found.rungs == [Rung(1, 5), Rung(2, 3), Rung(4, 2)]
    assert len(found.trials) == BUDGET
    running = set(range(BUDGET))
    for rung, following in zip(found.rungs, [*found.rungs[1:], None], strict=True):
        by_hand = {}
        for number in running:
            (folder,) = found.trials[number].runs
            record = read_records(tuned / method / folder)[rung.rounds - 1]
            by_hand[number] = record["accuracy"]["local_test"][found.predictor]
            assert found.trials[number].scores[rung.rounds] == by_hand[number]
        if following:
            kept = set(keep_best(by_hand, following.settings))
            for number in running - kept:
                assert found.trials[number].stopped_after == rung.rounds
                assert list(found.trials[number].scores)[-1] == rung.rounds
                (folder,) = found.trials[number].runs
                assert len(read_records(tuned / method / folder)) == rung.rounds
            running = kept
        else:
            error = found.standard_error
            assert error is not None
            changes = [len(trial.changes) for trial in found.trials]
            assert (found.chosen, found.within) == choose_settings(by_hand, changes, error)
            assert found.score == by_hand[found.chosen]
            assert found.default_score == by_hand[0]
    runs = [each for trial in found.trials for each in trial.runs]
    assert found.rounds_run == sum(len(read_records(tuned / method / each)) for each in runs)
    assert 0 in running


def test_same_budget_and_rungs_for_each_method(tuned: Path) -> None:
    both = [load(tuned / method) for method in METHODS]
    assert len({len(each.trials) for each in both}) == 1
    assert both[0].rungs == both[1].rungs
    assert all(each.trials[0].changes == {} for each in both)


def test_resumed_search_equals_an_uninterrupted_one(
    images: Path, tuned: Path, tmp_path: Path
) -> None:
    """Rungs make no difference to a run: its records are those of a run that never stopped."""
    found = load(tuned / "mp-fedcl")
    trial = found.trials[0]
    experiment = found.base.replace(
        partition__validation=found.validation, seed=0, personal_models=False, **trial.values
    )
    whole = run(experiment, tmp_path / "run")
    for round_number, score in trial.scores.items():
        record = whole.history[round_number - 1]
        assert record["accuracy"]["local_test"][found.predictor] == score


def test_best_settings_are_written_for_run_and_compare(
    images: Path, tuned: Path, tmp_path: Path, said: Say
) -> None:
    for method in METHODS:
        found = load(tuned / method)
        written = Experiment.from_toml(tuned / f"best-{method}.toml")
        assert written == found.best == found.base.replace(**found.chosen_values)
        assert written.partition.validation == 0
        assert written.method == method
        assert (written.rounds, written.evaluate_every, written.personal_models) == (4, 1, True)
    code, out, _ = said("run", tuned / "best-fedavg.toml", "--out", tmp_path / "run", "--json")
    assert code == 0
    assert json.loads(out)["rounds"] == ROUNDS


def test_table_of_chosen_settings(images: Path, tuned: Path, said: Say) -> None:
    before = {each: each.stat().st_mtime_ns for each in tuned.glob("*/*/rounds.jsonl")}
    code, out, err = said(*words(images, tuned))
    assert (code, without_progress(err)) == (0, "")
    assert max(len(line) for line in out.splitlines() if "/" not in line) <= 100
    for method in METHODS:
        found = load(tuned / method)
        (line,) = [line for line in out.splitlines() if line.split()[:1] == [method]]
        assert f"{found.score:.1f}" in line
        assert line.split()[-3:] == [f"{found.default_score:.1f}", "5", str(found.rounds_run)]
    # What is complete is not run again.
    assert {each: each.stat().st_mtime_ns for each in tuned.glob("*/*/rounds.jsonl")} == before


def test_tune_prints_json(images: Path, tuned: Path, said: Say) -> None:
    code, out, _ = said(*words(images, tuned), "--json")
    found = json.loads(out)
    assert (code, found.pop("path")) == (0, str(tuned))
    assert found["methods"] == content(tuned)


def test_another_command_adds_its_methods(images: Path, tmp_path: Path, said: Say) -> None:
    line = ["--budget", 1, "--jobs", 1, "--out", tmp_path, *flags(images, rounds=1)]
    assert said("tune", "--methods", "fedavg", *line)[0] == 0
    first = content(tmp_path)
    code, out, _ = said("tune", "--methods", "local", *line)
    assert code == 0
    # The table is of what was asked for, the folder has all.
    assert "fedavg" not in out
    assert content(tmp_path).keys() == {"fedavg", "local"}
    assert content(tmp_path)["fedavg"] == first["fedavg"]


def test_report_shows_the_search(tuned: Path, tmp_path: Path, said: Say) -> None:
    assert said("report", tuned, "--out", tmp_path / "page.html")[0] == 0
    (section,) = build_document(find_result_folders([tuned]))["sections"]
    for method, row, search in zip(
        sorted(METHODS), section["tables"][0]["rows"], section["searches"], strict=True
    ):
        found = load(tuned / method)
        assert [row[place]["text"] for place in (0, 2, 4)] == [
            method, f"{found.score:.1f}", f"{found.default_score:.1f}",
        ]  # fmt: skip
        shown = {line[0]["text"]: line for line in search["table"]["rows"]}
        assert shown.keys() == {str(trial.number) for trial in found.trials}
        for trial in found.trials:
            scores = [f"{score:.1f}" for score in trial.scores.values()]
            assert [cell["text"] for cell in shown[str(trial.number)][2:-1]] == [
                *scores, *[""] * (3 - len(scores)),
            ]  # fmt: skip
        (chosen,) = [line for line in search["table"]["rows"] if line[-1]["text"] == "chosen"]
        assert chosen[0]["text"] == str(found.chosen)


def test_several_seeds_are_averaged(images: Path, tmp_path: Path) -> None:
    found = tune(small(images, rounds=2), "local", tmp_path / "out", budget=2, seeds=(3, 5))
    assert found is not None
    assert [trial.runs for trial in found.trials] == [
        [f"trial-{number}-seed{seed}" for seed in (3, 5)] for number in range(2)
    ]
    for trial in found.trials:
        last = [read_records(tmp_path / "out" / each)[-1] for each in trial.runs]
        values = [each["accuracy"]["local_test"]["personal_classifier"] for each in last]
        assert trial.scores[last[0]["round"]] == fmean(values)
    assert load(tmp_path / "out") == found


def test_test_images_are_never_opened(images: Path, tmp_path: Path) -> None:
    """With test images that cannot be read, or of another kind, the search is the same."""
    save_images(tmp_path / "data" / "stripes.npz", num_test=600)
    base = small(tmp_path / "data", rounds=1)
    first = tune(base, "fedavg", tmp_path / "first", budget=2)
    path = tmp_path / "data" / "stripes.npz"
    spoiled = bytearray(path.read_bytes())
    spoiled[spoiled.index(b"x_test.npy") + 15_000] ^= 255
    path.write_bytes(spoiled)
    with pytest.raises(InvalidInput, match="x_test cannot be read"):
        run(base, tmp_path / "run")
    second = tune(base, "fedavg", tmp_path / "second", budget=2)
    assert first is not None
    assert second is not None
    assert [each.scores for each in first.trials] == [each.scores for each in second.trials]


# A method of one's own


MODULE = """
from mpfedcl.methods import Method, Settings


class MineSettings(Settings):
    beta: float = 1.0


class Mine(Method):
    name = "mine"
    settings: MineSettings
    search_space = {**Method.search_space, "mine__beta": (0.1, 0.5)}
"""


def test_search_space_of_a_user_method(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Say
) -> None:
    (tmp_path / "tuned_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    code, _, _ = said(
        "tune", "--methods", "tuned_module:Mine", "--budget", 12, *flags(images, rounds=1),
        "--jobs", 1, "--out", tmp_path / "out", "--json",
    )  # fmt: skip
    assert code == 0
    found = load(tmp_path / "out" / "tuned_module.Mine")
    assert {trial.values["mine__beta"] for trial in found.trials} == {1.0, 0.1, 0.5}
    assert len(found.trials) == 12
    assert (tmp_path / "out" / "best-tuned_module.Mine.toml").is_file()
    experiment = RunDirectory(tmp_path / "out" / "tuned_module.Mine" / "trial-00-seed0")
    assert experiment.read_experiment().setting("mine__beta") == 1.0


# Refused


def test_another_search_in_the_same_folder_is_refused(images: Path, tuned: Path, said: Say) -> None:
    before = content(tuned)
    for changes in ({"rounds": 8}, {"partition__kind": "iid"}, {"train__lr": 0.03}):
        code, out, err = said(*words(images, tuned, **changes))
        assert (code, out) == (2, "")
        assert f"out is '{tuned / METHODS[0]}'; trial-" in err
        assert err.count("\n") == 1
    assert content(tuned) == before
    # Where clients are run makes no difference.
    assert said(*words(images, tuned, engine="loop"))[0] == 0


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--budget", 0], "budget is 0; it must be at least 1"),
        (["--validation", 0], "validation is 0; it must be between 0 and 1"),
        (["--validation", 1.5], "validation is 1.5; it must be between 0 and 1"),
        (["--seeds", 1, 1], "seeds is [1, 1]; it must name at least one, and each once"),
        (["--methods", "local", "local"], "methods is ['local', 'local']; it must name"),
        (["--methods", "nobody"], "method is 'nobody'; it must be one of"),
        (["--method", "local"], "method is 'local'; it must be left out: tune takes --methods"),
        (["--seed", 3], "seed is 3; it must be left out: tune takes --seeds"),
        (["--jobs", -1], "jobs is -1; it must be auto, or 1 or more"),
        (["--partition.validation", 0.5], "partition.validation is 0.5; it must be 0"),
        (["--clients", 61], "clients is 61"),
    ],
)
def test_bad_input_is_refused(
    images: Path, tmp_path: Path, said: Say, given: list[object], sentence: str
) -> None:
    code, out, err = said(*words(images, tmp_path / "out"), *given)
    assert (code, out) == (2, "")
    assert err.startswith(f"mpfedcl: {sentence}")
    assert err.count("\n") == 1


def test_refused_search_leaves_the_folder_usable(images: Path, tmp_path: Path, said: Say) -> None:
    line = words(images, tmp_path / "out", rounds=1)
    line[line.index("--budget") + 1] = "1"
    assert said(*line, "--clients", 61)[0] == 2
    assert said(*line)[0] == 0


def test_method_without_hyperparameters_has_one_trial(tmp_path: Path, said: Say) -> None:
    root = save_domains_of_vectors(tmp_path / "vectors")
    settings = ["--dataset.name", "folder", "--dataset.root", root, "--partition.kind", "feature"]
    chosen = ["--methods", "fedgauss", "--rounds", 4, "--budget", 3, "--jobs", 1]
    code, out, _ = said("tune", *chosen, *settings, "--out", tmp_path / "search")
    assert code == 0
    assert "nothing to choose" in out
    found = load(tmp_path / "search" / "fedgauss")
    assert (len(found.trials), found.rounds_run, found.rungs) == (1, 1, [Rung(1, 1)])
    assert (found.predictor, found.changes) == ("personal_classifier_prior", {})
    assert found.score is not None
    # What was asked for stays in the file: other methods of a comparison have rounds.
    assert found.best.rounds == 4
    said("report", tmp_path / "search")
    (section,) = build_document(find_result_folders([tmp_path / "search"]))["sections"]
    (search,) = section["searches"]
    assert search["table"]["notes"] == ["fedgauss has no search space; its defaults were run."]


def test_score_is_the_primary_metric(images: Path, tmp_path: Path) -> None:
    for test, predictor in (("shared", "global_prototype"), ("matched", "personal_prototype")):
        base = small(images, rounds=1, partition__test=test)
        assert Search.prepare(base, "mp-fedcl", tmp_path / test).predictor == predictor
    # The paper's tables have the paper's reading.
    asked = Search.prepare(base, "mp-fedcl", tmp_path / "paper", predictor="global_classifier")
    assert asked.predictor == "global_classifier"


@pytest.mark.parametrize(("metric", "best"), [("nll", min), ("macro_f1", max)])
def test_another_metric_gives_the_scores(
    images: Path, tmp_path: Path, metric: str, best: Callable[[list[float]], float]
) -> None:
    base = small(images, rounds=4, metric=metric)
    found = tune(base, "fedavg", tmp_path / "search", budget=4)
    assert found is not None
    for trial in found.trials:
        records = read_records(tmp_path / "search" / trial.runs[0])
        for number, score in trial.scores.items():
            assert score == records[number - 1]["metric"]["local_test"]
    last = [each.scores[4] for each in found.trials if each.scores.get(4) is not None]
    assert found.score == best([each for each in last if each is not None])
    # There is no binomial error.
    assert (found.standard_error, found.metric) == (None, metric)
    assert found.trials[found.chosen].number in found.within
    with pytest.raises(InvalidInput, match=f"^predictor is .*; with metric '{metric}' it must be"):
        tune(base, "fedavg", tmp_path / "other", predictor="personal_prototype")
