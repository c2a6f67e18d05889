"""Clients whose samples are looked at together: as many as are cheap, and fit into memory."""

from collections.abc import Iterable, Iterator

from mpfedcl.data.client_data import ClientData

MOST_NUMBERS = 2**24
"""Of inputs in a group: what is made of them takes several times their memory."""


def group_clients(clients: Iterable[ClientData], most: int) -> Iterator[list[ClientData]]:
    """Yield clients in groups of at most so many, and of no more inputs than are allowed.

    A client that has more than that stands alone.
    """
    group: list[ClientData] = []
    numbers = 0
    for client in clients:
        numbers += client.inputs.numel()
        if group and (len(group) == most or numbers > MOST_NUMBERS):
            yield group
            group, numbers = [], client.inputs.numel()
        group.append(client)
    if group:
        yield group
