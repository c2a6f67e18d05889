"""Runs, comparisons and searches from Python: how methods and settings are given."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file

import mpfedcl
from mpfedcl import Experiment, InvalidInput, Observer, compare, load, resume, run, tune
from mpfedcl.experiment.settings import TrainSettings
from mpfedcl.methods.fedavg import FedAvg
from mpfedcl.report.results import LoadedRun, LoadedSearch
from mpfedcl.runs.observer import RunResult
from own_models import WithNorm
from small_experiments import Say, assert_same_run, small

pytestmark = pytest.mark.whole


def settings_of(images: Path, **changes: Any) -> dict[str, Any]:
    """Return the settings of a small experiment as keywords, without a method."""
    usual = Experiment().model_dump()
    values = small(images, rounds=1, **changes).model_dump()
    return {name: value for name, value in values.items() if value != usual[name]}


@pytest.mark.parametrize("method", ["fedavg", FedAvg, Experiment(method="fedavg")])
def test_method_and_settings_make_the_run_of_the_experiment(
    images: Path, tmp_path: Path, method: Any
) -> None:
    train = {"lr": 0.2, "momentum": 0.1}
    by_keywords = run(method, tmp_path / "a", **settings_of(images) | {"train": train})
    whole = small(images, method="fedavg", rounds=1)
    in_one = run(whole.replace(train=TrainSettings(**train)), tmp_path / "b")
    assert by_keywords.experiment == in_one.experiment
    assert_same_run(by_keywords.path, in_one.path)


def test_comparison_takes_methods_first(images: Path, tmp_path: Path) -> None:
    settings = settings_of(images)
    found = compare(["local", FedAvg], out=tmp_path / "a", seeds=range(1), **settings)
    same = compare(Experiment(**settings), ["local", "fedavg"], tmp_path / "b", seeds=[0])
    for one, other in zip(found.runs, same.runs, strict=True):
        assert_same_run(one.path, other.path)


def test_experiments_in_a_comparison_keep_their_settings(images: Path, tmp_path: Path) -> None:
    one = small(images, method="fedavg", rounds=1, train={"lr": 0.2})
    other = one.replace(method="local", train__lr=0.05)
    found = compare([one, other], out=tmp_path / "both", seeds=[0])
    assert [each.experiment.train.lr for each in found.runs] == [0.2, 0.05]
    assert len(found.section["groups"]) == 2
    assert found.section["is_ranked"]
    # The caption names the learning rate of each.
    assert "learning rate 0.2 (fedavg) and 0.05 (local)" in found.section["about"][0]


def test_tuned_methods_are_compared_with_their_chosen_settings(
    images: Path, tmp_path: Path
) -> None:
    settings = settings_of(images)
    chosen = {}
    for method in ("fedavg", "local"):
        search = tune(method, out=tmp_path / "tuning" / method, budget=2, **settings)
        assert search is not None
        assert re.fullmatch(
            rf"{method}: trial \d of \d is chosen, accuracy .* \(.*\)", repr(search)
        )
        chosen[method] = search.best.train.lr
    found = compare(tuned=tmp_path / "tuning", out=tmp_path / "both", seeds=[0])
    assert {e.experiment.method: e.experiment.train.lr for e in found.runs} == chosen
    one = compare("local", tuned=tmp_path / "tuning", out=tmp_path / "one", seeds=[0])
    assert [each.experiment.train.lr for each in one.runs] == [chosen["local"]]
    searches = load(tmp_path / "tuning" / "local")
    assert isinstance(searches, LoadedSearch)
    assert searches.best["local"].train.lr == chosen["local"]
    with pytest.raises(InvalidInput, match="fedprox must be tuned first: mpfedcl tune --methods"):
        compare(["fedprox"], tuned=tmp_path / "tuning")
    with pytest.raises(InvalidInput, match=r"other settings must be left out"):
        compare(tuned=tmp_path / "tuning", rounds=3)
    with pytest.raises(InvalidInput, match=r"it must be a folder of mpfedcl tune, with a file"):
        compare(tuned=tmp_path)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: run(3), "experiment is 3; it must be a method by name or class, or an Exp"),  # type: ignore[arg-type]
        (lambda: run({"rounds": 3}), "experiment is {'rounds': 3}; it must be a method by"),  # type: ignore[arg-type]
        (lambda: run("fedavg", method="local"), "method is 'local'; it must be left out"),
        (lambda: run("fedavg", lr=0.1), "lr is not a setting; did you mean train.lr?"),
        (lambda: run("fedavg", 3), "out is 3; it must be the path of a folder."),  # type: ignore[arg-type]
        (lambda: run("fedavg", observer=3), "observer is 3; it must be an Observer, or left out."),  # type: ignore[arg-type]
        (lambda: run("fedavgg"), "method is 'fedavgg'; it must be one of those that"),
        (lambda: run(int), "method is 'builtins:int'; it must name a subclass of mpfedcl.Meth"),  # type: ignore[arg-type]
        (lambda: resume(3), "path is 3; it must be the path of a folder."),  # type: ignore[arg-type]
        (lambda: compare(["local"], seeds=0), "seeds is 0; it must be several, in a list."),  # type: ignore[arg-type]
        (lambda: compare(["local"], jobs="2"), "jobs is 2; it must be auto, or 1 or more."),  # type: ignore[arg-type]
        (lambda: compare(3), "methods is 3; it must be a list of methods."),  # type: ignore[arg-type]
        (lambda: compare([3]), "methods is 3; it must be a method by name or class, or"),  # type: ignore[list-item]
        (lambda: compare(), "methods is []; it must name at least one, and each once."),
        (lambda: compare(["local"], ["local"]), "base is ['local']; it must be an Experiment,"),
        (lambda: compare(["local", "nope"]), "method is 'nope'; it must be one of"),
        (lambda: tune(3), "base is 3; it must be a method by name or class, or an Experiment."),  # type: ignore[arg-type]
        (lambda: tune("local", budget="x"), "budget is 'x'; it must be at least 1."),  # type: ignore[arg-type]
    ],
)
def test_wrong_types_give_one_sentence(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        call()
    assert str(refused.value).startswith(sentence)
    assert "\n" not in str(refused.value)


# What is shown


@pytest.mark.parametrize(("progress", "lines"), [("auto", 0), (False, 0), (True, 2)])
def test_progress_is_shown_if_asked_for(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], progress: Any, lines: int
) -> None:
    experiment = small(images, method="fedavg")
    run(experiment, tmp_path / "run", progress=progress)
    said = capsys.readouterr()
    assert said.out == ""
    told = said.err.splitlines()
    assert [each.partition(", ")[0] for each in told] == [
        f"fedavg: {done} of 2 rounds" for done in range(1, lines + 1)
    ]
    compare([experiment.replace(rounds=1)], out=tmp_path / "all", seeds=[0, 1], progress=progress)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [f"2 runs: {done} of 2 rounds" for done in (1, 2)[:lines]]


def test_result_is_shown_in_a_few_lines(images: Path, tmp_path: Path) -> None:
    result = run(small(images, method="fedavg", train__lr=0.2), tmp_path / "run")
    assert repr(result).splitlines() == [
        f"fedavg on folder: accuracy {result.accuracy:.1f} % on the local test sets after 2 rounds",
        f"path: {tmp_path / 'run'}",
    ]
    assert result._repr_html_() == load(result.path)._repr_html_()


def test_result_of_a_stopped_run_says_so(images: Path, tmp_path: Path) -> None:
    stop = Observer(should_stop=lambda: True)
    result = run(small(images), tmp_path / "run", stop)
    first, path = repr(result).splitlines()
    assert first == "mp-fedcl on folder: stopped after round 0 of 2"
    assert path == f"path: {tmp_path / 'run'}"
    # Without a round there is no table.
    assert result._repr_html_() is None


# Results as objects


@pytest.fixture(scope="module")
def finished(images: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """A run of FedAvg, which has a global model and personalized ones."""
    return run(small(images, method="fedavg", train__lr=0.2), tmp_path_factory.mktemp("run") / "a")


@pytest.mark.parametrize("client", [None, "client-1"])
def test_models_of_a_result_predict_as_its_predictor(
    finished: RunResult, images: Path, client: str | None
) -> None:
    samples = numpy.load(images / "stripes.npz")["x_test"]
    loaded = load(finished.path)
    assert isinstance(loaded, LoadedRun)
    for result in (finished, loaded):
        predictor = result.predictor(client)
        model = result.global_model if client is None else result.personal_model(client)
        with torch.no_grad():
            logits = model(predictor.inputs(samples))
        labels = [predictor.class_names[number] for number in logits.argmax(dim=1).tolist()]
        assert labels == [each.classifier.label for each in predictor.predict(samples)]
        name = "model" if client is None else f"models/{client}"
        written = load_file(finished.path / f"{name}.safetensors")
        state = model.state_dict()
        assert all(torch.equal(state[each], value) for each, value in written.items())
        assert state.keys() == written.keys()


def test_inputs_of_a_predictor_are_shaped_for_a_users_module(tmp_path: Path) -> None:
    images = numpy.random.default_rng(0).integers(0, 256, (40, 6, 6, 3), dtype=numpy.uint8)
    data = (images, numpy.arange(40) % 2)
    settings: dict[str, Any] = {"rounds": 1, "clients": 2, "partition": {"kind": "iid"}}
    result = run("fedavg", tmp_path / "run", model=WithNorm, data=data, **settings)
    predictor = result.predictor()
    inputs = predictor.inputs(images[:5])
    assert inputs.shape == (5, 3, 6, 6)
    with torch.no_grad():
        found = result.global_model(inputs).softmax(1)
    wanted = [list((each.probabilities or {}).values()) for each in predictor.predict(images[:5])]
    torch.testing.assert_close(found, torch.tensor(wanted))


def test_objects_that_other_processes_lack_are_refused_before_the_first_run(
    images: Path, tmp_path: Path
) -> None:
    base, model = small(images, method="fedavg", model__hidden=()), WithNorm(3, (1, 6, 6))
    with pytest.raises(InvalidInput, match=r"^workers is 2; it must be 1 or auto, because the mod"):
        run(base.replace(workers=2), tmp_path / "run", model=model)
    with pytest.raises(InvalidInput, match=r"^jobs is 2; it must be 1, .* a model of this program"):
        compare(base, ["fedavg"], tmp_path / "both", seeds=[0, 1], jobs=2, model=model)
    with pytest.raises(
        InvalidInput, match=r"^model is WithNorm\( .*run\(\.\.\., model=\.\.\.\) takes"
    ):
        Experiment(model=model)


def test_missing_models_are_refused(finished: RunResult, images: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"client is 'north'; it must be one of client-0"):
        finished.personal_model("north")
    local = run(small(images, method="local", rounds=1), tmp_path / "local")
    with pytest.raises(InvalidInput, match="has no global model; it must be one of client-0"):
        _ = local.global_model
    stopped = run(small(images), tmp_path / "stopped", Observer(should_stop=lambda: True))
    with pytest.raises(InvalidInput):
        _ = stopped.global_model


def test_report_is_written_from_results_and_paths(
    finished: RunResult, images: Path, tmp_path: Path
) -> None:
    page = mpfedcl.report(finished, csv=True)
    assert page == finished.path / "report.html"
    assert (finished.path / "accuracy.csv").is_file()
    other = run(small(images, method="local", rounds=1), tmp_path / "other")
    both = mpfedcl.report([load(finished.path), str(other.path)], tmp_path / "both.html")
    assert both.read_text().count("<section") > page.read_text().count("<section")
    with pytest.raises(InvalidInput, match=r"results is 3; it must be a result, or a list of"):
        mpfedcl.report(3)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"result is 3; it must be the path of a folder"):
        mpfedcl.report([3])  # type: ignore[list-item]
    with pytest.raises(InvalidInput, match="which is a folder; it must be a file"):
        mpfedcl.report(finished, tmp_path)


def test_export_from_python_is_that_of_the_command(
    finished: RunResult, tmp_path: Path, said: Say
) -> None:
    pytest.importorskip("onnxruntime")
    mine = mpfedcl.export(finished, tmp_path / "mine.onnx", client="client-1")
    said("export", finished.path, "--client", "client-1", "--out", tmp_path / "other.onnx")
    assert mine.path.read_bytes() == (tmp_path / "other.onnx").read_bytes()
    with pytest.raises(InvalidInput, match=r"result is 3; it must be the path of a folder\."):
        mpfedcl.export(3)  # type: ignore[arg-type]
