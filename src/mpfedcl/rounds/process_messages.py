"""What the processes of one run tell each other, as bytes."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load

from mpfedcl.core.tensors import Tensors, pack_tensors
from mpfedcl.prototypes import Prototypes
from mpfedcl.rounds.aggregation import Peers


def gather_prototypes(own: Mapping[str, Prototypes], peers: Peers) -> dict[str, Prototypes]:
    """Return the prototypes that all processes have, by client."""
    device = next((each.vectors.device for each in own.values()), torch.device("cpu"))
    found: dict[str, Prototypes] = {}
    for part in peers.gather(pack_prototypes(None, own)):
        found |= unpack_prototypes(part)[1]
    return {name: found[name].to(device) for name in sorted(found)}


def pack_named(name: str, tensors: Tensors) -> bytes:
    """Return tensors that belong to a name."""
    return name.encode() + b"\0" + pack_tensors(tensors)


def unpack_named(part: bytes) -> tuple[str, Tensors]:
    """Return what `pack_named` was given."""
    name, _, content = part.partition(b"\0")
    return name.decode(), load(content)


def pack_prototypes(report: Any, rows: Mapping[str, Prototypes]) -> bytes:
    """Return plain values, and clients' prototypes as one array each."""
    return pack_named(json.dumps([report, list(rows)]), stack_prototypes(rows))


def unpack_prototypes(part: bytes) -> tuple[Any, dict[str, Prototypes]]:
    """Return what `pack_prototypes` was given."""
    said, tensors = unpack_named(part)
    report, names = json.loads(said)
    return report, unstack_prototypes(names, tensors)


def stack_prototypes(rows: Mapping[str, Prototypes]) -> Tensors:
    """Return the prototypes of all clients as one array of each kind, and how many each has."""
    if not rows:
        return {}
    return {
        "vectors": torch.cat([each.vectors for each in rows.values()]),
        "labels": torch.cat([each.labels for each in rows.values()]),
        "counts": torch.cat([each.counts for each in rows.values()]),
        "sizes": torch.tensor([len(each) for each in rows.values()]),
    }


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
