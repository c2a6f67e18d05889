"""The pool of the clients' prototypes, and prototypes as arrays for processes and checkpoints."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.rng import generator
from mpfedcl.core.tensors import Tensors, pack_tensors
from mpfedcl.methods import Method, SharesPrototypes, prototype_rule
from mpfedcl.prototypes import PrototypePool, Prototypes, merge_prototypes
from mpfedcl.rounds.aggregation import Peers


class PrototypePooling:
    """Makes the pool of a round once, merged if `prototypes.pool_size` is set."""

    def __init__(self, method: Method, empty: PrototypePool) -> None:
        self._method, self._empty, self._pool = method, empty, empty
        self._most: int | None = method.experiment.prototypes.pool_size
        self._rows: Mapping[str, tuple[int, Prototypes]] = {}
        if self._most and isinstance(method, SharesPrototypes) and method.compares_with_own:
            raise InvalidInput(
                f"prototypes.pool_size is {self._most}; with method {method.name} it must be left "
                "out: its clients look up their own prototypes in the pool."
            )

    def make(self, rows: Mapping[str, tuple[int, Prototypes]], number: int) -> PrototypePool:
        """Return the pool of the clients' prototypes, given with the round they came in."""
        if rows is not self._rows:
            self._rows = rows
            self._pool = self._gather(rows, number) if rows else self._empty
        return self._pool

    def _gather(self, rows: Mapping[str, tuple[int, Prototypes]], number: int) -> PrototypePool:
        rule = prototype_rule(self._method)
        full = PrototypePool.gather(
            {name: prototypes for name, (_, prototypes) in rows.items()},
            num_classes=self._method.num_classes,
            num_prototypes=rule.num_prototypes,
        )
        # An overridden `reference` is made from the single clients' prototypes.
        if self._most is None or rule.reference(full) is not full:
            return full
        key = (self._method.experiment.seed, number, "merged pool")
        return merge_prototypes(full, self._most, generator(*key))


def exchange_prototypes(
    report: Any, rows: Mapping[str, Prototypes], peers: Peers
) -> tuple[list[Any], dict[str, Prototypes]]:
    """Return the reports of all processes, as plain values, and the prototypes by client."""
    device = next((each.vectors.device for each in rows.values()), torch.device("cpu"))
    reports: list[Any] = []
    found: dict[str, Prototypes] = {}
    for part in peers.gather(pack_named(json.dumps([report, list(rows)]), stack_prototypes(rows))):
        header, tensors = unpack_named(part)
        theirs, names = json.loads(header)
        reports.append(theirs)
        found |= unstack_prototypes(names, tensors)
    return reports, {name: found[name].to(device) for name in sorted(found)}


def pack_named(name: str, tensors: Tensors) -> bytes:
    """Return a name and tensors as bytes."""
    return name.encode() + b"\0" + pack_tensors(tensors)


def unpack_named(part: bytes) -> tuple[str, Tensors]:
    """Return what `pack_named` was given."""
    name, _, content = part.partition(b"\0")
    return name.decode(), load(content)


def stack_prototypes(rows: Mapping[str, Prototypes]) -> Tensors:
    """Return the prototypes of all clients as one array of each kind, and their numbers."""
    if not rows:
        return {}
    stacked = {
        part: torch.cat([getattr(each, part) for each in rows.values()])
        for part in ("vectors", "labels", "counts")
    }
    return {**stacked, "sizes": torch.tensor([len(each) for each in rows.values()])}


def unstack_prototypes(names: Sequence[str], stacked: Tensors) -> dict[str, Prototypes]:
    """Return what `stack_prototypes` was given, of clients in the same order."""
    if not names:
        return {}
    whole = Prototypes(stacked["vectors"], stacked["labels"], stacked["counts"])
    sizes = stacked["sizes"].tolist()
    if len(sizes) != len(names) or min(sizes) < 0 or sum(sizes) != len(whole):
        raise ValueError(f"{len(whole)} prototypes cannot be those of {len(names)} clients")
    columns = (torch.split(each, sizes) for each in (whole.vectors, whole.labels, whole.counts))
    return {
        name: Prototypes(*parts)
        for name, parts in zip(names, zip(*columns, strict=True), strict=True)
    }
