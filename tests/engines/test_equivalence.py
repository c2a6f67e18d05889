"""The equivalence suite: every engine gives the reference's result, for every method.

The reference is the loop, one client after the other in plain PyTorch. To hold another way of
running clients to it, add it to ENGINES.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from compared import assert_close_tensors, assert_equivalent
from mpfedcl import resume, run
from mpfedcl.clock import Clock
from mpfedcl.course import Observer, RunResult
from mpfedcl.data.federated import ClientData, FederatedData, load_federated
from mpfedcl.data.preprocessing import Preprocessing
from mpfedcl.engines import InProcessEngine
from mpfedcl.experiment import Experiment
from mpfedcl.federation import Federation, RoundRecord
from mpfedcl.methods import find_method
from mpfedcl.models import Mlp, Model
from mpfedcl.models.resnet import ResNet18
from mpfedcl.models.trainable import TrainableEncoder
from mpfedcl.rng import generator
from small_runs import EXAMPLES, METHODS, read_records, save_images, small

DOUBLE, SINGLE = 1e-9, 1e-5
"""Relative distance of weights: what is promised is 1e-5; in float64 rounding alone is far less."""

HIDDEN = (24, 12)
"""Layers of the model here, so that some hundred runs take seconds."""

CHOICE = "mpfedcl.engines.choice"
FACTORED = "mpfedcl.engines.factored"
ENDLESS = 10**9

Runner = Callable[[Experiment, Path], RunResult]


def run_by(engine: str) -> Runner:
    return lambda experiment, path: run(experiment.replace(engine=engine), path)


ENGINES: dict[str, Runner] = {"stacked": run_by("stacked"), "auto": run_by("auto")}


@dataclass(frozen=True)
class Situation:
    """What is special about the clients, the settings or the engine's limits."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    methods: Sequence[str] = METHODS
    holds: Callable[[Experiment, list[ClientData]], bool] = lambda *_: True
    """Whether it is what its name says."""


FEDCL = ("mp-fedcl", "sp-fedcl", "dp-fedcl")
DIFFERENT = ("fedprox", "fedproto", "mp-fedcl")
"""A loss beyond linear layers; models at home; models and prototypes that travel."""
RAGGED = {"partition__kind": "quantity", "partition__alpha": 1.0}


def sizes(clients: list[ClientData]) -> list[int]:
    return [len(client.labels) for client in clients]


SITUATIONS: dict[str, Situation] = {
    "label skew": Situation({"partition__test": "matched"}),
    "ragged sizes": Situation(
        RAGGED, holds=lambda _, c: len(set(sizes(c))) > 4 and max(sizes(c)) > 4 * min(sizes(c))
    ),
    "one-sample clients": Situation(
        {"partition__kind": "quantity", "partition__alpha": 0.8},
        holds=lambda _, c: sizes(c).count(1) > 1 and max(sizes(c)) > 10,
    ),
    "one sample each": Situation(
        {"partition__kind": "iid", "clients": 60, "rounds": 2},
        methods=DIFFERENT,
        holds=lambda _, c: set(sizes(c)) == {1},
    ),
    "absent classes": Situation(
        {
            "partition__kind": "classes",
            "partition__classes_per_client": 1,
            "partition__test": "matched",
        },
        holds=lambda _, c: all(len(set(client.labels.tolist())) == 1 for client in c),
    ),
    "sampled clients": Situation({"fraction": 0.4, "prototypes__pool_ttl": 2}),
    "several epochs": Situation(RAGGED | {"train__epochs": 3}, methods=DIFFERENT),
    "one batch": Situation(
        RAGGED | {"train__batch_size": 1000},
        methods=DIFFERENT,
        holds=lambda _, c: max(sizes(c)) < 1000,
    ),
    "no momentum": Situation(RAGGED | {"train__momentum": 0.0}, methods=DIFFERENT),
    "much momentum": Situation(
        RAGGED | {"train__momentum": 0.9, "train__lr": 0.02}, methods=DIFFERENT
    ),
    "more prototypes than samples": Situation(
        {"prototypes__per_class": 30}, methods=DIFFERENT, holds=lambda _, c: max(sizes(c)) < 30
    ),
    "models at home": Situation(RAGGED | {"share_model": False}, methods=FEDCL),
    "models at home, sampled": Situation(
        {"share_model": False, "fraction": 0.4, "evaluate_every": 3}, methods=FEDCL
    ),
    "pooled": Situation({"contrast__form": "pooled"}, methods=FEDCL),
    "literal": Situation({"contrast__form": "literal"}, methods=FEDCL),
    "padding filled": Situation({"prototypes__padding": "fill"}, methods=FEDCL),
    "lengths kept": Situation(
        {"prototypes__normalize": False, "contrast__temperature": 1.0},
        methods=DIFFERENT,
    ),
    "read every other round": Situation({"evaluate_every": 2}, methods=DIFFERENT),
    "more than at once": Situation(
        {"partition__kind": "iid", "clients": 40, "rounds": 2},
        {"mpfedcl.engines.in_process._CLIENTS_AT_ONCE": 16},
        methods=DIFFERENT,
        holds=lambda _, c: len(c) > 2 * 16,
    ),
    "chunks of two": Situation(
        RAGGED, {"mpfedcl.engines.in_process._CLIENTS_AT_ONCE": 2}, methods=DIFFERENT
    ),
    "few clients": Situation({"clients": 2}, {f"{CHOICE}._MOST_ROWS": 0}, methods=DIFFERENT),
    "all as weights": Situation(RAGGED, {f"{CHOICE}._MOST_ROWS": 0}),
    "all as rows": Situation(
        RAGGED | {"train__epochs": 2},
        {f"{CHOICE}._MOST_ROWS": ENDLESS, f"{FACTORED}._WRITTEN_OUT_FROM": ENDLESS},
    ),
    "all as rows, written out": Situation(
        RAGGED | {"train__epochs": 2},
        {f"{CHOICE}._MOST_ROWS": ENDLESS, f"{FACTORED}._WRITTEN_OUT_FROM": 0},
        methods=DIFFERENT,
    ),
    "large and small in one chunk": Situation(
        RAGGED,
        {f"{CHOICE}._MOST_ROWS": 8, f"{FACTORED}._WRITTEN_OUT_FROM": ENDLESS},
        # Neither the first names nor the last: the two kinds take turns in the mean.
        holds=lambda _, c: "".join("SL"[size > 8] for size in sizes(c)).strip("L").count("L") > 0,
    ),
    "large and small, models at home": Situation(
        RAGGED | {"share_model": False}, {f"{CHOICE}._MOST_ROWS": 8}, methods=("mp-fedcl",)
    ),
    "large ones one by one": Situation(
        RAGGED,
        {f"{CHOICE}._MOST_ROWS": 8, f"{CHOICE}._FEWEST_STACKED": 100},
        methods=DIFFERENT,
    ),
}
OWN_METHODS = (
    "custom_method:Scaffold",
    "own_methods:FedPer",
    "own_methods:FirstLayerAtHome",
    "own_methods:Decay",
    "own_methods:TwoViews",
    "own_methods:Anchored",
    "own_methods:Moon",
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


@pytest.fixture(autouse=True)
def _small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpfedcl.loading._HIDDEN", HIDDEN)
    monkeypatch.syspath_prepend(EXAMPLES)
    # Nobody pulls the plug here, and waiting for the disk is most of what such small runs do.
    monkeypatch.setattr("os.fsync", lambda _: None)


def double(root: Path, method: str, changes: Mapping[str, Any]) -> Experiment:
    """Return three rounds of six clients in float64, with steps that go somewhere."""
    settings = {
        "rounds": 3,
        "clients": 6,
        "dtype": "float64",
        "partition__alpha": 0.5,
        "train__batch_size": 4,
        "train__lr": 0.1,
    }
    return small(root, method, **settings | dict(changes))


class Reference:
    """The loop's runs, each made once."""

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
def test_a_situation_is_what_it_says(images: Path, name: str) -> None:
    situation = SITUATIONS[name]
    experiment = double(images, situation.methods[0], situation.changes)
    assert situation.holds(experiment, list(load_federated(experiment).clients))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("name", "method"), list(pairs()))
def test_the_result_is_the_loops(
    images: Path,
    tmp_path: Path,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    method: str,
    engine: str,
) -> None:
    situation = SITUATIONS[name]
    experiment = double(images, method, situation.changes)
    for limit, value in situation.limits.items():
        monkeypatch.setattr(limit, value)
    found = ENGINES[engine](experiment, tmp_path / "run")
    assert_equivalent(found.path, reference.path(experiment), experiment, DOUBLE)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", METHODS)
def test_in_single_precision_a_round_is_the_loops(
    images: Path,
    tmp_path: Path,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    engine: str,
) -> None:
    # The paper's model, whose products are long enough to round.
    monkeypatch.setattr("mpfedcl.loading._HIDDEN", (512, 512, 256))
    experiment = double(images, method, RAGGED | {"dtype": "float32", "rounds": 1})
    found = ENGINES[engine](experiment, tmp_path / "run")
    assert_equivalent(found.path, reference.path(experiment), experiment, SINGLE)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("changes", [RAGGED, {"fraction": 0.4, "evaluate_every": 2}])
@pytest.mark.parametrize("method", OWN_METHODS)
def test_methods_of_ones_own_get_the_loops_result(
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


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", HARD_TO_SEE)
def test_what_a_loss_does_later_or_with_several_samples_counts_too(
    images: Path, tmp_path: Path, reference: Reference, method: str, engine: str
) -> None:
    experiment = double(images, method, RAGGED)
    found = ENGINES[engine](experiment, tmp_path / "run")
    assert_equivalent(found.path, reference.path(experiment), experiment, DOUBLE)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_that_needs_two_samples_gets_them(
    images: Path, tmp_path: Path, reference: Reference, engine: str
) -> None:
    # 60 images: everyone has 10 of them, in batches of 5.
    changes = {"partition__kind": "iid", "train__batch_size": 5}
    experiment = double(images, "own_methods:NeedsTwo", changes)
    found = ENGINES[engine](experiment, tmp_path / "run")
    assert_equivalent(found.path, reference.path(experiment), experiment, DOUBLE)


# Going on with another engine


def turn(path: Path, engine: str) -> None:
    """Write another engine into the settings of a run."""
    file = path / "experiment.toml"
    before = file.read_text()
    (line,) = [each for each in before.splitlines() if each.startswith("engine = ")]
    file.write_text(before.replace(line, f'engine = "{engine}"'))


@pytest.mark.parametrize("method", [*METHODS, "custom_method:Scaffold", "own_methods:FedPer"])
@pytest.mark.parametrize(("first", "second"), [("stacked", "loop"), ("loop", "stacked")])
def test_a_run_goes_on_with_another_engine(
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
def test_a_reading_decides_nothing_about_what_clients_keep(images: Path, engine: str) -> None:
    experiment = double(images, "own_methods:Counts", RAGGED | {"engine": engine})
    data = load_federated(experiment)
    model = Mlp((data.input_size, *HIDDEN), data.num_classes)
    read, unread = build(experiment, data, model), build(experiment, data, model)
    for _ in range(2):
        read.run_round(evaluate=True)
        unread.run_round(evaluate=False)
    assert len(read._engine.state()) == 6
    assert_close_tensors(unread._engine.state(), read._engine.state(), 0)


@pytest.mark.parametrize("engine", ["auto", "stacked"])
def test_clients_that_keep_something_beside_clients_that_do_not_yet(
    images: Path, tmp_path: Path, engine: str
) -> None:
    """With client sampling some have a state from an earlier round, and some have none."""
    experiment = double(images, "own_methods:Counts", {"fraction": 0.5})
    run(experiment.replace(engine="loop"), tmp_path / "loop")
    run(experiment.replace(engine=engine), tmp_path / "other")
    assert_equivalent(tmp_path / "other", tmp_path / "loop", experiment, DOUBLE)


# One client goes astray


def build(experiment: Experiment, data: FederatedData, model: Model) -> Federation:
    found = find_method(experiment.method)
    experiment = experiment.resolved(found.defaults)
    method = found(experiment, data.num_classes)
    initial = model.init(generator(experiment.seed, "weights"), getattr(torch, experiment.dtype))
    clock = Clock()
    engine = InProcessEngine(experiment, method, model, data, initial, clock)
    return Federation(
        experiment, method, engine, initial, dimension=model.embedding_size, clock=clock
    )


def spoil(data: FederatedData, victim: str, factor: float) -> FederatedData:
    """Return the data with the inputs of one client multiplied."""
    inputs = data.client(victim).inputs * factor
    clients = tuple(
        ClientData(c.name, inputs, c.labels, c.test) if c.name == victim else c
        for c in data.clients
    )
    return FederatedData(
        data.dataset,
        data.class_names,
        clients,
        data.test_inputs,
        data.test_labels,
        data.partition,
    )


def run_spoiled(
    experiment: Experiment, victim: str, factor: float
) -> tuple[Federation, list[RoundRecord]]:
    data = spoil(load_federated(experiment), victim, factor)
    federation = build(experiment, data, Mlp((data.input_size, *HIDDEN), data.num_classes))
    return federation, [federation.run_round(evaluate=True) for _ in range(2)]


ASTRAY: dict[str, tuple[float, str, dict[str, Any]]] = {
    "NaN": (float("nan"), "loss is nan", {}),
    "explodes": (1e155, "loss is nan", {}),
    "leaves float64 in its only step": (1e200, "not finite", {"train__batch_size": 1000}),
    "goes too far": (1e5, "changed by", {"train__batch_size": 1000, "guard__max_norm": 100.0}),
}


@pytest.mark.parametrize("limit", [0, ENDLESS])
@pytest.mark.parametrize("method", ["fedavg", "mp-fedcl", "own_methods:FedPer", "own_methods:Moon"])
@pytest.mark.parametrize("case", ASTRAY)
def test_a_client_that_goes_astray_costs_its_stack_nothing(
    images: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    method: str,
    limit: int,
) -> None:
    factor, reason, changes = ASTRAY[case]
    monkeypatch.setattr(f"{CHOICE}._MOST_ROWS", limit)
    experiment = double(images, method, RAGGED | changes)
    victim = "client-5"
    wanted, theirs = run_spoiled(experiment.replace(engine="loop"), victim, factor)
    found, ours = run_spoiled(experiment.replace(engine="stacked"), victim, factor)
    for left, right in zip(ours, theirs, strict=True):
        assert list(right.clients.rejected) == [victim]
        assert reason in right.clients.rejected[victim]
        assert list(left.clients.rejected) == [victim]
        assert reason in left.clients.rejected[victim]
        assert left.accuracy == right.accuracy
        assert left.accuracy_per_client == right.accuracy_per_client
        assert left.loss == pytest.approx(right.loss, rel=DOUBLE)
    assert_close_tensors(found.state.server.params, wanted.state.server.params, DOUBLE)
    assert found.pool.names == wanted.pool.names
    if len(wanted.pool):
        torch.testing.assert_close(found.pool.vectors, wanted.pool.vectors, rtol=0, atol=DOUBLE)
    assert_close_tensors(found._engine.state(), wanted._engine.state(), DOUBLE)
    assert not any(key.split("/")[1] == victim for key in found._engine.state())


# The whole encoder


def test_trained_encoders_in_a_stack_are_the_loops() -> None:
    key = torch.Generator().manual_seed(3)
    size = 8
    pixels = torch.randint(0, 256, (9, 3 * size * size), generator=key).to(torch.uint8)
    labels = torch.tensor([0, 1, 1, 0, 1, 0, 0, 0, 1])
    parts = {"a": slice(0, 1), "b": slice(1, 5), "c": slice(5, 7)}
    everything = torch.arange(2)
    clients = tuple(
        ClientData(name, pixels[part], labels[part], everything) for name, part in parts.items()
    )
    data = FederatedData("noise", ("x", "y"), clients, pixels[7:], labels[7:], {})
    weights = ResNet18().init(torch.Generator().manual_seed(1), torch.float32)
    model = TrainableEncoder(weights, Preprocessing(size), 2)
    experiment = Experiment(method="mp-fedcl").replace(
        dtype="float64", train__batch_size=2, prototypes__per_class=2
    )
    federations = [
        build(experiment.replace(engine=engine), data, model) for engine in ("stacked", "loop")
    ]
    found, wanted = (each.run_round(evaluate=True) for each in federations)
    assert found.accuracy == wanted.accuracy
    assert found.clients == wanted.clients
    assert len(wanted.clients.answered) == 3
    assert found.loss == pytest.approx(wanted.loss, rel=DOUBLE)
    left, right = federations
    assert_close_tensors(left.state.server.params, right.state.server.params, DOUBLE)
    models = [dict(each._engine.personal_models(each.shared_parameters)) for each in federations]
    assert models[1].keys() == parts.keys()
    for name, params in models[1].items():
        assert_close_tensors(models[0][name], params, DOUBLE, name)
    torch.testing.assert_close(left.pool.vectors, right.pool.vectors, rtol=1e-8, atol=1e-12)


def test_domains_of_very_different_sizes(
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
