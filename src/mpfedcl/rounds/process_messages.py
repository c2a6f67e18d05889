"""What the processes of one run tell each other, as bytes."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load

from mpfedcl.prototypes import Prototypes
from mpfedcl.rounds.aggregation import Peers
from mpfedcl.tensors import Tensors, pack_tensors


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
    said = json.dumps([report, list(rows)])
    if not rows:
        return pack_named(said, {})
    return pack_named(
        said,
        {
            "vectors": torch.cat([each.vectors for each in rows.values()]),
            "labels": torch.cat([each.labels for each in rows.values()]),
            "counts": torch.cat([each.counts for each in rows.values()]),
            "sizes": torch.tensor([len(each) for each in rows.values()]),
        },
    )


def unpack_prototypes(part: bytes) -> tuple[Any, dict[str, Prototypes]]:
    """Return what `pack_prototypes` was given."""
    said, tensors = unpack_named(part)
    report, names = json.loads(said)
    if not tensors:
        return report, {}
    sizes = tensors["sizes"].tolist()
    columns = (torch.split(tensors[name], sizes) for name in ("vectors", "labels", "counts"))
    return report, {
        name: Prototypes(*parts)
        for name, parts in zip(names, zip(*columns, strict=True), strict=True)
    }
