"""Secure aggregation: the server learns the sum of the clients' values, but no single value.

The protocol is that of Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving
Machine Learning" (2017), for an honest-but-curious server. It has four stages, each a message to
the clients and a reply:

1. advertise: each client generates two key pairs and a seed, and sends the public keys;
2. share: it receives the others' keys, splits its secrets and encrypts a share for each client;
3. mask: it adds its values, the stream of its own seed and, with opposite signs for the two
   clients, a stream for each pair of clients; all modulo 2^64;
4. reveal: for clients whose masked values arrived it reveals a share of the seed, for the others a
   share of the key. Never both of one client: that would open its values.

`client.py` and `server.py` are the two parties, independent of the transport.
"""

from importlib.util import find_spec

from mpfedcl.core.errors import InvalidInput

LEAST_CLIENTS = 3
"""With two clients, each could compute the other's values from the sum."""


class ProtocolError(Exception):
    """Raised for a message that a party must not answer; the text gives the reason."""


class NothingOpened(Exception):  # noqa: N818  -- it names what happened
    """Raised if too few clients are left to open the sum; the text has their number."""


def least_left(num_clients: int, share: float) -> int:
    """Return the number of clients required to open a sum: more than a share, at least 2.

    Example:
        >>> [least_left(count, 0.5) for count in (3, 4, 5, 10)]
        [2, 3, 3, 6]
    """
    return max(2, int(share * num_clients) + 1)


def describe_lost_round(round_number: int, error: NothingOpened) -> str:
    """Return the warning about a round whose sum was not opened."""
    return f"Round {round_number}: the secure sum was not opened because {error}."


def check_installed() -> None:
    """Check that the cryptographic libraries are installed."""
    if find_spec("cryptography") is None or find_spec("Crypto") is None:
        raise InvalidInput(
            "secure_aggregation is True; it needs cryptography and pycryptodome, which are not "
            'installed: pip install "mpfedcl[flower]".'
        )
