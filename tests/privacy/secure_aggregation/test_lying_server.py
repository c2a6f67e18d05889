"""A server that lies about who is left: with keys it reads nothing, below the proven bound."""

from collections.abc import Collection, Mapping

import numpy
import pytest
from protocol_runs import KEYS, NAMES, SESSION, Sum, draw

from lying_sums import LyingServer
from mpfedcl.privacy.secure_aggregation import ProtocolError, least_left
from mpfedcl.privacy.secure_aggregation.primitives import sign
from mpfedcl.privacy.secure_aggregation.protocol import Session, SumClient


def names(count: int) -> list[str]:
    return [f"client {number:02}" for number in range(count)]


SIZES = [
    *range(3, 11),
    *(pytest.param(count, marks=pytest.mark.thorough) for count in range(11, 31)),
]


@pytest.mark.parametrize("count", SIZES)
def test_no_update_is_read_up_to_the_bound_on_colluders(count: int) -> None:
    """With t of n clients, 2t - n colluders are the fewest that can read another client."""
    bound = 2 * least_left(count, 2 / 3) - count
    assert bound > count / 3
    # With all others on its side, a server needs no attack.
    for colluders in {0, min(bound - 1, count - 2)}:
        server = LyingServer(names(count), colluders)
        assert server.read_victim() is None
        assert server.shares_of_both_kinds() == []
        server = LyingServer(names(count), colluders, hides=True)
        assert server.read_victim_by_hiding() is None
        assert server.shares_of_both_kinds() == []


@pytest.mark.parametrize("count", [4, 5, 7, 9, 10, 12])
def test_attack_reads_the_update_beyond_the_bound(count: int) -> None:
    """The control: the attacks work, and one more colluder than above makes them succeed."""
    bound = 2 * least_left(count, 2 / 3) - count
    server = LyingServer(names(count), bound)
    assert server.read_victim() == server.numbers[server.victim].tolist()
    server = LyingServer(names(count), bound, hides=True)
    assert server.read_victim_by_hiding() == server.numbers[server.victim].tolist()


@pytest.mark.parametrize(("count", "colluders"), [(7, 2), (8, 3), (9, 4), (10, 2), (12, 4)])
def test_threshold_without_signatures_is_not_enough(count: int, colluders: int) -> None:
    """The control: clients without keys check no signatures; fewer colluders read the update."""
    assert colluders < 2 * least_left(count, 2 / 3) - count
    server = LyingServer(names(count), colluders, hides=True, signs=False)
    assert server.read_victim_by_hiding() == server.numbers[server.victim].tolist()


def test_sum_of_fewer_than_the_threshold_needs_clients_that_do_not_sign() -> None:
    """A high threshold is not enough: lists that differ by client open a sum of 8 of 12.

    Clients without keys check no signatures; clients with keys reveal nothing to such a server.
    """
    everyone = names(12)
    gone = everyone[:4]

    def lists(name: str) -> list[str]:
        first = everyone.index(name)
        missing = [gone[(first + step) % 4] for step in range(4)]
        missing = [each for each in missing if each != name][: 12 - least_left(12, 2 / 3)]
        return [each for each in everyone if each not in missing]

    unsigned = LyingServer(everyone, 0, signs=False)
    opened = unsigned.open_labeled(lists, everyone[4:])
    assert opened is not None
    assert numpy.array_equal(opened, sum(unsigned.numbers[n] for n in everyone[4:]))
    assert LyingServer(everyone, 0).open_labeled(lists, everyone[4:]) is None


# Signatures


@pytest.fixture
def running() -> Sum:
    found = Sum(draw(NAMES, 4), signs=True)
    found.share()
    found.mask()
    return found


def confirm(running: Sum, survivors: Collection[str] = NAMES) -> dict[str, bytes]:
    return {name: client.confirm(survivors) for name, client in running.clients.items()}


def reveals(running: Sum, signatures: Mapping[str, bytes]) -> bool:
    """Tell whether the first client reveals its shares for these signatures."""
    values = running.clients["ana"].to_values()
    client = SumClient.from_values("ana", SESSION, values, running.keys["ana"])
    try:
        client.reveal(signatures)
    except ProtocolError:
        return False
    return True


def test_enough_signatures_of_the_same_list_are_needed(running: Sum) -> None:
    signatures = confirm(running)
    assert reveals(running, signatures)
    # Its own signature counts, four others make five of seven.
    assert reveals(running, {n: signatures[n] for n in NAMES[1:5]})
    assert not reveals(running, {n: signatures[n] for n in NAMES[1:4]})
    assert not reveals(running, {})
    with pytest.raises(ProtocolError, match=r"1 clients have signed the list .*; 5 are needed"):
        running.clients["ana"].reveal({})


def test_forged_signatures_do_not_count(running: Sum) -> None:
    signatures = confirm(running)
    few = {n: signatures[n] for n in NAMES[1:4]}
    content = running.server.roster.listed(NAMES)
    for forged in (b"", b"no signature", signatures["bo"], sign(KEYS[31], content)[0]):
        assert not reveals(running, {**few, "ed": forged, "flo": forged})
    # A name that is not in the list does not count either.
    assert not reveals(running, {**few, "zoe": sign(KEYS[31], content)[0]})
    with pytest.raises(ProtocolError, match="it has not signed the list of survivors"):
        running.server.take_signature("ana", signatures["bo"])


def test_signatures_of_another_list_round_or_roster_do_not_count(running: Sum) -> None:
    confirm(running)
    keys = {name: key for name, key in running.keys.items() if key is not None}
    numbers = draw(NAMES, 4)
    others = [
        Sum(numbers, signs=True),
        Sum(numbers, Session("0" * 32, 2, 2 / 3), signs=True),
        Sum(numbers, Session("1" * 32, 1, 2 / 3), signs=True),
    ]
    # The same keys of the federation, in another roster, round or run.
    for other in others:
        assert other.keys == running.keys
        content = other.server.roster.listed(NAMES)
        assert not reveals(running, {name: sign(key, content)[0] for name, key in keys.items()})
    content = running.server.roster.listed(NAMES[:6])
    assert not reveals(running, {name: sign(key, content)[0] for name, key in keys.items()})
    content = running.server.roster.listed(NAMES)
    assert reveals(running, {name: sign(key, content)[0] for name, key in keys.items()})


def test_client_signs_one_list_only(running: Sum) -> None:
    client = running.clients["ana"]
    client.confirm(NAMES)
    restarted = SumClient.from_values("ana", SESSION, client.to_values(), running.keys["ana"])
    for each in (client, restarted):
        with pytest.raises(ProtocolError, match="confirm was requested; the next stage is reveal"):
            each.confirm(NAMES[:6])


def test_shares_are_not_revealed_before_a_list_is_signed(running: Sum) -> None:
    with pytest.raises(ProtocolError, match="reveal was requested; the next stage is confirm"):
        running.clients["ana"].reveal({})


def test_unsigned_keys_are_rejected_by_clients_with_keys() -> None:
    running = Sum(draw(NAMES, 4), signs=True)
    adverts = {**running.server.roster.adverts, "bo": SumClient("bo", SESSION).advertise()}
    forged = type(running.server.roster)(SESSION, adverts)
    with pytest.raises(ProtocolError, match="the keys of bo are not signed by that client"):
        running.clients["ana"].share(forged)
    assert numpy.array_equal(Sum(running.numbers, signs=True).run(), sum(running.numbers.values()))
