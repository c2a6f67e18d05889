"""Bad answers within secure sums: each costs its client alone, or the round, and never a sum."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from federations import LoopbackFederation, rewrite
from flwr.app import Message as FlowerMessage
from loopback import Tamper
from secure_federations import round_of, secure_experiment, stage_of

from mpfedcl.network.flower.records import from_records
from small_experiments import read_records

pytestmark = pytest.mark.usefixtures("quick_network")


def change(
    stage: str,
    client: str,
    values: Callable[[dict[str, Any]], dict[str, Any]],
    arrays: Callable[[dict[str, Any]], dict[str, Any]] = lambda arrays: arrays,
) -> Tamper:
    def tamper(name: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if name != client or stage_of(request) != stage or round_of(request) != 1:
            return reply
        return rewrite(reply, request, values, arrays)

    return tamper


def show_keys(**changes: str) -> Tamper:
    return change("advertise", "client-1", lambda v: {"advert": {**v["advert"], **changes}})


@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (change("advertise", "client-1", lambda _: {"advert": {}}), "channel must be hexadecimal"),
        (change("advertise", "client-1", lambda _: {}), "advert is None"),
        # Keys with which the others could not go on: they would end the sum for all.
        (show_keys(masking="00" * 32), "nobody can agree on a key"),
        (show_keys(channel="09".ljust(64, "0"), masking="09".ljust(64, "0")), "must be two keys"),
        (show_keys(identity="00", signature="00"), "its keys are not signed"),
        (change("share", "client-1", lambda _: {"sealed": {"client-0": "00"}}), "each of the oth"),
        (change("share", "client-1", lambda _: {"sealed": []}), "sealed is"),
        (change("round", "client-1", lambda v: v, lambda _: {}), "masked numbers are missing"),
        (
            change("round", "client-1", lambda v: v, lambda a: {"masked": a["masked"][:5]}),
            "its masked numbers are [5]",
        ),
    ],
)
def test_bad_answer_costs_its_client_alone(
    images: Path, tmp_path: Path, tamper: Tamper, words: str
) -> None:
    federation = LoopbackFederation(secure_experiment(images), tmp_path, tamper)
    federation.serve()
    first, second = read_records(federation.path)
    assert list(first["clients"]["rejected"]) == ["client-1"]
    assert words in first["clients"]["rejected"]["client-1"]
    assert len(first["clients"]["answered"]) == 3
    assert len(second["clients"]["answered"]) == 4


def test_replayed_and_reordered_answers_are_refused(images: Path, tmp_path: Path) -> None:
    """Masked numbers of the round before open nothing in this one, and say nothing wrong either."""
    kept: dict[str, FlowerMessage] = {}

    def replay(name: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if name == "client-1" and stage_of(request) == "share":
            if round_of(request) == 2:
                old = from_records(kept["share"].content).values
                return rewrite(reply, request, lambda _: old)
            kept["share"] = reply
        return reply

    federation = LoopbackFederation(secure_experiment(images, rounds=3), tmp_path, replay)
    federation.serve()
    # The others cannot open its old shares; they have enough without, as it does not vanish.
    records = read_records(federation.path)
    assert [record["unchanged"] for record in records] == [False, True, False]
    assert "client-1's" in records[1]["remarks"]["warnings"][0]
