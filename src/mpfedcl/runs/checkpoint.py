"""Checkpoints: the whole state after a round, hashed; the one before is kept.

A checkpoint is two files: the tensors, and a small JSON manifest that is written last, with a hash
over both. A checkpoint without a manifest that matches does not count.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import FORMAT, read_bounded, write_atomically
from mpfedcl.core.json_files import FileContent, load_json, validate_content
from mpfedcl.core.tensors import Tensors, digest, pack_tensors, take_group
from mpfedcl.engines.client_states import sync_states
from mpfedcl.methods import Server
from mpfedcl.rounds.prototype_pool import stack_prototypes, unstack_prototypes
from mpfedcl.rounds.record import RoundRecord
from mpfedcl.rounds.state import ArrivalCounts, ArrivalState, RoundState

_KEPT = 2
_CPU = torch.device("cpu")
_MOST_TENSOR_BYTES = 2**40
"""More than any machine reads at once: rejects devices and pipes, but no large model."""


class _Manifest(FileContent):
    """The JSON of a checkpoint."""

    format: Annotated[int, Field(le=FORMAT)]
    round: Annotated[int, Field(ge=1, le=10**9)]
    received: dict[str, Annotated[int, Field(ge=0, le=10**9)]]
    """The round of each client's prototypes."""
    median_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    reputations: dict[str, Annotated[float, Field(ge=-6, le=6)]] = Field(default_factory=dict)
    virtual_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    arrivals: ArrivalCounts | None = None
    """The dispatched clients of an asynchronous method."""
    record: RoundRecord


@dataclass(frozen=True)
class Checkpoint:
    """The state of a federation and of its clients after a round, and that round's record."""

    state: RoundState
    clients: Tensors
    record: dict[str, Any]


def save_checkpoint(checkpoint: Checkpoint, folder: Path) -> None:
    """Write a checkpoint; keep the one before and delete the others."""
    manifest, tensors = _pack(checkpoint)
    folder.mkdir(exist_ok=True)
    # The checkpoint names the files of client states.
    sync_states(folder, checkpoint.state.round)
    newest = f"round-{checkpoint.state.round:06d}"
    write_atomically(folder / f"{newest}.safetensors", tensors)
    # The hash comes first, followed by the content that it covers.
    signed = f'{{"sha256": "{_sign(manifest, tensors)}", {manifest[1:]}'
    write_atomically(folder / f"{newest}.json", signed.encode())
    # A later checkpoint is left over from before a return to an earlier round. If it were kept, it
    # would count as the newest.
    stems = sorted(path.stem for path in folder.glob("round-*.json") if path.stem <= newest)
    # Manifests first: tensors without a manifest do not count, but the reverse is damage.
    for path in sorted(folder.glob("round-*"), key=lambda each: each.suffix):
        if path.stem not in stems[-_KEPT:]:
            path.unlink()


def _pack(checkpoint: Checkpoint) -> tuple[str, bytes]:
    """Return the manifest and the tensors of a checkpoint."""
    state, server = checkpoint.state, checkpoint.state.server
    groups = {
        "params": server.params,
        "extra": server.extra,
        "private": server.private,
        "clients": checkpoint.clients,
        "sent": state.arrivals.tensors() if state.arrivals else {},
        # Stacked, because each tensor of a file costs time.
        "prototypes": stack_prototypes(
            {name: rows for name, (_, rows) in state.prototypes.items()}
        ),
    }
    content = pack_tensors(
        {f"{group}/{name}": v for group, part in groups.items() for name, v in part.items()}
    )
    manifest = {
        "format": FORMAT,
        "round": state.round,
        "received": {name: received for name, (received, _) in state.prototypes.items()},
        "median_norm": state.median_norm,
        "reputations": dict(state.reputations),
        "virtual_seconds": state.virtual_seconds,
        "arrivals": state.arrivals.counts.to_json() if state.arrivals else None,
        "record": checkpoint.record,
    }
    return json.dumps(manifest), content


def checkpoint_to_bytes(checkpoint: Checkpoint) -> bytes:
    """Return a checkpoint as bytes for another process."""
    manifest, tensors = _pack(checkpoint)
    return manifest.encode() + b"\n" + tensors


def checkpoint_from_bytes(content: bytes, device: torch.device = _CPU) -> Checkpoint:
    """Return the checkpoint that `checkpoint_to_bytes` packed."""
    manifest, _, tensors = content.partition(b"\n")
    return _unpack(tensors, json.loads(manifest), device)


def load_checkpoint(
    folder: Path, device: torch.device = _CPU
) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest valid checkpoint, and the problems of newer ones."""
    problems: list[str] = []
    for path in sorted(folder.glob("round-*.json"), reverse=True):
        try:
            manifest = load_json(read_bounded(path))
            content = read_bounded(path.with_suffix(".safetensors"), _MOST_TENSOR_BYTES)
            signed = manifest.pop("sha256", None) if isinstance(manifest, dict) else None
            if signed != _sign(json.dumps(manifest), content):
                raise ValueError("its hash does not match")
            return _unpack(content, manifest, device), problems
        except (OSError, ValueError, KeyError, InvalidInput, SafetensorError) as error:
            problems.append(f"{path.with_suffix('').name} is damaged ({error})")
    return None, problems


def _sign(manifest: str, tensors: bytes) -> str:
    return digest(manifest.encode(), tensors)


def _unpack(content: bytes, manifest: dict[str, Any], device: torch.device) -> Checkpoint:
    """Return a checkpoint with the server's state on a device; the engine places the clients'."""
    # The hash detects damage, not tampering: a run may come from a stranger.
    found = validate_content(manifest, _Manifest, "its manifest", strict=True)
    tensors = load(content)
    clients = take_group(tensors, "clients/")
    tensors = {n: v.to(device) for n, v in tensors.items() if not n.startswith("clients/")}
    server = Server(*(take_group(tensors, f"{part}/") for part in ("params", "extra", "private")))
    rows = unstack_prototypes(list(found.received), take_group(tensors, "prototypes/"))
    arrivals = None
    if found.arrivals is not None:
        arrivals = ArrivalState.read(found.arrivals, take_group(tensors, "sent/"))
    state = RoundState(
        found.round,
        server,
        {name: (found.received[name], each) for name, each in rows.items()},
        median_norm=found.median_norm,
        reputations=found.reputations,
        virtual_seconds=found.virtual_seconds,
        arrivals=arrivals,
    )
    return Checkpoint(state, clients, manifest["record"])
