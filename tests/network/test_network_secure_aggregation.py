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
from mpfedcl.network.client.policy import ClientPolicy
from mpfedcl.network.client.secure_aggregation import (
    SecureAggregation,
    draw_once,
    read_known_clients,
)
from mpfedcl.network.client.state import ClientStateStore
from mpfedcl.network.setup.folders import ClientSettings
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
    assert first["clients"]["missing"] == ([] if stage in ("confirm", "reveal") else ["client-2"])
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
        "0 clients have signed the list of survivors; 3 are needed"
        in first["remarks"]["warnings"][0]
    )


def test_client_can_require_secure_aggregation(images: Path, tmp_path: Path) -> None:
    plan = secure_experiment(images, secure_aggregation=False, network__patience=1.0)
    config: dict[str, Any] = {"policy": {"secure_aggregation": {"required": True}}}
    federation = LoopbackFederation(plan, tmp_path, **config)
    with pytest.raises(
        RunCutShort, match=r"\[secure_aggregation\] required is true; the server asked for a run"
    ):
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


def test_noise_for_more_honest_clients_is_not_used_for_fewer(tmp_path: Path) -> None:
    store = ClientStateStore(tmp_path, "0" * 32)
    numbers = numpy.arange(3, dtype=numpy.uint64)

    def plan(honest: int) -> Experiment:
        return Experiment(secure_aggregation=True, secure={"honest_clients": honest})

    def keep(drawn: Tensors) -> Tensors:
        if (found := store.find_drawn(1)) is not None:
            return found
        store.keep_drawn(1, drawn)
        return drawn

    first = draw_once(keep, plan(3), lambda _: numbers, 5)
    again = draw_once(keep, plan(3), lambda _: numbers + numpy.uint64(1), 50)
    assert numpy.array_equal(first, again)
    with pytest.raises(ProtocolError, match="drawn for more honest clients"):
        draw_once(keep, plan(2), lambda _: numbers, 5)


@pytest.mark.parametrize("stated", [None, 1, 2])
def test_client_adds_the_noise_that_its_operator_allows(
    images: Path, tmp_path: Path, stated: int | None
) -> None:
    """A server cannot make a client's noise smaller than its policy says."""
    plan = secure_experiment(images, privacy__epsilon=3.0, network__patience=1.0, rounds=2)
    plan = plan.replace(secure__honest_clients=3)
    policy = {"secure_aggregation": {} if stated is None else {"honest_clients": stated}}
    federation = LoopbackFederation(plan, tmp_path, policy=policy)
    words = rf"\[secure_aggregation\] honest_clients is {stated or 1}; the server asked for a share"
    with pytest.raises(RunCutShort, match=words):
        federation.serve()


def test_noise_shared_by_honest_clients_keeps_the_budget(images: Path, tmp_path: Path) -> None:
    plan = secure_experiment(images, privacy__epsilon=3.0, secure__honest_clients=3)
    policy = {"secure_aggregation": {"honest_clients": 3}}
    federation = LoopbackFederation(plan, tmp_path, policy=policy)
    federation.serve()
    assert read_summary(federation.path)["privacy"]["spent"] == pytest.approx(3.0, rel=1e-3)


def test_secure_aggregation_waits_for_three_clients(images: Path, tmp_path: Path) -> None:
    """No rounds are lost if too few clients are connected to open a sum."""
    plan = secure_experiment(images, network__patience=1.0)
    federation = LoopbackFederation(plan, tmp_path, count=2)
    with pytest.raises(RunCutShort, match="min_clients is 3; fewer were connected"):
        federation.serve()


def with_keys(federation: LoopbackFederation, folder: Path) -> LoopbackFederation:
    """Give each client its key and those of the others, as `mpfedcl federation init` does."""
    known = folder / "known-clients.pub"
    for share in range(4):
        key, public = folder / f"client-{share}.key", folder / f"client-{share}.pub"
        make_node_key(key, public)
        with known.open("a") as file:
            file.write(f"{public.read_text().strip()} client-{share}\n")
        federation.join(share, key=str(key), known_clients=str(known))
    return federation


@pytest.mark.whole
def test_clients_with_keys_sum_their_updates(images: Path, tmp_path: Path) -> None:
    lost = lose("confirm", "client-3")
    federation = with_keys(LoopbackFederation(secure_experiment(images), tmp_path, lost), tmp_path)
    federation.serve()
    assert all(len(record["clients"]["answered"]) == 4 for record in read_records(federation.path))


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
        session = Session(from_records(request.content).values["run"], number, 2 / 3)
        # First signed by the right key for another client, then by an unknown key.
        key, signed_name = load_node_key(stranger), name
        if number == 2:
            key, signed_name = load_node_key(tmp_path / "client-1.key"), "client-0"
        forged = SumClient(signed_name, session, key).advertise().to_values()
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
    assert "the key of 'client-1' is not that in known-clients.pub" in rejected[2]["client-0"]
    assert "the roster lacks the keys of this client" in rejected[2]["client-1"]


def test_known_clients_are_read(tmp_path: Path) -> None:
    file = tmp_path / "known-clients.pub"
    file.write_bytes(b"ecdsa-sha2-nistp384 AAAA ana\n\n# a comment of an operator\n")
    assert read_known_clients(file) == {"ana": b"ecdsa-sha2-nistp384 AAAA"}
    file.write_bytes(b"\xff")
    for missing in (None, tmp_path / "none", file):
        with pytest.raises(
            ProtocolError, match=r"known-clients\.pub of this client contains no key"
        ):
            read_known_clients(missing)


@pytest.mark.parametrize("content", [b"", b"no key", b"-----BEGIN OPENSSH PRIVATE KEY-----"])
def test_malformed_key_file_is_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(InvalidInput, match="cannot be read as a client's key"):
        load_node_key(tmp_path / "key")


def test_signatures_are_verified(tmp_path: Path) -> None:
    make_node_key(tmp_path / "key", tmp_path / "pub")
    session = Session("run", 1, 2 / 3)
    signed = SumClient("ana", session, load_node_key(tmp_path / "key")).advertise()
    assert signed.is_signed(session, "ana")
    assert not signed.is_signed(session, "bo")
    assert not signed.is_signed(replace(session, round=2), "ana")
    assert not SumClient("ana", session).advertise().is_signed(session, "ana")
    content = signed.signed_content(session, "ana")
    assert not is_signed(signed.identity, b"", content)
    assert not is_signed(b"no key", signed.signature, content)


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
    settings = ClientSettings("ana", folder)
    return SecureAggregation(settings, Experiment(secure_aggregation=True), message)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"run": "../../etc"}, "32 hexadecimal digits"),
        ({"round": "1"}, "round is '1'"),
        ({"stage": "open"}, "stage is 'open'; it must be one of advertise, share, confirm, reveal"),
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


# Clients with keys, whose every answer is that of a process that was started again


class Members:
    """Clients of one sum; each message is answered from what is on their disks."""

    def __init__(self, folder: Path, names: str = "ana bo cy di", **policy: int) -> None:
        self.names, known = names.split(), folder / "known-clients.pub"
        self.experiment = Experiment(secure_aggregation=True)
        self.settings = {}
        lines = []
        for name in self.names:
            key, public = folder / f"{name}.key", folder / f"{name}.pub"
            make_node_key(key, public)
            lines.append(f"{public.read_text().strip()} {name}\n")
            self.settings[name] = ClientSettings(
                name,
                folder / name,
                key=key,
                known_clients=known,
                policy=ClientPolicy(secure_aggregation=policy),
            )
        known.write_text("".join(lines))

    def ask(self, name: str, stage: str, number: int = 1, **values: Any) -> dict[str, Any]:
        message = Message({"run": RUN, "round": number, "stage": stage, **values})
        return SecureAggregation(self.settings[name], self.experiment, message).answer().values

    def mask(self, name: str, sealed: dict[str, Any], number: int = 1) -> None:
        message = Message({"run": RUN, "round": number, "sealed": sealed})
        zeros = numpy.zeros(3, dtype=numpy.uint64)
        SecureAggregation(self.settings[name], self.experiment, message).mask(lambda _: zeros)

    def begin(self, *, masks: bool = True) -> dict[str, Any]:
        """Go through the stages up to masking; return the adverts."""
        adverts = {name: self.ask(name, "advertise")["advert"] for name in self.names}
        sealed = {name: self.ask(name, "share", adverts=adverts)["sealed"] for name in self.names}
        for name in self.names if masks else ():
            self.mask(name, {n: each[name] for n, each in sealed.items() if n != name})
        return adverts

    def confirm(self, survivors: list[str]) -> dict[str, str]:
        return {
            name: self.ask(name, "confirm", survivors=survivors)["signature"] for name in survivors
        }


def test_restarted_client_answers_the_same_request_with_the_same_bytes(tmp_path: Path) -> None:
    members = Members(tmp_path)
    adverts = {name: members.ask(name, "advertise")["advert"] for name in members.names}
    assert members.ask("ana", "advertise")["advert"] == adverts["ana"]
    sealed = {n: members.ask(n, "share", adverts=adverts)["sealed"] for n in members.names}
    # A second set of shares would be points of another polynomial.
    assert members.ask("ana", "share", adverts=adverts)["sealed"] == sealed["ana"]
    fewer = {name: adverts[name] for name in ("ana", "bo", "cy")}
    with pytest.raises(ClientRefusal, match="share was requested; the next stage is mask"):
        members.ask("ana", "share", adverts=fewer)
    for name in members.names:
        members.mask(name, {n: each[name] for n, each in sealed.items() if n != name})
    with pytest.raises(ClientRefusal, match="mask was requested; the next stage is confirm"):
        members.mask("ana", {n: each["ana"] for n, each in sealed.items() if n != "ana"})
    signatures = members.confirm(members.names)
    # ECDSA draws a number for each signature: the same bytes were stored.
    assert members.ask("ana", "confirm", survivors=members.names)["signature"] == signatures["ana"]
    for other in (["ana", "bo", "cy"], ["ana", "bo", "di"]):
        with pytest.raises(ClientRefusal, match="confirm was requested; the next stage is reveal"):
            members.ask("ana", "confirm", survivors=other)
    with pytest.raises(ClientRefusal, match=r"2 clients have signed the list .*; 3 are needed"):
        members.ask("ana", "reveal", signatures={n: signatures[n] for n in ("ana", "bo")})
    revealed = members.ask("ana", "reveal", signatures=signatures)
    assert set(revealed["seeds"]) == {*members.names}
    assert members.ask("ana", "reveal", signatures=signatures) == revealed
    content = json.loads((tmp_path / "ana" / RUN / "secure-sum.json").read_text())
    assert content["client"]["secrets"] == content["client"]["sealed"] == {}


def test_opened_round_is_not_signed_for_others(tmp_path: Path) -> None:
    """Also not with new keys, nor once many rounds have been opened since."""
    members = Members(tmp_path)
    members.begin()
    signatures = members.confirm(members.names)
    members.ask("ana", "reveal", signatures=signatures)
    members.begin()
    with pytest.raises(ClientRefusal, match="the sum of round 1 was opened for other clients"):
        members.ask("ana", "confirm", survivors=["ana", "bo", "cy"])
    members.ask("bo", "confirm", survivors=["ana", "bo", "cy"])
    file = tmp_path / "ana" / RUN / "secure-sum.json"
    content = json.loads(file.read_text())
    content["opened"] = {str(number): members.names for number in range(2, 18)}
    file.write_text(json.dumps(content))
    with pytest.raises(ClientRefusal, match="round 1 is over"):
        members.ask("ana", "advertise")


def test_invented_clients_are_refused(tmp_path: Path) -> None:
    members = Members(tmp_path)
    adverts = {name: members.ask(name, "advertise")["advert"] for name in members.names}
    make_node_key(tmp_path / "zoe.key", tmp_path / "zoe.pub")
    session = Session(RUN, 1, 2 / 3)
    # An unknown client, a known name with another key, and a known client without a signature.
    for name, key, words in (
        ("zoe", load_node_key(tmp_path / "zoe.key"), "the key of 'zoe' is not that in known-cl"),
        ("bo", load_node_key(tmp_path / "zoe.key"), "the key of 'bo' is not that in known-clients"),
        ("bo", None, "the key of 'bo' is not that in known-clients"),
    ):
        invented = SumClient(name, session, key).advertise().to_values()
        with pytest.raises(ClientRefusal, match=words):
            members.ask("ana", "share", adverts={**adverts, name: invented})
    unsigned = {**adverts["bo"], "signature": adverts["cy"]["signature"]}
    with pytest.raises(ClientRefusal, match="the keys of bo are not signed by that client"):
        members.ask("ana", "share", adverts={**adverts, "bo": unsigned})
    (tmp_path / "known-clients.pub").unlink()
    with pytest.raises(ClientRefusal, match=r"known-clients\.pub of this client contains no keys"):
        members.ask("ana", "share", adverts=adverts)


def test_client_counts_verified_peers_at_each_stage(tmp_path: Path) -> None:
    members = Members(tmp_path, min_verified_peers=3)
    adverts = members.begin()
    with pytest.raises(ClientRefusal, match="min_verified_peers is 3; the server asked for a sum"):
        members.ask("ana", "confirm", survivors=["ana", "bo", "cy"])
    members.ask("ana", "confirm", survivors=members.names)
    members.ask("ana", "advertise", 2)
    fewer = {name: adverts[name] for name in ("ana", "bo", "cy")}
    with pytest.raises(ClientRefusal, match="min_verified_peers is 3; the server asked for a sum"):
        members.ask("ana", "share", 2, adverts=fewer)


def test_noise_shares_need_as_many_survivors(tmp_path: Path) -> None:
    members = Members(tmp_path, honest_clients=4)
    members.experiment = Experiment(
        secure_aggregation=True,
        privacy={"epsilon": 3.0},
        secure={"honest_clients": 4, "threshold": 0.7},
    )
    members.begin()
    with pytest.raises(ClientRefusal, match="a sum of 3 clients has too few for a share of 1/4"):
        members.ask("ana", "confirm", survivors=["ana", "bo", "cy"])
    members.ask("ana", "confirm", survivors=members.names)
