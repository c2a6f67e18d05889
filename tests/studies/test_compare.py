"""Comparisons: mean(std) over seeds, the same in any order, and what is refused."""

import json
import re
from pathlib import Path
from statistics import fmean, stdev

import pytest
from matplotlib.figure import Figure

from command_results import without_progress
from comparison_command import MATCHED, METHODS, SEEDS, modified, words
from mpfedcl import run
from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.methods import PREDICTORS
from mpfedcl.report.drawings import draw_lines
from mpfedcl.report.wording import PREDICTOR_TITLES
from mpfedcl.studies.comparison import Comparison, choose_methods
from mpfedcl.studies.statistics import mark_best, paired_difference
from small_experiments import (
    EXAMPLES,
    Json,
    Say,
    assert_same_results,
    assert_same_run,
    flags,
    read_summary,
    save_domains_of_vectors,
    small,
)

pytestmark = pytest.mark.whole

JUDGED_BY = {
    "mp-fedcl": {"local_test": "personal_prototype", "global_test": "global_prototype"},
    "fedavg": {"local_test": "global_classifier", "global_test": "global_classifier"},
    "local": {"local_test": "personal_classifier", "global_test": "personal_classifier"},
}


def summaries(path: Path, method: str) -> list[Json]:
    return [read_summary(path / f"{method}-seed{seed}") for seed in SEEDS]


def by_hand(values: list[float | None]) -> str:
    """Return mean(std), std with ddof = 1."""
    known = [value for value in values if value is not None]
    return f"{fmean(known):.1f}({stdev(known):.1f})" if known else "-"


def test_method_that_rejects_a_setting_is_found_before_the_first_run(tmp_path: Path) -> None:
    base = Experiment().replace(train__class_weights="balanced")
    with pytest.raises(InvalidInput, match="with method fedgauss it must be none"):
        Comparison.prepare(base, ["fedavg", "fedgauss"], [0], tmp_path)
    assert not list(tmp_path.iterdir())


# What it shows


def test_table_has_means_and_deviations(images: Path, compared: Path, said: Say) -> None:
    code, out, err = said(*words(images, compared))
    assert (code, without_progress(err)) == (0, "")
    assert max(len(line) for line in out.splitlines() if "/" not in line) <= 100
    assert "2 seeds" in out
    table = (compared / "table.md").read_text()
    for method in METHODS:
        found = summaries(compared, method)
        judged = JUDGED_BY[method]
        own, union = (
            by_hand([each["predictors"][test][judged[test]] for each in found]) for test in judged
        )
        assert own == by_hand([each["accuracy"] for each in found])
        assert union == by_hand([each["accuracy_global"] for each in found])
        (line,) = [line for line in out.splitlines() if line.split()[:1] == [method]]
        assert [own, union] == [each.lstrip("▲≈") for each in line.split()[1:3]]
        named = [PREDICTOR_TITLES[predictor] for predictor in dict.fromkeys(judged.values())]
        (row,) = [each for each in table.splitlines() if each.startswith(f"| {method} |")]
        assert row.split(" | ")[-1] == "; ".join(named) + " |"


def test_shared_test_set_is_one_column(images: Path, tmp_path: Path, said: Say) -> None:
    chosen = ["--methods", "mp-fedcl", "--seeds", "0", *flags(images, rounds=1), "--jobs", "1"]
    _, out, _ = said("compare", *chosen, "--out", tmp_path / "shared")
    (line,) = [line for line in out.splitlines() if line.split()[:1] == ["mp-fedcl"]]
    # Where one is asked about everybody's classes, the global model answers.
    summary = read_summary(tmp_path / "shared" / "mp-fedcl-seed0")
    assert summary["accuracy"] == summary["predictors"]["local_test"]["global_prototype"]
    assert line.split()[1] == f"{summary['accuracy']:.1f}"
    assert line.rstrip().endswith("global, prototype")
    assert "All clients share one test set." in out
    assert "global test set" not in out


def test_all_predictors(images: Path, compared: Path, said: Say) -> None:
    _, out, _ = said(*words(images, compared), "--predictors", "all")
    assert max(len(line) for line in out.splitlines() if "/" not in line) <= 100
    for method in METHODS:
        found = summaries(compared, method)
        rows = [re.split(r"\s{2,}", line.strip()) for line in out.splitlines()]
        place = 1 + METHODS.index(method)
        for test, judged in JUDGED_BY[method].items():
            for name in PREDICTORS:
                wanted = by_hand([each["predictors"][test][name] for each in found])
                star = "*" if name == judged else ""
                shown = [row[place] for row in rows if row[0] == PREDICTOR_TITLES[name]]
                assert f"{wanted}{star}" in shown


def test_json_and_files(images: Path, compared: Path, said: Say) -> None:
    code, out, err = said(*words(images, compared), "--json")
    assert (code, without_progress(err)) == (0, "")
    content = json.loads(out)
    assert content.pop("path") == str(compared)
    assert content == json.loads((compared / "comparison.json").read_text())
    assert content["seeds"] == [*SEEDS]
    assert content["rounds"] == 2
    assert list(content["methods"]) == [*METHODS]
    for method, entry in content["methods"].items():
        found = summaries(compared, method)
        for name in ("accuracy", "accuracy_global"):
            assert entry[name] == [each[name] for each in found]
        for name, test in (("predictor", "local_test"), ("predictor_global", "global_test")):
            assert entry[name] == JUDGED_BY[method][test]
        for test in ("local_test", "global_test"):
            for predictor in PREDICTORS:
                wanted = [each["predictors"][test][predictor] for each in found]
                assert entry["predictors"][test][predictor] == wanted
    assert (compared / "table.md").read_text().count("| mp-fedcl |") >= 1
    for figure in ("accuracy.png", "partition.png"):
        assert (compared / figure).read_bytes().startswith(b"\x89PNG")


def test_differences_by_seed(compared: Path) -> None:
    content = json.loads((compared / "comparison.json").read_text())["differences"]
    assert content["level"] == 0.95
    for test in ("local_test", "global_test"):
        numbers = {}
        for method in METHODS:
            found = summaries(compared, method)
            numbers[method] = [each["predictors"][test][JUDGED_BY[method][test]] for each in found]
        best = max(numbers, key=lambda method: fmean(numbers[method]))
        assert (content[test]["best"], content[test]["first"]) == (best, METHODS[0])
        assert content[test]["marks"] == mark_best(numbers)
        for other, differences in (("best", "to_best"), ("first", "to_first")):
            reference = content[test][other]
            assert {*content[test][differences], reference} == {*METHODS}
            for method, entry in content[test][differences].items():
                first, second = (
                    a - b for a, b in zip(numbers[method], numbers[reference], strict=True)
                )
                reach = 12.7062 * abs(first - second) / 2
                assert entry["mean"] == pytest.approx((first + second) / 2)
                assert entry["high"] - entry["low"] == pytest.approx(2 * reach, rel=1e-4)
                difference = paired_difference(numbers[method], numbers[reference])
                assert difference is not None
                assert entry["verdict"] == difference.verdict


def test_marks_and_their_legend(images: Path, compared: Path, said: Say) -> None:
    _, out, _ = said(*words(images, compared))
    marks = json.loads((compared / "comparison.json").read_text())["differences"]
    signs = {"best": "▲", "within": "≈", None: ""}
    for method in METHODS:
        (line,) = [line for line in out.splitlines() if line.split()[:1] == [method]]
        for test, cell in zip(("local_test", "global_test"), line.split()[1:3], strict=True):
            assert re.match("[▲≈]?", cell)[0] == signs[marks[test]["marks"][method]]  # type: ignore[index]
    legend = " ".join(out.split())
    assert "▲ best mean; ≈ not clearly behind: 0 is in the 95 % interval" in legend
    assert "With 2 seeds the interval reaches 9.0 deviations" in legend
    assert "≈ not clearly behind" in (compared / "table.md").read_text()


def test_marks_of_one_seed_and_of_one_method(images: Path, tmp_path: Path, said: Say) -> None:
    common = [*flags(images, rounds=1), "--jobs", 1]
    chosen = ["--methods", "fedavg", "local", "--seeds", 0]
    _, out, _ = said("compare", *chosen, *common, "--out", tmp_path / "seed")
    assert "▲ best of one seed" in out
    assert "≈" not in out
    chosen = ["--methods", "fedavg", "--seeds", 0, 1]
    _, out, _ = said("compare", *chosen, *common, "--out", tmp_path / "method")
    assert "▲" not in out


def test_runs_equal_single_runs(images: Path, compared: Path, tmp_path: Path) -> None:
    run(small(images, "fedavg", seed=1, **MATCHED), tmp_path / "run")
    assert_same_run(compared / "fedavg-seed1", tmp_path / "run")


def test_numbers_are_in_the_given_order_of_seeds(
    images: Path, tmp_path: Path, compared: Path, said: Say
) -> None:
    settings = flags(images, **MATCHED)
    chosen = ["--methods", "fedavg", "--seeds", "1", "0", *settings, "--jobs", "1"]
    _, out, _ = said("compare", *chosen, "--out", tmp_path / "other", "--json")
    content = json.loads(out)
    wanted = [read_summary(compared / f"fedavg-seed{seed}")["accuracy"] for seed in (1, 0)]
    assert content["seeds"] == [1, 0]
    assert content["methods"]["fedavg"]["accuracy"] == wanted


def test_default_folder(
    images: Path, tmp_path: Path, said: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("comparison", "comparison-2"):
        chosen = ("--methods", "local", "--seeds", "0", "--json")
        _, out, _ = said("compare", *chosen, *flags(images, rounds=1))
        assert json.loads(out)["path"] == f"runs/{name}"


# Refused


def test_other_settings_in_the_same_folder_are_refused(
    images: Path, compared: Path, said: Say
) -> None:
    before = modified(compared)
    for changes in ({"rounds": 3}, {"train__lr": 0.5}, {"partition__kind": "iid"}):
        code, out, err = said(*words(images, compared, **changes))
        assert (code, out) == (2, "")
        assert "holds a run with other settings" in err
        assert err.count("\n") == 1
    assert modified(compared) == before


def test_progress_bar_of_a_finished_comparison_is_full(
    images: Path, compared: Path, said: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    code, _, err = said(*words(images, compared), "--json")
    total = sum(each["rounds"] for each in map(read_summary, compared.glob("*-seed*")))
    assert code == 0
    assert f"{total}/{total}" in re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", err)


@pytest.mark.parametrize(
    ("methods", "seeds"),
    [(["local", "local"], [0]), (["local"], [3, 3]), ([], [0]), (["local"], [])],
)
def test_duplicates_and_empty_lists_are_refused(
    images: Path, tmp_path: Path, methods: list[str], seeds: list[int]
) -> None:
    with pytest.raises(InvalidInput, match="must name at least one, and each once"):
        Comparison.prepare(small(images), methods, seeds, tmp_path / "out")


@pytest.mark.usefixtures("forked_jobs")
def test_bad_data_in_a_job_is_refused_in_one_line(images: Path, tmp_path: Path, said: Say) -> None:
    line = words(images, tmp_path / "out", clients=61)
    line[line.index("--jobs") + 1] = "2"
    code, out, err = said(*line)
    assert (code, out) == (2, "")
    assert err.startswith("mpfedcl: clients is 61")
    assert err.count("\n") == 1


# Methods of one's own


MODULE = """
from mpfedcl import Method


class Mine(Method):
    name = "mine"
    primary_predictor = "{predictor}"
"""


def test_classes_of_one_name_in_two_modules(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Say
) -> None:
    predictors = {"first_module": "global_classifier", "second_module": "personal_classifier"}
    for name, predictor in predictors.items():
        (tmp_path / f"{name}.py").write_text(MODULE.format(predictor=predictor))
    monkeypatch.syspath_prepend(tmp_path)
    chosen = [f"{name}:Mine" for name in predictors]
    code, out, _ = said(
        "compare", "--methods", *chosen, "--seeds", 0, *flags(images, rounds=1),
        "--jobs", 1, "--out", tmp_path / "out", "--json",
    )  # fmt: skip
    assert code == 0
    found = {name: entry["predictor"] for name, entry in json.loads(out)["methods"].items()}
    assert found == {f"{name}:Mine": predictor for name, predictor in predictors.items()}


def test_example_method_next_to_a_built_in_method(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Say
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    code, out, _ = said(
        "compare", "--methods", "custom_method:Scaffold", "fedavg", "--seeds", 0,
        *flags(images, rounds=1, engine="loop"), "--jobs", 1, "--out", tmp_path / "out",
    )  # fmt: skip
    assert code == 0
    assert "my-scaffold" in out
    # Its controls start at zero: after one round the model is FedAvg's.
    (path,) = (tmp_path / "out").glob("*Scaffold*")
    assert_same_results(path, tmp_path / "out" / "fedavg-seed0")


def test_one_shot_methods_next_to_methods_with_rounds(tmp_path: Path, said: Say) -> None:
    root = save_domains_of_vectors(tmp_path / "vectors")
    settings = ["--dataset.name", "folder", "--dataset.root", root, "--partition.kind", "feature"]
    chosen = ["--methods", "fedgauss", "local", "--seeds", 0, "--rounds", 3, "--jobs", 1]
    out = tmp_path / "both"
    code, text, _ = said("compare", *chosen, *settings, "--out", out, "--predictors", "all")
    assert code == 0
    assert max(len(line) for line in text.splitlines() if "/" not in line) <= 100
    assert "3 rounds" in text.splitlines()[0]
    assert "One-shot, without rounds of training: fedgauss." in text
    assert "prior: the client's own label distribution is added to the scores" in " ".join(
        text.split()
    )
    content = json.loads((out / "comparison.json").read_text())
    assert content["rounds"] == 3
    assert [read_summary(out / f"{m}-seed0")["rounds"] for m in ("fedgauss", "local")] == [1, 3]
    entry = content["methods"]["fedgauss"]
    judged = (entry["predictor"], entry["predictor_global"])
    assert judged == ("personal_classifier_prior", "global_classifier")


def test_a_curve_of_one_point_is_a_line_across() -> None:
    axes = Figure().subplots()
    once = {"name": "once", "x": [1], "mean": [80.0], "std": [5.0], "level": True}
    draw_lines(axes, [{"name": "rounds", "x": [2, 4], "mean": [30.0, 50.0]}, once])
    assert [list(line.get_xdata()) for line in axes.lines] == [[2, 4], [2, 4]]  # type: ignore[arg-type]
    assert list(axes.lines[1].get_ydata()) == [80.0, 80.0]  # type: ignore[arg-type]


def test_asynchronous_methods_are_left_out_with_workers() -> None:
    chosen, left_out = choose_methods(Experiment(workers=2), ["all"])
    assert {"fedasync", "fedat", "sageflow"} <= set(left_out)
    assert left_out["fedasync"].startswith("workers is 2; with fedasync, which is asynchronous")
    assert "fedavg" in chosen
    assert "fedasync" in choose_methods(Experiment(), ["all"])[0]
