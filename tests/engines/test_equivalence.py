"""The equivalence suite: every engine gives the result of the loop, for every method.

The reference is the loop, one client after the other in plain PyTorch. To hold another way of
running clients to it, add it to ENGINES.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from situations import AS_ROWS, DOUBLE, RAGGED, SINGLE, SITUATIONS, build, double

from equivalent_runs import assert_close_tensors, assert_equivalent
from mpfedcl import resume
from mpfedcl.data.loading import load_federated_data
from mpfedcl.experiment import Experiment
from mpfedcl.models import Mlp
from mpfedcl.runs.observer import NO_CALLBACKS, Observer, RunResult
from mpfedcl.runs.simulation import run_simulation
from small_experiments import HIDDEN, METHODS, ONE_EXCHANGE, read_records, save_images

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("example_methods")]

Runner = Callable[[Experiment, Path], RunResult]


def run(experiment: Experiment, path: Path, observer: Observer | None = None) -> RunResult:
    """Run without card and calibration, which these 400 runs do not need."""
    return run_simulation(experiment, path, observer or Observer(), NO_CALLBACKS)


def run_by(engine: str) -> Runner:
    return lambda experiment, path: run(experiment.replace(engine=engine), path)


ENGINES: dict[str, Runner] = {name: run_by(name) for name in ("stacked", "factored", "auto")}
OWN_METHODS = (
    "custom_method:Scaffold",
    "fedper",
    "own_methods:FirstLayerAtHome",
    "own_methods:Decay",
    "own_methods:TwoViews",
    "own_methods:Anchored",
    "moon",
    "own_methods:Clipped",
    "own_methods:Warming",
)
HARD_TO_SEE = (
    "own_methods:Smooth",
    "own_methods:ProximalLater",
    "own_methods:ProximalAfterTheFirstStep",
    "own_methods:SideBySide",
    "own_methods:MeanInput",
    "own_methods:TwoViewsLater",
    "own_methods:ViewLater",
    "own_methods:ViewFirst",
)


class Reference:
    """Runs of the loop, each made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._done: dict[str, Path] = {}

    def path(self, experiment: Experiment) -> Path:
        experiment = experiment.replace(engine="loop")
        key = experiment.model_dump_json()
        if key not in self._done:
            path = self._folder / str(len(self._done))
            self._done[key] = run(experiment, path).path
        return self._done[key]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("loop"))


def pairs() -> Iterator[Any]:
    for name, situation in SITUATIONS.items():
        for method in situation.methods:
            yield pytest.param(name, method, id=f"{name}, {method}")


@pytest.mark.parametrize("name", SITUATIONS)
def test_situation_is_as_named(images: Path, name: str) -> None:
    situation = SITUATIONS[name]
    experiment = situation.experiment(images, situation.methods[0])
    assert situation.holds(experiment, list(load_federated_data(experiment).clients))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("name", "method"), list(pairs()))
def test_result_equals_the_loop(
    images: Path,
    tmp_path: Path,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    method: str,
    engine: str,
) -> None:
    situation = SITUATIONS[name]
    experiment = situation.experiment(images, method)
    for limit, value in situation.limits.items():
        monkeypatch.setattr(limit, value)
    found = ENGINES[engine](experiment, tmp_path / "run")
    assert_equivalent(found.path, reference.path(experiment), experiment, DOUBLE)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("rule", "clip"), [("mean", 0.05), ("median", None), ("krum", 0.05)], ids=str
)
@pytest.mark.parametrize("method", METHODS)
def test_result_equals_the_loop_with_rules_and_clipping(
    images: Path,
    tmp_path: Path,
    reference: Reference,
    method: str,
    rule: str,
    clip: float | None,
    engine: str,
) -> None:
    experiment = double(images, method, RAGGED | {"aggregation__rule": rule, "update__clip": clip})
    found = ENGINES[engine](experiment, tmp_path / "run")
    assert_equivalent(found.path, reference.path(experiment), experiment, DOUBLE)
    clipped = [record["processed"].get("clip", []) for record in read_records(found.path)]
    assert any(clipped) == (clip is not None and method not in ("local", "fedproto"))


@pytest.mark.parametrize("rule", ["mean", "trimmed-mean", "geometric-median"])
@pytest.mark.parametrize("method", ["mp-fedcl", "fedgauss"])
def test_result_equals_the_loop_with_relative_bounds(
    images: Path, tmp_path: Path, reference: Reference, method: str, rule: str
) -> None:
    bounds = {"validation__bounds": "on", "validation__clip_factor": 0.8, "aggregation__rule": rule}
    experiment = double(images, method, RAGGED | bounds)
    found = ENGINES["auto"](experiment, tmp_path / "run")
    assert_equivalent(found.path, reference.path(experiment), experiment, DOUBLE)
    last = read_records(found.path)[-1]
    assert ("bound on norm" in last["processed"]) == (method == "mp-fedcl")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", METHODS)
def test_single_precision_round_equals_the_loop(
    images: Path,
    tmp_path: Path,
    reference: Reference,
    method: str,
    engine: str,
) -> None:
    # The paper's model, which is large enough for rounding errors.
    changes = {"dtype": "float32", "rounds": 1, "model__hidden": ()}
    experiment = double(images, method, RAGGED | changes)
    found = ENGINES[engine](experiment, tmp_path / "run")
    assert_equivalent(found.path, reference.path(experiment), experiment, SINGLE)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", ONE_EXCHANGE)
def test_one_shot_result_equals_the_loop(
    images: Path, tmp_path: Path, reference: Reference, method: str, engine: str
) -> None:
    experiment = double(images, method, RAGGED | {"partition__test": "matched"})
    found = ENGINES[engine](experiment, tmp_path / "run")
    assert len(read_records(found.path)) == 1
    assert_equivalent(found.path, reference.path(experiment), experiment, DOUBLE)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("changes", [RAGGED, {"fraction": 0.4, "evaluate_every": 2}])
@pytest.mark.parametrize("method", OWN_METHODS)
def test_user_methods_equal_the_loop(
    images: Path,
    tmp_path: Path,
    reference: Reference,
    method: str,
    changes: Mapping[str, Any],
    engine: str,
) -> None:
    experiment = double(images, method, changes)
    found = ENGINES[engine](experiment, tmp_path / "run")
    assert_equivalent(found.path, reference.path(experiment), experiment, DOUBLE)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", HARD_TO_SEE)
def test_losses_that_change_after_the_first_step_equal_the_loop(
    images: Path, tmp_path: Path, reference: Reference, method: str, engine: str
) -> None:
    experiment = double(images, method, RAGGED)
    found = ENGINES[engine](experiment, tmp_path / "run")
    assert_equivalent(found.path, reference.path(experiment), experiment, DOUBLE)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", ["PlainCrossEntropy", "MeanNorm", "ClippedMeanNorm"])
def test_losses_that_average_over_all_rows_equal_the_loop(
    images: Path,
    tmp_path: Path,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    engine: str,
) -> None:
    for limit, value in AS_ROWS.items():
        monkeypatch.setattr(limit, value)
    experiment = double(images, f"own_methods:{method}", RAGGED | {"train__epochs": 2})
    found = ENGINES[engine](experiment, tmp_path / "run")
    assert_equivalent(found.path, reference.path(experiment), experiment, DOUBLE)
    together = "stacked" if "stacked" in engine or method.startswith("Clipped") else "factored"
    for record in read_records(found.path):
        assert record["remarks"]["training"].keys() <= {together, "direct"}
        assert together in record["remarks"]["training"]


@pytest.mark.parametrize("engine", ENGINES)
def test_loss_that_needs_two_samples_equals_the_loop(
    images: Path, tmp_path: Path, reference: Reference, engine: str
) -> None:
    # 60 images: each client has 10 of them, in batches of 5.
    changes = {"partition__kind": "iid", "train__batch_size": 5}
    experiment = double(images, "own_methods:NeedsTwo", changes)
    found = ENGINES[engine](experiment, tmp_path / "run")
    assert_equivalent(found.path, reference.path(experiment), experiment, DOUBLE)


def test_domains_of_very_different_sizes_equal_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Reference
) -> None:
    root = tmp_path / "images"
    for name, count in (("large", 300), ("middle", 40), ("tiny", 3), ("wide", 270)):
        save_images(root / f"{name}.npz", num_train=count, num_test=9)
    experiment = double(root, "mp-fedcl", {"partition__kind": "feature", "clients": None})
    experiment = experiment.replace(train__batch_size=32, train__lr=0.02)
    for name, runner in ENGINES.items():
        found = runner(experiment, tmp_path / name)
        assert_equivalent(found.path, reference.path(experiment), experiment, DOUBLE)


# Resuming with another engine


def turn(path: Path, engine: str) -> None:
    """Write another engine into the settings of a run."""
    file = path / "experiment.toml"
    before = file.read_text()
    (line,) = [each for each in before.splitlines() if each.startswith("engine = ")]
    file.write_text(before.replace(line, f'engine = "{engine}"'))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("method", [*METHODS, "custom_method:Scaffold", "fedper"])
@pytest.mark.parametrize(("first", "second"), [("stacked", "loop"), ("loop", "factored")])
def test_resume_with_another_engine_equals_the_loop(
    images: Path, tmp_path: Path, reference: Reference, method: str, first: str, second: str
) -> None:
    experiment = double(images, method, RAGGED | {"fraction": 0.7})
    done: list[object] = []
    stop_early = Observer(on_round=done.append, should_stop=lambda: len(done) == 2)
    run(experiment.replace(engine=first), tmp_path / "run", stop_early)
    assert len(read_records(tmp_path / "run")) == 2
    turn(tmp_path / "run", second)
    found = resume(tmp_path / "run")
    assert found.experiment.engine == second
    assert_equivalent(found.path, reference.path(experiment), experiment, DOUBLE)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_evaluation_does_not_change_client_states(images: Path, engine: str) -> None:
    experiment = double(images, "own_methods:Counts", RAGGED | {"engine": engine})
    data = load_federated_data(experiment)
    model = Mlp((data.input_size, *HIDDEN), data.num_classes)
    read, unread = build(experiment, data, model), build(experiment, data, model)
    for _ in range(2):
        read.run_round(evaluate=True)
        unread.run_round(evaluate=False)
    assert len(read.engine.state()) == 6
    assert_close_tensors(unread.engine.state(), read.engine.state(), 0)


@pytest.mark.parametrize("engine", ["auto", "stacked"])
def test_clients_with_and_without_state_train_together(
    images: Path, tmp_path: Path, engine: str
) -> None:
    """Sample clients, so that some have a state of an earlier round and some have none."""
    experiment = double(images, "own_methods:Counts", {"fraction": 0.5})
    run(experiment.replace(engine="loop"), tmp_path / "loop")
    run(experiment.replace(engine=engine), tmp_path / "other")
    assert_equivalent(tmp_path / "other", tmp_path / "loop", experiment, DOUBLE)
