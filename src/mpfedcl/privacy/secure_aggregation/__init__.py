"""Sums whose terms nobody sees: pairwise masks, secret shares for those who vanish.

The protocol is that of Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving
Machine Learning" (2017), for a server that is curious but follows it. In four stages, each a
message to the clients and an answer:

1. advertise: each client makes two key pairs and a seed for this round, and shows the public keys;
2. share: it is told the others' keys, splits its secrets and seals a share for each of the others;
3. mask: it adds its numbers, the stream of its own seed and, with opposite signs for the two of
   them, a stream for each pair of clients; all modulo 2^64;
4. reveal: of clients whose masked numbers came it reveals a share of the seed, of the others one of
   the key. Never both of one client: that would open what it sent.

`client.py` and `server.py` are the two parties; who carries their messages is not their business.
"""

from importlib.util import find_spec

from mpfedcl.core.errors import InvalidInput

LEAST_CLIENTS = 3
"""Of two, each knows the other's numbers from the sum."""


class ProtocolError(Exception):
    """What a party says that was told something it must not answer; the text says why."""


class NothingOpened(Exception):  # noqa: N818  -- it names what happened
    """Too few clients are left, so that the sum stays closed; the text says how many."""


def least_left(num_clients: int, share: float) -> int:
    """Return how many clients must be left to open a sum: more than a share of them, at least 2.

    Example:
        >>> [least_left(count, 0.5) for count in (3, 4, 5, 10)]
        [2, 3, 3, 6]
    """
    return max(2, int(share * num_clients) + 1)


def describe_lost_round(round_number: int, error: NothingOpened) -> str:
    """Say that the sum of a round stays closed."""
    return f"Round {round_number}: its secure sum was not opened, because {error}."


def check_installed() -> None:
    """Refuse to begin where the libraries that do the cryptography are missing."""
    if find_spec("cryptography") is None or find_spec("Crypto") is None:
        raise InvalidInput(
            "secure_aggregation is True; it needs cryptography and pycryptodome, which are not installed: "
            'pip install "mpfedcl[flower]".'
        )
