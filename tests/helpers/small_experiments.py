"""Small experiments, and what two runs must have in common to be the same."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
from safetensors.torch import load

from mpfedcl.core.tensors import Tensors
from mpfedcl.data.client_data import FederatedData
from mpfedcl.data.loading import load_federated_data
from mpfedcl.engines import DispatchingEngine, Engine, InProcessEngine
from mpfedcl.experiment import Experiment
from mpfedcl.methods import Asynchronous, Method, find_method
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.models import Mlp, Model
from mpfedcl.rounds.assembly import assemble
from mpfedcl.rounds.evaluation import RoundEvaluation
from mpfedcl.rounds.loop import RoundLoop, make_loop
from mpfedcl.rounds.systems import SystemModel, check_timing
from mpfedcl.runs.observer import Observer

METHODS = ("local", "fedavg", "fedprox", "fedproto", "sp-fedcl", "dp-fedcl", "mp-fedcl")
ONE_EXCHANGE = ("fedgauss", "fedlda", "fedncm", "fedridge", "fedcof", "local-gauss")
"""Methods that train nothing, in one round."""
EXAMPLES = Path(__file__).parents[2] / "examples"
HIDDEN = (24, 12)
"""Layers of a model of a thousand weights, for whole runs, some hundred of them."""
PHASES = ("broadcast", "train", "cluster", "aggregate", "evaluate", "checkpoint")

Json = dict[str, Any]

Say = Callable[..., tuple[int, str, str]]
"""The fixture `said`: words of a command to its exit code, output and errors."""


def save_images(
    path: Path, *, num_train: int = 60, num_test: int = 30, num_classes: int = 3
) -> None:
    """Write a domain of 6x6 images, a bright stripe a class on noise."""
    random = numpy.random.default_rng(7)
    labels = numpy.arange(num_train + num_test) % num_classes
    images = random.integers(0, 120, (len(labels), 6, 6), dtype=numpy.uint8)
    images[numpy.arange(len(labels)), labels % 6] += 120
    path.parent.mkdir(parents=True, exist_ok=True)
    numpy.savez(
        path,
        x_train=images[:num_train],
        y_train=labels[:num_train],
        x_test=images[num_train:],
        y_test=labels[num_train:],
    )


def save_vectors(
    path: Path,
    *,
    num_train: int = 60,
    num_test: int = 30,
    num_classes: int = 3,
    width: int = 5,
    dtype: str = "float32",
) -> None:
    """Write a domain of vectors, a corner a class with noise around it."""
    random = numpy.random.default_rng(7)
    labels = numpy.arange(num_train + num_test) % num_classes
    vectors = random.normal(0, 0.3, (len(labels), width))
    vectors[numpy.arange(len(labels)), labels % width] += 1
    path.parent.mkdir(parents=True, exist_ok=True)
    numpy.savez(
        path,
        x_train=vectors[:num_train].astype(dtype),
        y_train=labels[:num_train],
        x_test=vectors[num_train:].astype(dtype),
        y_test=labels[num_train:],
    )


def save_shifted_vectors(root: Path, *, num_domains: int = 3, width: int = 8) -> Path:
    """Write domains of vectors, each shifted by its own; of four classes one is in the tests alone.

    Return the root.
    """
    root.mkdir(parents=True)
    random = numpy.random.default_rng(7)
    for number in range(num_domains):
        # So that clients hold classes in different shares.
        labels = numpy.concatenate([numpy.arange(30) % (2 + number % 2), numpy.arange(12) % 4])
        vectors = random.normal(0, 0.6, (len(labels), width)) + random.normal(0, 1, width)
        vectors[numpy.arange(len(labels)), labels] += 2
        numpy.savez(
            root / f"site-{number}",
            x_train=vectors[:30],
            y_train=labels[:30],
            x_test=vectors[30:],
            y_test=labels[30:],
        )
    return root


def save_domains_of_vectors(root: Path) -> Path:
    """Write two domains of vectors, which differ in their sizes."""
    save_vectors(root / "one.npz")
    save_vectors(root / "two.npz", num_train=30, num_test=15)
    return root


def save_pictures(root: Path, classes: Sequence[str], domains: Sequence[str] = ("one",)) -> Path:
    """Write 12 pictures of 6x6 pixels of each class in each domain; return the root."""
    random = numpy.random.default_rng(7)
    for domain in domains:
        for name in classes:
            folder = root / domain / name
            folder.mkdir(parents=True)
            for number in range(12):
                pixels = random.integers(0, 256, (6, 6), dtype=numpy.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


def small(root: Path, method: str = "mp-fedcl", **changes: Any) -> Experiment:
    """Return an experiment of two rounds and three clients on the images below `root`."""
    settings = {
        "dataset__name": "folder",
        "dataset__root": root,
        "encoder__name": "none",
        "partition__alpha": 2.0,
        "partition__test": "shared",
        "prototypes__per_class": 2,
        "train__batch_size": 8,
        "workers": 1,
        "evaluate_every": 1,
        "evaluate_predictors": "all",
        "statistics__random_features": 8,
    }
    return Experiment(method=method, rounds=2, clients=3).replace(**settings | changes)


def flags(root: Path, **changes: Any) -> list[str]:
    """Return the same experiment as words of the command line."""
    settings = {
        "rounds": 2,
        "clients": 3,
        "dataset.name": "folder",
        "dataset.root": root,
        "encoder.name": "none",
        "partition.alpha": 2.0,
        "partition.test": "shared",
        "prototypes.per-class": 2,
        "train.batch-size": 8,
        "evaluate-every": 1,
        "evaluate-predictors": "all",
        "statistics.random-features": 8,
    }
    given = {name.replace("__", ".").replace("_", "-"): each for name, each in changes.items()}
    return [
        word
        for name, each in (settings | given).items()
        for word in (f"--{name}", *map(str, each if isinstance(each, tuple) else (each,)))
    ]


def tensors_of(update: Update) -> Tensors:
    """Return what a client sent, as tensors."""
    averaged = update.written_out().averaged
    assert isinstance(averaged, dict)
    return averaged


class MeddledEngine(Engine):
    """An engine that delegates to another one; tests override `meddle` to change its updates."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.members = engine.members

    def keep(self, *arguments: Any) -> None:
        self._engine.keep(*arguments)

    def evaluate(self, *arguments: Any, **options: Any) -> RoundEvaluation | None:
        return self._engine.evaluate(*arguments, **options)

    def personal_models(self, shared: Tensors) -> Iterator[tuple[str, Tensors]]:
        return self._engine.personal_models(shared)

    def remarks(self) -> dict[str, Any]:
        return self._engine.remarks()

    def state(self) -> Tensors:
        return self._engine.state()

    def restore(self, *arguments: Any) -> None:
        self._engine.restore(*arguments)

    def train(
        self, broadcast: Broadcast, names: Sequence[str], *, keep: Collection[str]
    ) -> Iterator[Update]:
        updates = self._engine.train(broadcast, names, keep=keep)
        sound = (each.written_out() for each in updates if isinstance(each, Update))
        yield from self.meddle(broadcast, names, sound)

    def meddle(
        self, broadcast: Broadcast, names: Sequence[str], updates: Iterable[Update]
    ) -> Iterable[Update]:
        return updates


def build_federation(
    experiment: Experiment,
    wrap: Callable[[Engine], Engine] = lambda engine: engine,
    *,
    method_class: type[Method] | None = None,
) -> RoundLoop:
    """Return a federation with a model of a few hundred weights, its engine wrapped."""
    found = method_class or find_method(experiment.method)
    experiment = experiment.resolved(found.defaults)
    check_timing(found, experiment)
    data = load_federated_data(experiment)
    model = Mlp((data.input_size, 8, 4), data.num_classes)
    return assemble_federation(experiment, data, model, wrap, found)


def assemble_federation(
    experiment: Experiment,
    data: FederatedData,
    model: Model,
    wrap: Callable[[Engine], Engine] = lambda engine: engine,
    method_class: type[Method] | None = None,
) -> RoundLoop:
    """Return a federation on data and a model that are given."""
    assembly = assemble(
        experiment,
        model,
        num_classes=data.num_classes,
        input_size=data.input_size,
        method_class=method_class,
        public=data.public,
    )
    is_asynchronous = isinstance(assembly.method, Asynchronous)
    local = (DispatchingEngine if is_asynchronous else InProcessEngine)(assembly, data)
    engine = wrap(local)
    counts = dict(zip(data.names, data.label_counts().tolist(), strict=True))
    return make_loop(assembly, engine, SystemModel.of(assembly, counts))


# What a run left behind


def read_records(path: Path) -> list[Json]:
    return [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]


def read_summary(path: Path) -> Json:
    summary: Json = json.loads((path / "summary.json").read_text())
    return summary


def without_timings(records: list[Json]) -> list[Json]:
    return [{name: each for name, each in r.items() if name != "seconds"} for r in records]


def results_of(path: Path) -> dict[str, bytes]:
    """Return the bytes of each model, of the pool and of kept sums, by file name."""
    found = [*path.glob("*.safetensors"), *path.glob("models/*"), *path.glob("statistics/*")]
    return {str(each.relative_to(path)): each.read_bytes() for each in found}


def assert_same_results(left: Path, right: Path) -> None:
    """Hold two runs to the same models and pool, to the bit."""
    ours, theirs = results_of(left), results_of(right)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


def assert_close_results(left: Path, right: Path, tolerance: float) -> None:
    """Hold two runs to the same models and pool, up to rounding."""
    for name, content in results_of(left).items():
        ours, theirs = load(content), load((right / name).read_bytes())
        assert ours.keys() == theirs.keys(), name
        for key, value in ours.items():
            distance = (value.double() - theirs[key].double()).norm()
            assert distance <= tolerance * value.double().norm(), (name, key)
    assert results_of(left).keys() == results_of(right).keys()


def assert_same_run(left: Path, right: Path) -> None:
    """Hold two runs to the same models, pool, records and summary; timings aside."""
    assert_same_results(left, right)
    assert without_timings(read_records(left)) == without_timings(read_records(right))
    assert without_timings([read_summary(left)]) == without_timings([read_summary(right)])
    assert (left / "experiment.toml").read_bytes() == (right / "experiment.toml").read_bytes()


def assert_same_tensors(left: Tensors, right: Tensors) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


class Warnings(list[str]):
    """Collects what a run warns of."""

    def observer(self) -> Observer:
        return Observer(on_warning=self.append)


class VirtualTime:
    """A clock that stands still while others work: deadlines are those of an idle machine."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
