"""Small federations with secure aggregation, and clients that go silent at a stage of a round."""

from pathlib import Path
from typing import Any

from federations import float64_experiment
from flwr.app import Message as FlowerMessage
from loopback import Tamper

from mpfedcl.experiment import Experiment
from mpfedcl.network.flower.records import from_records

STAGES = ("advertise", "share", "round", "reveal")


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


def round_of(request: FlowerMessage) -> int:
    return int(from_records(request.content).values.get("round", 0))


def lose(stage: str, *clients: str, in_round: int = 1) -> Tamper:
    """Let clients go silent at a stage of a round, and come back in the next one."""

    def tamper(name: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage | None:
        order = STAGES.index(stage_of(request)) if stage_of(request) in STAGES else -1
        is_over = round_of(request) == in_round and order >= STAGES.index(stage)
        return None if name in clients and is_over else reply

    return tamper
