"""Secure sums over a network: a simulation's result; clients that vanish at any stage."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from federations import LoopbackFederation, float64_experiment, rewrite, stop_after
from flwr.app import Message as FlowerMessage
from loopback import Tamper

from equivalent_runs import assert_close_tensors, load_results
from mpfedcl.errors import InvalidInput, RunCutShort
from mpfedcl.experiment import Experiment
from mpfedcl.network.client.identity import Identity, KnownClients, fingerprint
from mpfedcl.network.client.secure_sums import draw_once
from mpfedcl.network.client.state import ClientStateStore
from mpfedcl.network.flower.records import from_records
from mpfedcl.network.setup.keys import make_node_key
from mpfedcl.runs.observer import NO_COMPANIONS, Observer
from mpfedcl.runs.simulation import run_simulation
from mpfedcl.secure_sums import ProtocolError
from mpfedcl.secure_sums.client import SumClient
from mpfedcl.secure_sums.fixed_point import decode
from mpfedcl.secure_sums.roster import Session
from mpfedcl.secure_sums.signatures import is_signed
from small_experiments import assert_same_results, read_records, read_summary

pytestmark = pytest.mark.usefixtures("quick_network")

STAGES = ("advertise", "share", "round", "reveal")


def experiment(root: Path, method: str = "fedavg", **changes: Any) -> Experiment:
    settings = {"clients": 4, "rounds": 2, "secure_sums": True, "network__round_timeout": 6.0}
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


def run_alone(plan: Experiment, path: Path) -> Path:
    return run_simulation(plan, path, Observer(), NO_COMPANIONS).path


@pytest.mark.parametrize("method", ["fedavg", "fedgauss"])
def test_same_as_the_simulation(images: Path, tmp_path: Path, method: str) -> None:
    plan = experiment(images, method, encoder__name="none")
    federation = LoopbackFederation(plan, tmp_path)
    federation.serve()
    alone = run_alone(plan, tmp_path / "alone")
    ours, theirs = load_results(federation.path), load_results(alone)
    for name in ours.keys() & theirs.keys():
        # Sums in a ring do not depend on who adds them up, nor in which order.
        assert_close_tensors(ours[name], theirs[name], 1e-12, name)
    for left, right in zip(read_records(federation.path), read_records(alone), strict=True):
        assert left["clients"] == right["clients"]
        assert left["loss"] == right["loss"]
        assert left["bytes"]["down"] == right["bytes"]["down"]
    assert read_summary(federation.path)["accuracy"] == read_summary(alone)["accuracy"]


def test_server_sees_no_update_and_no_count(images: Path, tmp_path: Path) -> None:
    federation = LoopbackFederation(experiment(images), tmp_path)
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
def test_client_that_dies_at_a_stage_costs_itself_alone(
    images: Path, tmp_path: Path, stage: str
) -> None:
    federation = LoopbackFederation(experiment(images), tmp_path, lose(stage, "client-2"))
    federation.serve()
    first, second = read_records(federation.path)
    assert first["clients"]["missing"] == ([] if stage == "reveal" else ["client-2"])
    assert not first["unchanged"]
    assert second["clients"]["missing"] == []


@pytest.mark.parametrize("stage", STAGES)
def test_below_the_threshold_the_round_is_lost_and_said(
    images: Path, tmp_path: Path, stage: str
) -> None:
    tamper = lose(stage, "client-1", "client-2")
    federation = LoopbackFederation(experiment(images), tmp_path, tamper)
    federation.serve()
    first, second = read_records(federation.path)
    assert first["unchanged"]
    assert "its secure sum was not opened" in first["remarks"]["warnings"][0]
    assert second["clients"]["answered"] == [f"client-{number}" for number in range(4)]


def test_lost_last_round_can_be_resumed(images: Path, tmp_path: Path) -> None:
    plan = experiment(images, "fedgauss", encoder__name="none")
    lost: list[Tamper] = [lose("share", "client-0", "client-1")]
    federation = LoopbackFederation(plan, tmp_path, lambda *given: lost[0](*given))
    with pytest.raises(RunCutShort, match="Round 1: its secure sum was not opened, because 2 of 4"):
        federation.serve()
    lost[0] = lambda _client, _request, reply: reply
    federation.resume()
    assert read_summary(federation.path)["accuracy"] is not None


def test_stopped_run_resumes_with_the_same_bits(images: Path, tmp_path: Path) -> None:
    plan = experiment(images, rounds=3)
    whole = LoopbackFederation(plan, tmp_path / "whole")
    whole.serve()
    parts = LoopbackFederation(plan, tmp_path / "parts")
    parts.serve(stop_after(2))
    parts.resume()
    assert_same_results(parts.path, whole.path)


def test_opened_round_is_not_opened_for_others(images: Path, tmp_path: Path) -> None:
    """A server that runs a round again without one client could tell that client's update."""
    plan = experiment(images, rounds=2)
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
    assert "0 clients have revealed a share of client-0's" in first["remarks"]["warnings"][0]


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
    federation = LoopbackFederation(experiment(images), tmp_path, tamper)
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

    federation = LoopbackFederation(experiment(images, rounds=3), tmp_path, replay)
    federation.serve()
    # The others cannot open its old shares; they have enough without, as it does not vanish.
    records = read_records(federation.path)
    assert [record["unchanged"] for record in records] == [False, True, False]
    assert "client-1's" in records[1]["remarks"]["warnings"][0]


def test_client_takes_part_with_secure_sums_alone(images: Path, tmp_path: Path) -> None:
    plan = experiment(images, secure_sums=False, network__patience=1.0)
    config: dict[str, Any] = {"secure-sums": True}
    federation = LoopbackFederation(plan, tmp_path, **config)
    with pytest.raises(RunCutShort, match="secure_sums is False; this client takes part with"):
        federation.serve()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "mp-fedcl"}, "with secure_sums it must be one of"),
        ({"aggregation__rule": "median"}, "with secure_sums it must be 'mean'"),
    ],
)
def test_refused_before_anybody_is_asked(
    images: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    federation = LoopbackFederation(experiment(images).replace(**changes), tmp_path)
    with pytest.raises(InvalidInput, match=words):
        federation.serve()
    assert federation.grid.requests == []


# Keys


def with_keys(federation: LoopbackFederation, folder: Path) -> LoopbackFederation:
    """Give each client a key, as `mpfedcl federation init` makes it."""
    for share in range(4):
        key = folder / f"client-{share}.key"
        make_node_key(key, folder / f"client-{share}.pub")
        federation.join(share, key=str(key))
    return federation


def test_clients_with_keys_know_each_other_again(images: Path, tmp_path: Path) -> None:
    federation = with_keys(LoopbackFederation(experiment(images), tmp_path), tmp_path)
    federation.serve()
    assert all(len(record["clients"]["answered"]) == 4 for record in read_records(federation.path))
    known = json.loads((federation.state_folder(0) / "known-clients.json").read_text())
    assert known["client-1"] == (tmp_path / "client-1.pub").read_text().strip()
    assert set(known) == {"client-1", "client-2", "client-3"}


@pytest.mark.parametrize("is_honest", [True, False])
def test_server_cannot_put_in_its_own_keys(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_honest: bool
) -> None:
    """A server that stands between the clients would read their shares; they stop instead.

    Where it is a client that shows such keys, an honest server leaves that client out.
    """
    if not is_honest:
        monkeypatch.setattr("mpfedcl.network.server.secure_round.find_odd", lambda *_: {})
    stranger = tmp_path / "stranger.key"
    make_node_key(stranger, tmp_path / "stranger.pub")

    def forge(name: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        number = round_of(request)
        if name != "client-1" or stage_of(request) != "advertise" or number not in (2, 3):
            return reply
        session = Session(from_records(request.content).values["run"], number, 0.5)
        advert = SumClient(name, session).advertise()
        # First signed by the right key, as something else; then by a key that nobody knows.
        signer = Identity(tmp_path / "client-1.key" if number == 2 else stranger)
        content = advert.signed_content(session, "client-0" if number == 2 else name)
        forged = advert.signed(signer.sign(content), signer.public).to_values()
        return rewrite(reply, request, lambda _: {"advert": forged})

    plan = experiment(images, rounds=4)
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
    assert "client-1 shows another key than before" in rejected[2]["client-0"]
    assert "does not have this client's own keys" in rejected[2]["client-1"]


def test_changed_key_is_refused(tmp_path: Path) -> None:
    known = KnownClients(tmp_path / "known.json")
    assert known.meet({"ana": b"key 1", "bo": b"key 2"}) == ["ana", "bo"]
    assert known.meet({"ana": b"key 1"}) == []
    with pytest.raises(ProtocolError, match="ana shows another key than before"):
        known.meet({"ana": b"key 3"})
    (tmp_path / "known.json").write_text("{")
    with pytest.raises(InvalidInput, match="cannot be read"):
        known.meet({"ana": b"key 3"})


@pytest.mark.parametrize("content", [b"", b"no key", b"-----BEGIN OPENSSH PRIVATE KEY-----"])
def test_file_that_is_no_key(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(InvalidInput, match="cannot be read as a client's key"):
        Identity(tmp_path / "key")


def test_signatures(tmp_path: Path) -> None:
    make_node_key(tmp_path / "key", tmp_path / "pub")
    identity = Identity(tmp_path / "key")
    signature = identity.sign(b"content")
    assert is_signed(identity.public, signature, b"content")
    assert not is_signed(identity.public, signature, b"other content")
    assert not is_signed(identity.public, b"", b"content")
    assert not is_signed(b"no key", signature, b"content")
    assert fingerprint(identity.public).startswith("SHA256:")


# With a privacy budget


def test_budget_is_kept_and_noise_drawn_once(images: Path, tmp_path: Path) -> None:
    """A round that is run again gets the same noisy numbers: the same release, to the bit."""
    plan = experiment(images, "fedgauss", encoder__name="none", privacy__epsilon=3.0)
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
    plan = Experiment(secure_sums=True)
    first = draw_once(store, 1, plan, lambda _: numbers, 5)
    again = draw_once(store, 1, plan, lambda _: numbers + numpy.uint64(1), 5)
    assert numpy.array_equal(first, again)
    with pytest.raises(ProtocolError, match="drawn for a sum of more clients"):
        draw_once(store, 1, plan, lambda _: numbers, 3)


def test_fewer_than_three_are_waited_for(images: Path, tmp_path: Path) -> None:
    """Rounds are not lost one after the other where no sum could be opened."""
    plan = experiment(images, network__patience=1.0)
    federation = LoopbackFederation(plan, tmp_path, count=2)
    with pytest.raises(RunCutShort, match="min_clients is 3; fewer were there"):
        federation.serve()
