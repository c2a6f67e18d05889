"""Secure aggregation over a network: equivalence, keys, bad answers and refusals."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from federations import (
    STAGES,
    LoopbackFederation,
    lose,
    rewrite,
    round_of,
    secure_experiment,
    stage_of,
    stop_after,
)
from flwr.app import Message as FlowerMessage
from loopback import Tamper

from equivalent_runs import assert_close_tensors, load_results
from mpfedcl.core.errors import InvalidInput, RunCutShort
from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.network.client import ClientRefusal
from mpfedcl.network.client.secure_aggregation import (
    SecureAggregation,
    draw_once,
    fingerprint,
    meet_clients,
    sign_advert,
)
from mpfedcl.network.client.state import ClientStateStore
from mpfedcl.network.setup.keys import load_node_key, make_node_key
from mpfedcl.network.transport import Message, MessageError
from mpfedcl.privacy.secure_aggregation import ProtocolError
from mpfedcl.privacy.secure_aggregation.primitives import decode, encode, is_signed
from mpfedcl.privacy.secure_aggregation.protocol import Session, SumClient
from mpfedcl.runs.observer import NO_CALLBACKS, Observer
from mpfedcl.runs.simulation import run_simulation
from opened_records import from_records
from small_experiments import assert_same_results, read_records, read_summary

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("quick_network")]


def run_alone(plan: Experiment, path: Path) -> Path:
    return run_simulation(plan, path, Observer(), NO_CALLBACKS).path


@pytest.mark.parametrize("method", ["fedavg", "fedgauss"])
def test_secure_aggregation_equals_simulation(images: Path, tmp_path: Path, method: str) -> None:
    plan = secure_experiment(images, method, encoder__name="none")
    federation = LoopbackFederation(plan, tmp_path)
    federation.serve()
    alone = run_alone(plan, tmp_path / "alone")
    ours, theirs = load_results(federation.path), load_results(alone)
    for name in ours.keys() & theirs.keys():
        # Sums in a ring do not depend on the order of addition.
        assert_close_tensors(ours[name], theirs[name], 1e-12, name)
    for left, right in zip(read_records(federation.path), read_records(alone), strict=True):
        assert left["clients"] == right["clients"]
        assert left["loss"] == right["loss"]
        assert left["bytes"]["down"] == right["bytes"]["down"]
    assert read_summary(federation.path)["accuracy"] == read_summary(alone)["accuracy"]


def test_server_sees_no_update_and_no_count(images: Path, tmp_path: Path) -> None:
    federation = LoopbackFederation(secure_experiment(images), tmp_path)
    federation.serve()
    for _, reply in federation.grid.replies:
        message = from_records(reply.content)
        assert not {"num_samples", "loss", "processed"} & message.values.keys()
        assert set(message.arrays) <= {"masked"}
        assert message.values.get("train", []) == []
    masked = [
        from_records(r.content).arrays["masked"]
        for n, r in federation.grid.replies
        if n == "client-0" and "masked" in from_records(r.content).arrays
    ]
    # Masks change from round to round, and look like nothing.
    assert abs(decode(masked[0])).mean() > 2**36
    assert not (masked[0] == masked[1]).any()


@pytest.mark.parametrize("stage", STAGES)
def test_client_lost_at_any_stage_affects_only_itself(
    images: Path, tmp_path: Path, stage: str
) -> None:
    federation = LoopbackFederation(secure_experiment(images), tmp_path, lose(stage, "client-2"))
    federation.serve()
    first, second = read_records(federation.path)
    assert first["clients"]["missing"] == ([] if stage == "reveal" else ["client-2"])
    assert not first["unchanged"]
    assert second["clients"]["missing"] == []


@pytest.mark.parametrize("stage", STAGES)
def test_round_below_threshold_is_lost_with_warning(
    images: Path, tmp_path: Path, stage: str
) -> None:
    tamper = lose(stage, "client-1", "client-2")
    federation = LoopbackFederation(secure_experiment(images), tmp_path, tamper)
    federation.serve()
    first, second = read_records(federation.path)
    assert first["unchanged"]
    assert "the secure sum was not opened" in first["remarks"]["warnings"][0]
    assert second["clients"]["answered"] == [f"client-{number}" for number in range(4)]


def test_lost_last_round_can_be_resumed(images: Path, tmp_path: Path) -> None:
    plan = secure_experiment(images, "fedgauss", encoder__name="none")
    lost: list[Tamper] = [lose("share", "client-0", "client-1")]
    federation = LoopbackFederation(plan, tmp_path, lambda *given: lost[0](*given))
    with pytest.raises(RunCutShort, match="Round 1: the secure sum was not opened because 2 of 4"):
        federation.serve()
    lost[0] = lambda _client, _request, reply: reply
    federation.resume()
    assert read_summary(federation.path)["accuracy"] is not None


@pytest.mark.thorough
def test_stopped_run_resumes_with_the_same_bits(images: Path, tmp_path: Path) -> None:
    plan = secure_experiment(images, rounds=3)
    whole = LoopbackFederation(plan, tmp_path / "whole")
    whole.serve()
    parts = LoopbackFederation(plan, tmp_path / "parts")
    parts.serve(stop_after(2))
    parts.resume()
    assert_same_results(parts.path, whole.path)


@pytest.mark.thorough
def test_opened_round_is_not_opened_for_others(images: Path, tmp_path: Path) -> None:
    """A server that repeats a round without one client could compute that client's update."""
    plan = secure_experiment(images, rounds=2)
    federation = LoopbackFederation(plan, tmp_path)
    federation.serve(stop_after(1))
    # The server forgets the round that was opened, and one client is away.
    for each in (federation.path / "checkpoint").glob("*"):
        each.unlink()
    (federation.path / "rounds.jsonl").unlink(missing_ok=True)
    del federation.grid.nodes[4]
    federation.resume()
    first = read_records(federation.path)[0]
    assert first["unchanged"]
    assert (
        "0 clients have revealed a share of the secret of client-0"
        in first["remarks"]["warnings"][0]
    )


def test_client_can_require_secure_aggregation(images: Path, tmp_path: Path) -> None:
    plan = secure_experiment(images, secure_aggregation=False, network__patience=1.0)
    policy = {"secure_aggregation": {"required": True}}
    federation = LoopbackFederation(plan, tmp_path, policy=policy)
    with pytest.raises(RunCutShort, match=r"policy \[secure_aggregation\] required is true"):
        federation.serve()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "mp-fedcl"}, "with secure_aggregation it must be one of"),
        ({"aggregation__rule": "median"}, "with secure_aggregation it must be 'mean'"),
    ],
)
def test_invalid_change_is_rejected_before_asking_clients(
    images: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    federation = LoopbackFederation(secure_experiment(images).replace(**changes), tmp_path)
    with pytest.raises(InvalidInput, match=words):
        federation.serve()
    assert federation.grid.requests == []


# With a privacy budget


def test_budget_holds_and_noise_is_drawn_once(images: Path, tmp_path: Path) -> None:
    """A repeated round gets the same noisy values: a bit-identical release."""
    plan = secure_experiment(images, "fedgauss", encoder__name="none", privacy__epsilon=3.0)
    federation = LoopbackFederation(plan, tmp_path)
    federation.serve(stop_after(0))
    federation.resume()
    assert read_summary(federation.path)["privacy"]["spent"] == pytest.approx(3.0, rel=1e-3)
    first = load_results(federation.path)["statistics.safetensors"]
    for each in [*(federation.path / "checkpoint").glob("*"), federation.path / "summary.json"]:
        each.unlink()
    (federation.path / "rounds.jsonl").unlink()
    for each in (federation.path / "privacy").glob("*"):
        each.unlink()
    federation.resume()
    assert_close_tensors(load_results(federation.path)["statistics.safetensors"], first, 0)


def test_noise_for_more_clients_is_not_used_for_fewer(tmp_path: Path) -> None:
    store = ClientStateStore(tmp_path, "0" * 32)
    numbers = numpy.arange(3, dtype=numpy.uint64)
    plan = Experiment(secure_aggregation=True)

    def keep(drawn: Tensors) -> Tensors:
        if (found := store.find_drawn(1)) is not None:
            return found
        store.keep_drawn(1, drawn)
        return drawn

    first = draw_once(keep, plan, lambda _: numbers, 5)
    again = draw_once(keep, plan, lambda _: numbers + numpy.uint64(1), 5)
    assert numpy.array_equal(first, again)
    with pytest.raises(ProtocolError, match="drawn for a sum of more clients"):
        draw_once(keep, plan, lambda _: numbers, 3)


def test_secure_aggregation_waits_for_three_clients(images: Path, tmp_path: Path) -> None:
    """No rounds are lost if too few clients are connected to open a sum."""
    plan = secure_experiment(images, network__patience=1.0)
    federation = LoopbackFederation(plan, tmp_path, count=2)
    with pytest.raises(RunCutShort, match="min_clients is 3; fewer were connected"):
        federation.serve()


def with_keys(federation: LoopbackFederation, folder: Path) -> LoopbackFederation:
    """Give each client a key, as `mpfedcl federation init` makes it."""
    for share in range(4):
        key = folder / f"client-{share}.key"
        make_node_key(key, folder / f"client-{share}.pub")
        federation.join(share, key=str(key))
    return federation


@pytest.mark.whole
def test_clients_store_the_keys_of_others(images: Path, tmp_path: Path) -> None:
    federation = with_keys(LoopbackFederation(secure_experiment(images), tmp_path), tmp_path)
    federation.serve()
    assert all(len(record["clients"]["answered"]) == 4 for record in read_records(federation.path))
    known = json.loads((federation.state_folder(0) / "known-clients.json").read_text())
    assert known["client-1"] == (tmp_path / "client-1.pub").read_text().strip()
    assert set(known) == {"client-1", "client-2", "client-3"}


@pytest.mark.whole
@pytest.mark.parametrize("is_honest", [True, False])
def test_server_cannot_insert_its_own_keys(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_honest: bool
) -> None:
    """A server that stands between the clients would read their shares; they stop instead.

    Where it is a client that shows such keys, an honest server leaves that client out.
    """
    if not is_honest:
        monkeypatch.setattr("mpfedcl.network.server.engine.find_odd", lambda *_: {})
    stranger = tmp_path / "stranger.key"
    make_node_key(stranger, tmp_path / "stranger.pub")

    def forge(name: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        number = round_of(request)
        if name != "client-1" or stage_of(request) != "advertise" or number not in (2, 3):
            return reply
        session = Session(from_records(request.content).values["run"], number, 0.5)
        advert = SumClient(name, session).advertise()
        # First signed by the right key for another purpose, then by an unknown key.
        key, signed_name = stranger, name
        if number == 2:
            key, signed_name = tmp_path / "client-1.key", "client-0"
        forged = sign_advert(key, advert, session, signed_name).to_values()
        return rewrite(reply, request, lambda _: {"advert": forged})

    plan = secure_experiment(images, rounds=4)
    federation = with_keys(LoopbackFederation(plan, tmp_path, forge), tmp_path)
    federation.serve()
    records = read_records(federation.path)
    rejected = [record["clients"]["rejected"] for record in records]
    if is_honest:
        assert [list(each) for each in rejected] == [[], ["client-1"], ["client-1"], []]
        assert "its keys are not signed" in rejected[1]["client-1"]
        assert "signed by another key than before" in rejected[2]["client-1"]
        return
    assert [record["unchanged"] for record in records] == [False, True, True, False]
    assert "the keys of client-1 are not signed by that client" in rejected[1]["client-0"]
    assert "client-1 has another key than before" in rejected[2]["client-0"]
    assert "the roster lacks the keys of this client" in rejected[2]["client-1"]


def test_changed_key_is_refused(tmp_path: Path) -> None:
    known = tmp_path / "known.json"
    assert meet_clients(known, {"ana": b"key 1", "bo": b"key 2"}) == ["ana", "bo"]
    assert meet_clients(known, {"ana": b"key 1"}) == []
    with pytest.raises(ProtocolError, match="ana has another key than before"):
        meet_clients(known, {"ana": b"key 3"})
    known.write_text("{")
    with pytest.raises(InvalidInput, match="cannot be read"):
        meet_clients(known, {"ana": b"key 3"})


@pytest.mark.parametrize("content", [b"", b"no key", b"-----BEGIN OPENSSH PRIVATE KEY-----"])
def test_malformed_key_file_is_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(InvalidInput, match="cannot be read as a client's key"):
        load_node_key(tmp_path / "key")


def test_signatures_are_verified(tmp_path: Path) -> None:
    make_node_key(tmp_path / "key", tmp_path / "pub")
    session = Session("run", 1, 0.5)
    advert = SumClient("ana", session).advertise()
    signed = sign_advert(tmp_path / "key", advert, session, "ana")
    assert signed.is_signed(session, "ana")
    assert not signed.is_signed(session, "bo")
    assert not signed.is_signed(replace(session, round=2), "ana")
    assert not advert.is_signed(session, "ana")
    content = advert.signed_content(session, "ana")
    assert not is_signed(signed.identity, b"", content)
    assert not is_signed(b"no key", signed.signature, content)
    assert fingerprint(signed.identity).startswith("SHA256:")


Change = Callable[[dict[str, Any]], dict[str, Any]]


def keep(sent: dict[str, Any]) -> dict[str, Any]:
    return sent


def show_keys(**changes: str) -> Change:
    return lambda values: {"advert": {**values["advert"], **changes}}


BAD_ANSWERS: list[tuple[str, Change, Change, str]] = [
    ("advertise", lambda _: {"advert": {}}, keep, "channel must be hexadecimal"),
    ("advertise", lambda _: {}, keep, "advert is None"),
    # Keys with which the others could not go on: they would end the sum for all.
    ("advertise", show_keys(masking="00" * 32), keep, "invalid for key agreement"),
    (
        "advertise",
        show_keys(channel="09".ljust(64, "0"), masking="09".ljust(64, "0")),
        keep,
        "must be two keys",
    ),
    ("advertise", show_keys(identity="00", signature="00"), keep, "its keys are not signed"),
    ("share", lambda _: {"sealed": {"client-0": "00"}}, keep, "every other client"),
    ("share", lambda _: {"sealed": []}, keep, "sealed is"),
    ("round", keep, lambda _: {}, "masked values are missing"),
    ("round", keep, lambda a: {"masked": a["masked"][:5]}, "its masked values are [5]"),
]
"""A stage, the changed values and arrays of its answer, and the recorded reason."""


def test_bad_secure_answer_affects_only_its_client(images: Path, tmp_path: Path) -> None:
    """One client sends a different bad answer in each round but the last."""

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


def test_replayed_and_reordered_answers_are_rejected(images: Path, tmp_path: Path) -> None:
    """Masked values of the previous round neither open nor falsify a sum in this round."""
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
    assert "client-1" in records[1]["remarks"]["warnings"][0]


RUN = "0" * 32


def part(folder: Path, **values: Any) -> SecureAggregation:
    message = Message({"run": RUN, "round": 1, **values})
    return SecureAggregation("ana", folder, None, Experiment(secure_aggregation=True), message)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"run": "../../etc"}, "32 hexadecimal digits"),
        ({"round": "1"}, "round is '1'"),
        ({"stage": "open"}, "stage is 'open'; it must be one of advertise, share, reveal"),
        ({"stage": 3}, "stage is 3"),
    ],
)
def test_client_refuses_malformed_requests(
    tmp_path: Path, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(MessageError, match=words):
        part(tmp_path, **{"stage": "advertise", **values}).answer()


def test_stages_out_of_order_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ClientRefusal, match="it has not started round 1"):
        part(tmp_path, stage="share", adverts={}).answer()
    part(tmp_path, stage="advertise").answer()
    with pytest.raises(ClientRefusal, match="the next stage is share"):
        part(tmp_path, sealed={}).mask(lambda _: numpy.zeros(1, dtype=numpy.uint64))
    with pytest.raises(ClientRefusal, match="0 clients take part"):
        part(tmp_path, stage="share", adverts={}).answer()
    with pytest.raises(ClientRefusal, match="it has not started round 2"):
        part(tmp_path, stage="reveal", survivors=[], round=2).answer()


def test_damaged_secrets_file_is_rejected(tmp_path: Path) -> None:
    part(tmp_path, stage="advertise").answer()
    file = tmp_path / RUN / "secure-sum.json"
    assert (file.parent.stat().st_mode & 0o077) == 0
    file.write_text("{")
    with pytest.raises(ClientRefusal, match=r"secure-sum\.json is damaged"):
        part(tmp_path, stage="advertise").answer()


def test_value_out_of_range_is_named(tmp_path: Path) -> None:
    members = {name: part(tmp_path / name, stage="advertise") for name in ("bo", "cy")}
    adverts = {name: each.answer().values["advert"] for name, each in members.items()}
    adverts["ana"] = part(tmp_path, stage="advertise").answer().values["advert"]
    sealed = part(tmp_path, stage="share", adverts=adverts).answer().values["sealed"]
    assert set(sealed) == {"bo", "cy"}
    with pytest.raises(
        ClientRefusal, match=r"weight contains 1e\+30; with secure aggregation of 3 clients"
    ):
        part(tmp_path, sealed={}).mask(lambda count: encode("weight", numpy.array([1e30]), count))
