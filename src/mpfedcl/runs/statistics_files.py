"""The sums that a federation of one exchange keeps: statistics.safetensors, and a file per client.

What they hold is told in `mpfedcl.gaussian.statistics`. The encoder's fingerprint stands in their
metadata: sums of other features must not be added.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import write_atomically
from mpfedcl.core.tensors import Tensors, load_tensors, pack_tensors

POOLED = "statistics.safetensors"
FOLDER = "statistics"


def pack_statistics(statistics: Tensors, encoder: str | None) -> bytes:
    """Return statistics as their file has them."""
    return pack_tensors(statistics, note=("encoder", json.dumps(encoder)))


def client_file(name: str) -> str:
    """Return where a client's own statistics lie in the run directory."""
    return f"{FOLDER}/{name}.safetensors"


def remove_statistics(path: Path) -> None:
    """Remove what a run has kept before."""
    (path / POOLED).unlink(missing_ok=True)
    if (path / FOLDER).exists():
        shutil.rmtree(path / FOLDER)


def write_client_statistics(path: Path, name: str, own: Tensors, encoder: str | None) -> None:
    """Write one client's own statistics."""
    (path / FOLDER).mkdir(exist_ok=True)
    write_atomically(path / client_file(name), pack_statistics(own, encoder))


def write_pooled_statistics(path: Path, pooled: Tensors, encoder: str | None) -> None:
    """Write the statistics of all clients together."""
    write_atomically(path / POOLED, pack_statistics(pooled, encoder))


def read_statistics(
    file: Path, *, names: Sequence[str], num_classes: int, dimension: int, encoder: str | None
) -> Tensors:
    """Read statistics; what is damaged or belongs to another federation is refused."""
    found = load_tensors(file)
    try:
        with safe_open(file, "pt") as opened:
            theirs = json.loads((opened.metadata() or {}).get("encoder", "null"))
    except (ValueError, RecursionError, SafetensorError) as error:
        raise InvalidInput(f"{file} cannot be read as safetensors: {error}.") from None
    shapes = {
        "counts": [num_classes],
        "sums": [num_classes, dimension],
        "moment": [dimension, dimension],
        "within": [dimension, dimension],
        "scatter": [],
        "groups": [num_classes],
        "squares": [num_classes],
        "counts_squared": [num_classes],
    }
    for name in names:
        if name not in found:
            raise InvalidInput(f"{file} has no {name}; it must be the file that the run wrote.")
        if list(found[name].shape) != shapes[name]:
            raise InvalidInput(
                f"{file} has {name} of shape {list(found[name].shape)}; in this federation it must "
                f"be {shapes[name]}."
            )
        if found[name].dtype != torch.float64 or not bool(found[name].isfinite().all()):
            raise InvalidInput(f"{file} has {name} that are not finite numbers of float64.")
    if theirs != encoder:
        raise InvalidInput(
            f"{file} has sums behind another encoder ({str(theirs)[:12]}); in this federation it "
            f"must be {str(encoder)[:12]}."
        )
    return {name: found[name] for name in names}
