"""The sum is exact whoever vanishes, as long as enough are left; else nothing is opened."""

from collections.abc import Collection
from itertools import combinations

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_runs import NAMES, SESSION, Sum, add_up, draw

from mpfedcl.core.errors import InvalidInput
from mpfedcl.privacy import secure_aggregation
from mpfedcl.privacy.secure_aggregation import NothingOpened, ProtocolError, least_left
from mpfedcl.privacy.secure_aggregation.primitives import join_shares, split_secret
from mpfedcl.privacy.secure_aggregation.protocol import (
    Advert,
    Revealed,
    Roster,
    Session,
    SumClient,
    SumServer,
)


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(3, 8),
    size=st.integers(0, 40),
    share=st.sampled_from([2 / 3, 0.7, 0.8]),
    signs=st.booleans(),
    data=st.data(),
)
def test_sum_is_exact_for_any_dropouts(
    count: int, size: int, share: float, signs: bool, data: st.DataObject
) -> None:
    names = [f"client {number}" for number in range(count)]
    spare = count - least_left(count, share)
    gone = data.draw(st.lists(st.sampled_from(names), max_size=spare, unique=True))
    stages = [data.draw(st.integers(0, 3)) for _ in gone]
    lost = [
        {n for n, stage in zip(gone, stages, strict=True) if stage == each} for each in range(4)
    ]
    numbers = draw(names, size)
    found = Sum(numbers, Session("1" * 32, 7, share), signs=signs).run(*lost)
    # Who vanishes after masking has sent its numbers.
    summed = [name for name in names if name not in lost[0] | lost[1]]
    assert numpy.array_equal(found, add_up(numbers, summed))


@pytest.mark.parametrize(
    "stage", ["before_share", "before_mask", "before_confirm", "before_reveal"]
)
def test_one_dropout_too_many_opens_nothing(stage: str) -> None:
    numbers = draw(NAMES, 4)
    assert len(Sum(numbers).run(**{stage: NAMES[:2]})) == 4
    with pytest.raises(NothingOpened, match="5 are needed"):
        Sum(numbers).run(**{stage: NAMES[:3]})


def test_clients_reject_a_sum_of_too_few() -> None:
    """The threshold is the clients', not the server's: they stop by themselves."""
    running = Sum(draw(NAMES, 4))
    running.share()
    sealed = dict(list(running.server.shares_for("ana").items())[:1])
    with pytest.raises(NothingOpened, match="2 of 7 clients are left; 5 are needed"):
        running.clients["ana"].mask(running.numbers["ana"], sealed)
    running = Sum(draw(NAMES, 4))
    running.share()
    running.mask()
    with pytest.raises(NothingOpened, match="5 are needed"):
        running.clients["ana"].confirm(["ana", "bo"])


def test_secure_aggregation_needs_three_clients() -> None:
    with pytest.raises(NothingOpened, match="2 clients take part; a secure sum needs 3"):
        Sum(draw(NAMES[:2], 4))


def test_key_and_seed_of_one_client_are_never_both_revealed() -> None:
    running = Sum(draw(NAMES, 4))
    running.share()
    running.mask(gone=["ed"])
    running.confirm()
    signatures = running.server.signatures
    revealed = running.clients["ana"].reveal(signatures)
    assert set(revealed.seeds) == {*NAMES} - {"ed"}
    assert set(revealed.keys) == {"ed"}
    with pytest.raises(ProtocolError, match="the next stage is over"):
        running.clients["ana"].reveal(signatures)


def test_shares_below_the_threshold_reveal_nothing() -> None:
    """Every secret is as likely as any other: two of three shares fit each of them."""
    secret = bytes(range(32))
    shares = dict(enumerate(split_secret(secret, 5, 3)))
    for chosen in combinations(range(5), 3):
        assert join_shares({place: shares[place] for place in chosen}) == secret
    for pair in combinations(range(5), 2):
        assert join_shares({place: shares[place] for place in pair}) != secret
    # The same two shares with any third one of another making give some secret: none is ruled out.
    other = split_secret(bytes(32), 5, 3)
    found = {join_shares({0: shares[0], 1: shares[1], 2: each}) for each in other}
    assert len(found) == 5


def test_server_with_fewer_reveals_opens_nothing() -> None:
    running = Sum(draw(NAMES, 4))
    running.share()
    running.mask()
    running.confirm()
    for count in range(5):
        with pytest.raises(NothingOpened, match=f"{count} clients have revealed .* of ana"):
            running.server.open()
        name = NAMES[count]
        running.server.take_revealed(name, running.clients[name].reveal(running.server.signatures))
    assert numpy.array_equal(running.server.open(), add_up(running.numbers, NAMES))


@pytest.mark.parametrize("liars", [["ed"], ["di", "ed"]])
def test_forged_shares_are_detected_and_skipped(liars: Collection[str]) -> None:
    """With shares to spare the sum is opened all the same; without, it stays closed."""
    running = Sum(draw(NAMES, 4))
    running.share()
    running.mask()
    running.confirm()
    for name in NAMES:
        revealed = running.clients[name].reveal(running.server.signatures)
        if name in liars:
            revealed = Revealed(dict.fromkeys(revealed.seeds, bytes(32)))
        running.server.take_revealed(name, revealed)
    assert numpy.array_equal(running.server.open(), add_up(running.numbers, NAMES))


def test_too_many_forged_shares_open_nothing() -> None:
    running = Sum(draw(NAMES, 4))
    running.share()
    running.mask(gone=["ed"])
    running.confirm()
    for name in running.server.signatures:
        revealed = running.clients[name].reveal(running.server.signatures)
        if name in NAMES[:2]:
            revealed = Revealed(revealed.seeds, dict.fromkeys(revealed.keys, b"\1" * 32))
        running.server.take_revealed(name, revealed)
    with pytest.raises(NothingOpened, match="the secret of ed are inconsistent"):
        running.server.open()


def test_invalid_share_affects_only_its_sender() -> None:
    running = Sum(draw(NAMES, 4))
    for name, client in running.clients.items():
        sealed = client.share(running.server.roster)
        if name == "ed":
            sealed = {**sealed, "ana": bytes(80)}
        running.server.take_shares(name, sealed)
    running.mask(gone=["ed"])
    running.confirm()
    running.reveal()
    assert numpy.array_equal(running.server.open(), add_up(running.numbers, {*NAMES} - {"ed"}))


def test_repeated_and_early_messages_are_rejected() -> None:
    client = SumClient("ana", SESSION)
    with pytest.raises(ProtocolError, match="mask was requested; the next stage is advertise"):
        client.mask(numpy.zeros(1, dtype=numpy.uint64), {})
    client.advertise()
    with pytest.raises(ProtocolError, match="advertise was requested; the next stage"):
        client.advertise()
    running = Sum(draw(NAMES, 4))
    running.share()
    with pytest.raises(ProtocolError, match="share was requested"):
        running.clients["ana"].share(running.server.roster)
    running.mask()
    with pytest.raises(ProtocolError, match="mask was requested"):
        running.clients["ana"].mask(running.numbers["ana"], running.server.shares_for("ana"))
    with pytest.raises(ProtocolError, match="answered this stage already"):
        running.server.take_masked("ana", running.seen["ana"])


def test_shares_of_another_round_are_rejected() -> None:
    """A message of the round before is sealed under other keys, for another round."""
    numbers = draw(NAMES, 4)
    before, now = Sum(numbers), Sum(numbers, Session("0" * 32, 2, 2 / 3))
    before.share()
    with pytest.raises(ProtocolError, match="another run or round"):
        now.clients["ana"].share(before.server.roster)
    now = Sum(numbers, Session("0" * 32, 2, 2 / 3))
    now.share()
    old = before.server.shares_for("ana")
    masked = now.clients["ana"].mask(numbers["ana"], old)
    now.clients["ana"].confirm(NAMES)
    revealed = now.clients["ana"].reveal(dict.fromkeys(NAMES, b""))
    assert set(revealed.seeds) == {"ana"}
    assert masked.shape == (4,)


def test_roster_that_differs_between_clients_opens_nothing() -> None:
    """A server that shows one client other keys finds that its masks and shares fit nobody's."""
    running = Sum(draw(NAMES, 4))
    fake = SumClient("bo", SESSION).advertise()
    other = Roster(SESSION, {**running.server.roster.adverts, "bo": fake})
    sealed = {
        name: c.share(other if name == "ana" else running.server.roster)
        for name, c in running.clients.items()
    }
    for name, each in sealed.items():
        running.server.take_shares(name, each)
    running.mask()
    running.confirm()
    running.reveal()
    with pytest.raises(NothingOpened):
        running.server.open()


def test_roster_must_contain_the_clients_own_keys() -> None:
    running = Sum(draw(NAMES, 4))
    forged = {**running.server.roster.adverts, "ana": SumClient("ana", SESSION).advertise()}
    with pytest.raises(ProtocolError, match="the keys of this client"):
        running.clients["ana"].share(Roster(SESSION, forged))
    doubled = {**running.server.roster.adverts, "bo": running.server.roster.adverts["cy"]}
    with pytest.raises(ProtocolError, match="the same key"):
        Roster(SESSION, doubled)


def test_masks_are_never_used_twice() -> None:
    """The same numbers of the same clients look different in each round, and in each attempt."""
    numbers = draw(NAMES, 64)
    seen = []
    for session in (SESSION, SESSION, Session("0" * 32, 2, 2 / 3)):
        running = Sum(numbers, session)
        running.run()
        seen.append(running.seen["ana"])
    for left, right in combinations(seen, 2):
        assert int((left == right).sum()) == 0


def test_client_continues_after_a_restart() -> None:
    running = Sum(draw(NAMES, 16), signs=True)

    def restart() -> None:
        running.clients = {
            name: SumClient.from_values(name, SESSION, client.to_values(), running.keys[name])
            for name, client in running.clients.items()
        }

    restart()
    running.share()
    restart()
    running.mask(gone=["ed"])
    restart()
    running.confirm()
    restart()
    running.reveal()
    assert numpy.array_equal(running.server.open(), add_up(running.numbers, {*NAMES} - {"ed"}))
    # After the last stage, no secrets are kept.
    assert running.clients["ana"].to_values()["secrets"] == {}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([], "must be a table"),
        ({}, "channel must be hexadecimal"),
        ({"channel": "zz"}, "channel must be hexadecimal"),
        (
            dict.fromkeys(("channel", "masking", "commitment", "signature", "identity"), "00"),
            "32 byt",
        ),
        ({"channel": "0" * 10_000}, "at most 4096 bytes"),
    ],
)
def test_invalid_adverts_are_rejected(values: object, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        Advert.from_values(values)


def test_server_rejections_name_the_reason() -> None:
    running = Sum(draw(NAMES, 4))
    sealed = running.clients["ana"].share(running.server.roster)
    for name, given_shares, words in [
        ("zoe", sealed, "does not take part in this sum"),
        ("ana", {"bo": sealed["bo"]}, "every other client"),
        ("ana", {**sealed, "bo": b"short"}, "80 bytes"),
    ]:
        with pytest.raises(ProtocolError, match=words):
            running.server.take_shares(name, given_shares)
    running.server.take_shares("ana", sealed)
    with pytest.raises(ProtocolError, match="answered this stage already"):
        running.server.take_shares("ana", sealed)
    with pytest.raises(ProtocolError, match="has not shared"):
        running.server.take_masked("bo", running.numbers["bo"])
    with pytest.raises(ProtocolError, match=r"\[3\] of uint64; expected \[4\]"):
        running.server.take_masked("ana", numpy.zeros(3, dtype=numpy.uint64))
    with pytest.raises(ProtocolError, match="of float64"):
        running.server.take_masked("ana", numpy.zeros(4))  # type: ignore[arg-type]


def test_server_rejects_shares_that_must_stay_secret() -> None:
    running = Sum(draw(NAMES, 4))
    running.share()
    running.mask(gone=["ed"])
    running.confirm()
    server: SumServer = running.server
    for name, revealed, words in [
        ("ana", Revealed({"ed": bytes(32)}), "must stay secret"),
        ("ana", Revealed({}, {"bo": bytes(32)}), "must stay secret"),
        ("ana", Revealed({"bo": b"1"}), "32 bytes"),
        ("ed", Revealed(), "not signed the list"),
    ]:
        with pytest.raises(ProtocolError, match=words):
            server.take_revealed(name, revealed)


def test_clients_reject_names_that_are_not_in_the_sum() -> None:
    client = SumClient("ana", SESSION)
    with pytest.raises(ProtocolError, match="mask was requested; the next stage is advertise"):
        _ = client.num_clients
    running = Sum(draw(NAMES, 4))
    running.share()
    sealed = running.server.shares_for("ana")
    with pytest.raises(ProtocolError, match="not in the roster"):
        running.clients["ana"].mask(running.numbers["ana"], {**sealed, "zoe": bytes(80)})
    running = Sum(draw(NAMES, 4))
    running.share(gone=["ed"])
    running.mask()
    for survivors in (NAMES[1:4], NAMES):
        with pytest.raises(ProtocolError, match="have not shared their secrets"):
            # A client that has refused once does not answer that stage again.
            SumClient.from_values("ana", SESSION, running.clients["ana"].to_values()).confirm(
                survivors
            )


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        secure_aggregation, "find_spec", lambda name: None if name == "Crypto" else name
    )
    with pytest.raises(
        InvalidInput, match=r"secure_aggregation is True; it needs .*mpfedcl\[flower\]"
    ):
        secure_aggregation.check_installed()
