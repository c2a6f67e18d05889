"""Experiments that compare engines with the loop: various clients, settings and limits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpfedcl.data.client_data import ClientData, FederatedData
from mpfedcl.experiment import Experiment
from mpfedcl.methods import find_method
from mpfedcl.models import Model
from mpfedcl.rounds.loop import RoundLoop
from small_experiments import HIDDEN, METHODS, assemble_federation, small

DOUBLE, SINGLE = 1e-9, 1e-5
"""Relative distance of weights: 1e-5 is promised; rounding in float64 is far less."""

CHOICE = "mpfedcl.engines.trainers"
AS_ROWS = {"mpfedcl.engines.trainers.factored.is_smaller_written_out": lambda _: False}
"""Factored clients are never written out."""
IN_TURN = {f"{CHOICE}.MOST_ROWS": 0, f"{CHOICE}.MOST_STACKED": 0}
MIXED = AS_ROWS | {f"{CHOICE}.MOST_ROWS": 8, f"{CHOICE}.LEAST_TOGETHER": 1}
"""Small clients are factored; large ones are trained in turn."""


@dataclass(frozen=True)
class Situation:
    """Special clients, settings or limits of the engine."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    methods: Sequence[str] = METHODS
    holds: Callable[[Experiment, list[ClientData]], bool] = lambda *_: True
    """Whether the data match the name of the situation."""

    def experiment(self, root: Path, method: str) -> Experiment:
        return double(root, method, self.changes)


FEDCL = ("mp-fedcl", "sp-fedcl", "dp-fedcl")
DIFFERENT = ("fedprox", "fedproto", "mp-fedcl")
"""A loss beyond linear layers; local models; shared models and prototypes."""
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
    "fixed steps": Situation(
        RAGGED | {"train__steps": 7},
        methods=(*DIFFERENT, "fednova", "fedrep", "ditto", "pfedme"),
        holds=lambda _, c: min(sizes(c)) < 7 * 4 < 2 * max(sizes(c)),
    ),
    "fixed steps as rows": Situation(
        RAGGED | {"train__steps": 2},
        AS_ROWS,
        methods=("mp-fedcl", "fedavg"),
        holds=lambda _, c: min(sizes(c)) < 2 * 4 < max(sizes(c)),
    ),
    "class weights": Situation(
        RAGGED | {"train__class_weights": "balanced"},
        methods=(*DIFFERENT, "fedavg", "fedlc", "ditto"),
    ),
    "class weights as rows": Situation(
        RAGGED | {"train__class_weights": "balanced"}, AS_ROWS, methods=("mp-fedcl", "fedavg")
    ),
    "augmented": Situation(
        RAGGED | {"train__augment": "crop-flip", "train__epochs": 2},
        methods=(*DIFFERENT, "fedavg", "ditto"),
    ),
    "augmented, as rows": Situation(
        RAGGED | {"train__augment": "flip"}, AS_ROWS, methods=("mp-fedcl", "fedavg")
    ),
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
    "numbers of prototypes chosen": Situation(
        {"prototypes__per_class": "auto", "partition__kind": "iid", "clients": 2},
        methods=("mp-fedcl", "fedavg"),
        holds=lambda e, c: e.prototypes.per_class == "auto" and min(sizes(c)) > 20,
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
        {"mpfedcl.engines.in_process.CLIENTS_AT_ONCE": 16},
        methods=DIFFERENT,
        holds=lambda _, c: len(c) > 2 * 16,
    ),
    "chunks of two": Situation(
        RAGGED, {"mpfedcl.engines.in_process.CLIENTS_AT_ONCE": 2}, methods=DIFFERENT
    ),
    "few clients": Situation({"clients": 2}, methods=DIFFERENT),
    "all in turn": Situation(
        {"partition__kind": "quantity", "partition__alpha": 0.8, "train__epochs": 2},
        IN_TURN,
        holds=lambda _, c: 1 in sizes(c) and any(size % 4 == 1 for size in sizes(c) if size > 4),
    ),
    "in turn, weights decay": Situation(
        RAGGED | {"train__weight_decay": 0.1, "train__momentum": 0.9, "train__lr": 0.02},
        IN_TURN,
        methods=DIFFERENT,
    ),
    "in turn, no momentum": Situation(
        RAGGED | {"train__weight_decay": 0.1, "train__momentum": 0.0}, IN_TURN, methods=DIFFERENT
    ),
    "all as rows": Situation(RAGGED | {"train__epochs": 2}, AS_ROWS),
    "large and small in one chunk": Situation(
        RAGGED,
        MIXED,
        # Large clients are between small ones, so both kinds alternate in the mean.
        holds=lambda _, c: "".join("SL"[size > 8] for size in sizes(c)).strip("L").count("L") > 0,
    ),
    "large and small, models at home": Situation(
        RAGGED | {"share_model": False}, MIXED, methods=("mp-fedcl",)
    ),
}


def double(root: Path, method: str, changes: Mapping[str, Any]) -> Experiment:
    """Return three rounds of six clients in float64, with large steps."""
    settings = {
        "rounds": 3,
        "clients": 6,
        "dtype": "float64",
        "partition__alpha": 0.5,
        "train__batch_size": 4,
        "train__lr": 0.1,
        "model__hidden": HIDDEN,
    }
    return small(root, method, **settings | dict(changes))


def build(experiment: Experiment, data: FederatedData, model: Model) -> RoundLoop:
    """Return a federation with the given data and model."""
    experiment = experiment.resolved(find_method(experiment.method).defaults)
    return assemble_federation(experiment, data, model)
