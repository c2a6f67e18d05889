"""Bad answers within secure aggregation: each costs its client alone, or the round, and never a sum."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from federations import LoopbackFederation, rewrite
from flwr.app import Message as FlowerMessage
from secure_federations import round_of, secure_experiment, stage_of

from mpfedcl.network.flower.records import from_records
from small_experiments import read_records

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("quick_network")]


Change = Callable[[dict[str, Any]], dict[str, Any]]


def keep(sent: dict[str, Any]) -> dict[str, Any]:
    return sent


def show_keys(**changes: str) -> Change:
    return lambda values: {"advert": {**values["advert"], **changes}}


BAD_ANSWERS: list[tuple[str, Change, Change, str]] = [
    ("advertise", lambda _: {"advert": {}}, keep, "channel must be hexadecimal"),
    ("advertise", lambda _: {}, keep, "advert is None"),
    # Keys with which the others could not go on: they would end the sum for all.
    ("advertise", show_keys(masking="00" * 32), keep, "nobody can agree on a key"),
    (
        "advertise",
        show_keys(channel="09".ljust(64, "0"), masking="09".ljust(64, "0")),
        keep,
        "must be two keys",
    ),
    ("advertise", show_keys(identity="00", signature="00"), keep, "its keys are not signed"),
    ("share", lambda _: {"sealed": {"client-0": "00"}}, keep, "each of the oth"),
    ("share", lambda _: {"sealed": []}, keep, "sealed is"),
    ("round", keep, lambda _: {}, "masked numbers are missing"),
    ("round", keep, lambda a: {"masked": a["masked"][:5]}, "its masked numbers are [5]"),
]
"""A stage; what becomes of the values and arrays of an answer in it; what is said of it."""


def test_bad_answer_costs_its_client_alone(images: Path, tmp_path: Path) -> None:
    """One client answers badly in each round but the last, each time in another way."""

    def tamper(name: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        number = round_of(request)
        if name != "client-1" or not 1 <= number <= len(BAD_ANSWERS):
            return reply
        stage, values, arrays, _ = BAD_ANSWERS[number - 1]
        return rewrite(reply, request, values, arrays) if stage_of(request) == stage else reply

    plan = secure_experiment(images, rounds=len(BAD_ANSWERS) + 1)
    federation = LoopbackFederation(plan, tmp_path, tamper)
    federation.serve()
    *records, last = read_records(federation.path)
    for record, (*_, words) in zip(records, BAD_ANSWERS, strict=True):
        assert list(record["clients"]["rejected"]) == ["client-1"], words
        assert words in record["clients"]["rejected"]["client-1"]
        assert len(record["clients"]["answered"]) == 3
        assert not record["unchanged"]
    assert len(last["clients"]["answered"]) == 4


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
