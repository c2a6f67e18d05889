"""Small federations over the loopback grid, and their comparison with simulations."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.app import Message as FlowerMessage
from loopback import LoopbackGrid, Tamper
from PIL import Image
from safetensors.torch import load_file

from equivalent_runs import assert_close_tensors, assert_same_predictions, load_results
from mpfedcl.api import CALLBACKS
from mpfedcl.data.secret_split import SECRET_FILE
from mpfedcl.experiment import Experiment
from mpfedcl.inference.calibration import METRIC_FILE
from mpfedcl.methods import PredictorName, SharesPrototypes, find_method
from mpfedcl.network.flower.records import PACKED, to_records
from mpfedcl.network.flower.transport import FlowerTransport
from mpfedcl.network.server.serve import resume_serving, serve
from mpfedcl.network.transport import Arrays, Message
from mpfedcl.runs.observer import Observer, RunResult
from opened_records import from_records
from small_experiments import (
    HIDDEN,
    Json,
    assert_same_results,
    read_records,
    read_summary,
    small,
    without_timings,
)

DOUBLE = 1e-9
"""Relative distance of weights: 1e-5 is documented; float64 rounding is far smaller."""

TRAIN, QUERY, EVALUATE = "train", "query", "evaluate"
QUICK = {"network__round_timeout": 30.0, "network__patience": 5.0}
"""Timeouts that no honest client here reaches, and that end a hanging test."""


def float64_experiment(root: Path, method: str = "mp-fedcl", **changes: Any) -> Experiment:
    """Return an experiment of three rounds in float64."""
    settings = {
        "rounds": 3,
        "dtype": "float64",
        "train__lr": 0.1,
        "partition__alpha": 0.5,
        "model__hidden": HIDDEN,
        # On by default over a network, but not in the simulations for comparison.
        "validation__bounds": "off",
    }
    return small(root, method, **settings | QUICK | changes)


class LoopbackFederation:
    """A grid with clients that hold the parts of an experiment's partition, and their state."""

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        tamper: Tamper = lambda _client, _request, reply: reply,
        *,
        count: int | None = None,
        grid: LoopbackGrid | None = None,
        **config: Any,
    ) -> None:
        self.experiment, self.folder, self.path = experiment, folder, folder / "run"
        self.grid = grid or LoopbackGrid(tamper)
        self._config = {"data": str(experiment.dataset.root), **config}
        for share in range(experiment.clients or 0 if count is None else count):
            self.join(share)

    def join(self, share: int, node: int | None = None, **config: Any) -> None:
        """Connect the client with a part of the partition."""
        name = f"client-{share}"
        values = {
            "name": name,
            "share": share,
            "state": str(self.state_folder(share)),
            **self._config,
        }
        self.grid.join(share + 1 if node is None else node, **values | config)

    def bring(self, node: int, name: str, data: Path, **config: Any) -> None:
        """Connect a client with its own folder."""
        values: dict[str, Any] = {
            "name": name,
            "data": str(data),
            "state": str(self.folder / f"memory-{name}"),
        }
        values |= config
        policy: Json = {"data": {}} | dict(values.get("policy", {}))
        values["policy"] = policy | {"data": {"test_fraction": OWN_TESTS} | policy["data"]}
        plant_secret(Path(values["state"]))
        self.grid.join(node, **values)

    def state_folder(self, share: int) -> Path:
        return self.folder / f"memory-{share}"

    def serve(self, observer: Observer | None = None, status: Path | None = None) -> RunResult:
        transport = FlowerTransport(self.grid)
        return serve(transport, self.experiment, self.path, status, observer, CALLBACKS)

    def resume(self, rounds: int | None = None) -> RunResult:
        transport = FlowerTransport(self.grid)
        return resume_serving(transport, self.path, rounds, callbacks=CALLBACKS)


def stop_after(count: int) -> Observer:
    """Stop a run after `count` trained rounds; the last one is not evaluated yet."""
    asked: list[None] = []

    def should_stop() -> bool:
        asked.append(None)
        return len(asked) > count

    return Observer(should_stop=should_stop)


# Comparison of runs


def readings_of(record: Json) -> dict[PredictorName, float | None]:
    predictors: dict[PredictorName, float | None] = record["accuracy"]["local_test"]
    return predictors


def assert_same_predictors(found: Json, wanted: Json, method: str) -> None:
    """Compare a round's predictors with a simulation's, as far as clients can evaluate them."""
    assert set(found["accuracy"]["global_test"].values()) == {None}
    kind = find_method(method)
    is_sent = not kind.trains or found["sent"]["prototype_floats"] > 0
    travels = issubclass(kind, SharesPrototypes) and kind.sends_pool and is_sent
    for predictor, value in readings_of(wanted).items():
        # Prototypes that are not sent are computed in simulations only for evaluation.
        expected = None if "prototype" in predictor and not travels else value
        assert readings_of(found)[predictor] == expected, predictor
    per_client = wanted["accuracy_per_client"]
    if "prototype" in kind.primary_predictor and not travels:
        per_client = dict.fromkeys(per_client)
    assert found["accuracy_per_client"] == per_client


def assert_like_simulation(found: Path, wanted: Path, experiment: Experiment) -> None:
    """Compare a run over a network with a simulation: weights, pool, predictions, records."""
    ours, theirs = load_results(found), load_results(wanted)
    # Only the clients have held-out samples to calibrate on.
    at_home = ("models/", METRIC_FILE)
    shared = {name: each for name, each in theirs.items() if not name.startswith(at_home)}
    assert ours.keys() == shared.keys()
    for name, tensors in shared.items():
        assert_close_tensors(ours[name], tensors, DOUBLE, name)
    assert_same_predictions(found, wanted, experiment, ours, theirs)
    for left, right in zip(read_records(found), read_records(wanted), strict=True):
        assert {k: left[k] for k in ("round", "clients", "bytes", "sent", "unchanged")} == {
            k: right[k] for k in ("round", "clients", "bytes", "sent", "unchanged")
        }
        ours_lost, lost = left["loss"], right["loss"]
        assert ours_lost == lost or abs(ours_lost - lost) <= DOUBLE * abs(lost)
    for key in (
        "accuracy",
        "accuracy_per_client",
        "bytes",
        "rejected",
        "rounds",
        "parameters_sent",
    ):
        assert read_summary(found)[key] == read_summary(wanted)[key], key


def assert_same_personal_models(federation: LoopbackFederation, wanted: Path) -> None:
    """Compare each client's state of the last round with the simulation's personal models."""
    theirs = load_results(wanted)
    for share in range(federation.experiment.clients or 0):
        files = sorted(federation.state_folder(share).glob("*/round-*.safetensors"))
        kept = load_file(files[-1])
        model = {k.removeprefix("personal/"): v for k, v in kept.items() if k.startswith("pers")}
        # Some one-shot methods have no personal models.
        assert_close_tensors(model, theirs.get(f"models/client-{share}.safetensors", {}), DOUBLE)


def assert_same_run(found: Path, wanted: Path) -> None:
    """Check that two runs over a network have bit-identical models, pool, records and summary."""
    assert_same_results(found, wanted)
    assert without_timings(read_records(found)) == without_timings(read_records(wanted))
    assert without_timings([read_summary(found)]) == without_timings([read_summary(wanted)])
    for name in ("confusion.json", "partition.json"):
        assert (found / name).read_bytes() == (wanted / name).read_bytes()


# Tampering with answers


def round_of(request: FlowerMessage) -> int:
    return int(from_records(request.content).values.get("round", 0))


def is_training(request: FlowerMessage) -> bool:
    return str(request.metadata.message_type) == TRAIN


def rewrite(
    reply: FlowerMessage,
    request: FlowerMessage,
    values: Callable[[Json], Json] = lambda values: values,
    arrays: Callable[[Arrays], Mapping[str, Any] | Array] = lambda arrays: arrays,
) -> FlowerMessage:
    """Return a reply with other values or arrays, packed into one Flower array."""
    message = from_records(reply.content)
    text = to_text(values(dict(message.values)))
    return FlowerMessage(records_of(text, arrays(dict(message.arrays))), reply_to=request)


def records_of(text: str, arrays: Mapping[str, Any] | Array) -> RecordDict:
    """Return the records of a message with any text and any arrays."""
    if isinstance(arrays, Array):
        packed = ArrayRecord({PACKED: arrays})
    else:
        made = {name: numpy.asarray(each) for name, each in arrays.items()}
        packed = to_records(Message({}, made)).array_records["arrays"]
    return RecordDict({"values": ConfigRecord({"json": text}), "arrays": packed})


def to_text(values: Json) -> str:
    """Return values as JSON, including values that an honest client would never send."""
    return json.dumps(values)


# Clients with their own folders, and actions between rounds


def save_pictures(folder: Path, *classes: str, count: int = 6, size: int = 6) -> Path:
    """Write a folder of noisy images per class, each class with a different bright stripe."""
    for place, name in enumerate(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
        random = numpy.random.default_rng(sum(name.encode()))
        for number in range(count):
            pixels = random.integers(0, 120, (size, size), dtype=numpy.uint8)
            pixels[place % size] += 120
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


OWN_TESTS = 0.5
"""Fraction of test samples of clients with own data, which have few."""


def plant_secret(memory: Path) -> None:
    """Give a client the same secret in every run of a test, so that its split is known."""
    memory.mkdir(parents=True, exist_ok=True)
    path = memory / SECRET_FILE
    if not path.exists():
        path.touch(mode=0o600)
        path.write_bytes(b"a secret that all tests know of.")


def folder_experiment(method: str = "mp-fedcl", **changes: Any) -> Experiment:
    """Return an experiment of two rounds for clients with their own folders."""
    settings = {"dataset__root": None, "rounds": 2, "network__patience": 0.3}
    return float64_experiment(Path(), method, **settings | changes)


def before_rounds(actions: Mapping[int, Callable[[], object]]) -> Observer:
    """Run actions before rounds, by round number."""
    number = 0

    def act() -> bool:
        nonlocal number
        number += 1
        actions.get(number, lambda: None)()
        return False

    return Observer(should_stop=act)


STAGES = ("advertise", "share", "round", "confirm", "reveal")


def secure_experiment(root: Path, method: str = "fedavg", **changes: Any) -> Experiment:
    settings = {
        "clients": 4,
        "rounds": 2,
        "secure_aggregation": True,
        "network__round_timeout": 6.0,
    }
    return float64_experiment(root, method, **settings | changes)


def stage_of(request: FlowerMessage) -> str:
    kind = str(request.metadata.message_type)
    values = from_records(request.content).values
    return str(values["stage"]) if kind == "query.secure" else {"train": "round"}.get(kind, kind)


def lose(stage: str, *clients: str, in_round: int = 1) -> Tamper:
    """Let clients be silent from a stage of a round on, and return in the next round."""

    def tamper(name: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage | None:
        order = STAGES.index(stage_of(request)) if stage_of(request) in STAGES else -1
        is_over = round_of(request) == in_round and order >= STAGES.index(stage)
        return None if name in clients and is_over else reply

    return tamper
