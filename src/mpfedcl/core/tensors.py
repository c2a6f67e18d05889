"""Tensors by name, in memory and on disk: safetensors, which runs no code when it is read."""

import hashlib
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from mpfedcl.core.errors import InvalidInput

Tensors = dict[str, Tensor]
"""Parameters, gradients or states by name."""


def pack_tensors(tensors: Tensors, note: tuple[str, str] | None = None) -> bytes:
    """Return tensors in the safetensors format, with at most one note in the metadata.

    Only one, because the library writes several in varying order, and equal runs must give equal
    bytes.
    """
    packed: Tensors = {}
    places: set[int] = set()
    for name, value in sorted(tensors.items()):
        packed[name] = value.detach().cpu().contiguous()
        # Entries may share a tensor, but the format requires separate memory.
        place = packed[name].untyped_storage().data_ptr()
        if place in places:
            packed[name] = packed[name].clone()
        places.add(place)
    return save(packed, metadata=dict([note]) if note else None)


def load_tensors(path: Path) -> Tensors:
    """Read a safetensors file."""
    if path.exists() and not path.is_file():
        # A device may never end, and a pipe may never be written to.
        raise InvalidInput(f"{path} cannot be read as safetensors: it is not a regular file.")
    try:
        return load(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise InvalidInput(f"{path} cannot be read as safetensors: {error}.") from None


def take_group(tensors: Tensors, prefix: str) -> Tensors:
    """Return the tensors whose names start with a prefix, without the prefix in their names."""
    return {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}


def digest(*content: bytes) -> str:
    """Return the SHA-256 of the concatenated content, in hexadecimal."""
    found = hashlib.sha256()
    for part in content:
        found.update(part)
    return found.hexdigest()
