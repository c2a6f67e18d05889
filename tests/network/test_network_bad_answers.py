"""A bad answer costs only its client the round, and changes nothing for the others."""

import re
from itertools import count
from pathlib import Path

import pytest
from bad_answers import BAD_READINGS, BAD_UPDATES, values
from federations import QUERY, LoopbackFederation, float64_experiment, is_training, round_of
from flwr.app import Error
from flwr.app import Message as FlowerMessage
from loopback import Tamper

from mpfedcl.core.errors import RunCutShort
from opened_records import from_records
from small_experiments import Json, assert_same_results, read_records, read_summary

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("quick_network")]

HONEST = ("client-0", "client-1")
SECOND = {**BAD_READINGS, "nothing, ever": (lambda *_: None, ""), "an old answer": (None, "")}
CLOSING = {**BAD_READINGS, "an error": BAD_UPDATES["an error"], "NaN": (values(late={}), "table")}
FIRST = list(BAD_UPDATES)
BAD_CLIENTS = {
    name: f"client-{number}" for name, number in zip(FIRST, count(len(HONEST)), strict=False)
}
"""The bad answer of each client in the first round; some send another one later."""


def client_of(number: int) -> str:
    return list(BAD_CLIENTS.values())[number]


def be_bad() -> Tamper:
    """Each client misbehaves in a different way: in round 1, in round 2 and at the end."""
    in_first = {client: BAD_UPDATES[name][0] for name, client in BAD_CLIENTS.items()}
    in_second = {client_of(n): each[0] for n, each in enumerate(SECOND.values())}
    at_end = {client_of(n): each[0] for n, each in enumerate(CLOSING.values())}
    old: dict[str, FlowerMessage] = {}

    def tamper(
        client: str, request: FlowerMessage, reply: FlowerMessage
    ) -> FlowerMessage | list[FlowerMessage] | None:
        kind = str(request.metadata.message_type)
        if client in HONEST or kind == "query":
            return [reply, reply] if client == HONEST[1] else reply
        if kind == "evaluate":
            bad = at_end.get(client)
        else:
            bad = in_first[client] if round_of(request) == 1 else in_second.get(client)
            if client in in_second and bad is None:
                return old[client]
            old.setdefault(client, FlowerMessage(reply.content, reply_to=request))
        return reply if bad is None else bad(request, reply)

    return tamper


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bad")


@pytest.fixture
def bad_run(quick_network: None, many_images: Path, folder: Path) -> Path:
    """A run of two rounds with two honest clients among many others, computed once."""
    if not (folder / "run").exists():
        experiment = float64_experiment(
            many_images,
            rounds=2,
            clients=len(HONEST) + len(BAD_CLIENTS),
            partition__kind="iid",
            network__round_timeout=20.0,
        )
        LoopbackFederation(experiment, folder, be_bad()).serve()
    return folder / "run"


@pytest.mark.parametrize("name", BAD_UPDATES)
def test_bad_update_is_rejected_with_reason(bad_run: Path, name: str) -> None:
    _, reason = BAD_UPDATES[name]
    reported = read_records(bad_run)[0]["clients"]["rejected"][BAD_CLIENTS[name]]
    assert_reads(reported, reason)


@pytest.mark.parametrize("name", BAD_READINGS)
def test_bad_evaluation_of_previous_round_is_rejected(bad_run: Path, name: str) -> None:
    client = client_of(list(SECOND).index(name))
    assert_reads(read_records(bad_run)[1]["clients"]["rejected"][client], BAD_READINGS[name][1])
    assert client not in read_records(bad_run)[0]["accuracy_per_client"]


@pytest.mark.parametrize("name", CLOSING)
def test_bad_closing_evaluation_is_ignored(bad_run: Path, name: str) -> None:
    client = client_of(list(CLOSING).index(name))
    last = read_records(bad_run)[1]
    assert_reads(last["remarks"]["closing"]["rejected"][client], CLOSING[name][1])
    assert client not in last["accuracy_per_client"]
    assert client not in read_summary(bad_run)["accuracy_per_client"]


def assert_reads(reported: str, pattern: str) -> None:
    assert re.search(pattern, reported), reported
    assert reported.isprintable()
    assert len(reported) <= 300


@pytest.mark.parametrize("name", ["nothing, ever", "an old answer"])
def test_silent_client_is_missing(bad_run: Path, name: str) -> None:
    client = client_of(list(SECOND).index(name))
    record = read_records(bad_run)[1]
    assert client in record["clients"]["missing"]
    assert record["remarks"]["missing"][client] == "no answer within 20 s"


def test_others_are_unaffected_by_a_bad_client(
    many_images: Path, tmp_path: Path, bad_run: Path
) -> None:
    """In the first round only honest clients count, and one of them answers twice."""
    number = len(HONEST) + len(BAD_CLIENTS)
    changes: Json = {"rounds": 1, "clients": number, "partition__kind": "iid"}
    experiment = float64_experiment(many_images, **changes, network__patience=0.1)
    alone = LoopbackFederation(experiment, tmp_path, count=len(HONEST))
    wanted = read_records(alone.serve().path)[0]
    found = read_records(bad_run)[0]
    assert found["clients"]["answered"] == wanted["clients"]["answered"] == list(HONEST)
    assert found["loss"] == wanted["loss"]
    assert found["sent"] == wanted["sent"]


ERRORS = {3: "its message was lost", 4: "its answer was lost", 5: "it went away"}


@pytest.mark.parametrize("bad", ["NaN", "1e15 samples", "terabytes claimed", "gone"])
def test_secure_aggregation_equals_plain_aggregation(
    images: Path, tmp_path: Path, bad: str
) -> None:
    def spoil(
        client: str, request: FlowerMessage, reply: FlowerMessage
    ) -> FlowerMessage | list[FlowerMessage] | None:
        if client != "client-2" or not is_training(request):
            return reply
        if bad == "gone":
            return FlowerMessage(Error(5, "gone"), reply_to=request)
        return BAD_UPDATES[bad][0](request, reply)

    paths = []
    for name, tamper in (("spoilt", spoil), ("silent", be_gone)):
        experiment = float64_experiment(images, rounds=2)
        paths.append(LoopbackFederation(experiment, tmp_path / name, tamper).serve().path)
    assert_same_results(*paths)
    for ours, theirs in zip(*map(read_records, paths), strict=True):
        assert ours["clients"]["answered"] == theirs["clients"]["answered"]
        assert {**ours["clients"]["rejected"], **dict.fromkeys(ours["clients"]["missing"])}.keys()


def be_gone(client: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
    if client == "client-2" and is_training(request):
        return FlowerMessage(Error(4, ""), reply_to=request)
    return reply


@pytest.mark.parametrize("code", ERRORS)
def test_flower_errors_of_lost_messages_count_as_missing(
    images: Path, tmp_path: Path, code: int
) -> None:
    def lose(client: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if client == "client-0" and is_training(request):
            return FlowerMessage(Error(code, "whatever"), reply_to=request)
        return reply

    run = LoopbackFederation(float64_experiment(images, "fedavg", rounds=1), tmp_path, lose).serve()
    (record,) = run.history
    assert record["clients"]["missing"] == ["client-0"]
    assert record["clients"]["rejected"] == {}
    assert record["remarks"]["missing"] == {"client-0": ERRORS[code]}


def test_run_without_accepted_updates_is_cut_short(images: Path, tmp_path: Path) -> None:
    def spoil(client: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if is_training(request):
            return FlowerMessage(Error(400, "it has no wish to"), reply_to=request)
        return reply

    federation = LoopbackFederation(float64_experiment(images, "fedavg", rounds=9), tmp_path, spoil)
    with pytest.raises(
        RunCutShort,
        match=r"^no client was accepted in 3 rounds\. client-0: it has no wish to\. .*Resume it",
    ):
        federation.serve()
    assert all(record["unchanged"] for record in read_records(federation.path))
    # Resuming ends the same way; once clients are repaired, nothing has been lost.
    federation.grid._tamper = lambda _client, _request, reply: reply
    assert federation.resume().summary is not None


def test_diverged_training_is_reported(images: Path, tmp_path: Path) -> None:
    experiment = float64_experiment(
        images, "fedavg", rounds=3, train__lr=1e200, train__batch_size=2
    )
    federation = LoopbackFederation(experiment, tmp_path)
    federation.serve()
    for record in read_records(federation.path):
        assert set(record["clients"]["rejected"].values()) == {
            "its loss is nan; it must be finite."
        }


def test_bad_answers_do_not_count_as_enough(images: Path, tmp_path: Path) -> None:
    """Two of four clients send garbage at once; the round waits for a valid answer."""

    def spoil(
        client: str, request: FlowerMessage, reply: FlowerMessage
    ) -> FlowerMessage | list[FlowerMessage] | None:
        is_bad = client in ("client-0", "client-1") and is_training(request)
        return BAD_UPDATES["no prototypes"][0](request, reply) if is_bad else reply

    experiment = float64_experiment(images, clients=4, rounds=1, network__enough=0.5)
    (record,) = LoopbackFederation(experiment, tmp_path, spoil).serve().history
    assert sorted(record["clients"]["rejected"]) == ["client-0", "client-1"]
    assert record["clients"]["answered"] == ["client-2", "client-3"]


def test_request_contains_nothing_of_other_clients(images: Path, tmp_path: Path) -> None:
    federation = LoopbackFederation(float64_experiment(images, "fedavg", rounds=1), tmp_path)
    federation.serve()
    for _, request in federation.grid.requests:
        assert "client-" not in str(from_records(request.content).values)


@pytest.mark.parametrize("odd", ['"', "zebra", "٣"])
def test_client_with_malformed_class_is_refused(images: Path, tmp_path: Path, odd: str) -> None:
    def spoil(
        client: str, request: FlowerMessage, reply: FlowerMessage
    ) -> FlowerMessage | list[FlowerMessage] | None:
        if client == "client-2" and str(request.metadata.message_type) == QUERY:
            changes = {"classes": ["0", "1", odd], "train": [1, 1, 1]}
            return values(**changes)(request, reply)
        return reply

    experiment = float64_experiment(images, "fedavg", rounds=1, network__patience=0.3)
    (record,) = LoopbackFederation(experiment, tmp_path, spoil).serve().history
    assert record["clients"]["answered"] == ["client-0", "client-1"]
    assert "it has the class" in record["remarks"]["refused"]["client-2"]
