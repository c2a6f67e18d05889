"""Checkpoints: the whole state after a round, hashed, with the one before it kept.

A checkpoint is two files: the tensors, and a small JSON manifest that is written last, with a hash
over both. Without a manifest, or with one that does not match, a checkpoint does not count.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import FORMAT, read_bounded, write_atomically
from mpfedcl.core.json_files import FileContent, load_json, validate_content
from mpfedcl.core.tensors import Tensors, digest, pack_tensors
from mpfedcl.methods import Server
from mpfedcl.prototypes import Prototypes
from mpfedcl.rounds.prototype_pool import stack_prototypes, unstack_prototypes
from mpfedcl.rounds.record import RoundRecord
from mpfedcl.rounds.state import ArrivalCounts, ArrivalState, RoundState

_KEPT = 2
_MOST_TENSOR_BYTES = 2**40
"""More than any machine reads at once: devices and pipes are refused, large models are not."""


class _Manifest(FileContent):
    """The JSON of a checkpoint."""

    format: Annotated[int, Field(le=FORMAT)]
    round: Annotated[int, Field(ge=1, le=10**9)]
    received: dict[str, Annotated[int, Field(ge=0, le=10**9)]]
    """In which round each client's prototypes came."""
    median_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    reputations: dict[str, Annotated[float, Field(ge=-6, le=6)]] = Field(default_factory=dict)
    virtual_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    arrivals: ArrivalCounts | None = None
    """Who was under way, with asynchronous methods."""
    record: RoundRecord


@dataclass(frozen=True)
class Checkpoint:
    """The state of a federation and of its clients after a round, and that round's record."""

    state: RoundState
    clients: Tensors
    record: dict[str, Any]


@dataclass(frozen=True)
class PackedCheckpoint:
    """A checkpoint as bytes, which the next round does not change any more."""

    round: int
    manifest: str
    tensors: bytes

    def save(self, folder: Path) -> None:
        """Write it; keep the one before it and drop the others."""
        folder.mkdir(exist_ok=True)
        stem = f"round-{self.round:06d}"
        write_atomically(folder / f"{stem}.safetensors", self.tensors)
        # Before all that it signs.
        signature = json.dumps({"sha256": digest(self.manifest.encode(), self.tensors)})
        signed = f"{signature[:-1]}, {self.manifest[1:]}"
        write_atomically(folder / f"{stem}.json", signed.encode())
        _drop_others(folder, stem)


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint; keep the one before it and drop the others."""
    pack_checkpoint(checkpoint).save(folder)


def checkpoint_to_bytes(checkpoint: Checkpoint) -> bytes:
    """Return a checkpoint as one piece, for another process."""
    packed = pack_checkpoint(checkpoint)
    return packed.manifest.encode() + b"\n" + packed.tensors


def checkpoint_from_bytes(content: bytes) -> Checkpoint:
    """Return what `checkpoint_to_bytes` was given."""
    manifest, _, tensors = content.partition(b"\n")
    return _unpack(load(tensors), json.loads(manifest))


def pack_checkpoint(checkpoint: Checkpoint) -> PackedCheckpoint:
    """Return a checkpoint as it is now."""
    state = checkpoint.state
    sent = state.arrivals.tensors() if state.arrivals else {}
    rows = {name: prototypes for name, (_, prototypes) in state.prototypes.items()}
    content = pack_tensors(
        {
            **{f"params/{name}": value for name, value in state.server.params.items()},
            **{f"extra/{name}": value for name, value in state.server.extra.items()},
            **{f"private/{name}": value for name, value in state.server.private.items()},
            **{f"clients/{name}": value for name, value in checkpoint.clients.items()},
            **{f"sent/{name}": value for name, value in sent.items()},
            # As few tensors for a thousand clients as for one: each costs its time.
            **{f"prototypes/{name}": value for name, value in stack_prototypes(rows).items()},
        }
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
    return PackedCheckpoint(state.round, json.dumps(manifest), content)


def _drop_others(folder: Path, newest: str) -> None:
    """Remove all but the newest and the one before: older ones, orphans, and damaged later ones."""
    # A later one is left from before a return to an earlier round: were it kept, it would outlive
    # the rounds that are being run anew and count as the newest.
    stems = sorted(path.stem for path in folder.glob("round-*.json") if path.stem <= newest)
    kept = stems[-_KEPT:]
    # Manifests go first: tensors without one do not count, the reverse would be damage.
    for path in sorted(folder.glob("round-*"), key=lambda each: each.suffix):
        if path.stem not in kept:
            path.unlink()


def _sign(manifest: dict[str, Any], content: bytes) -> str:
    return digest(json.dumps(manifest).encode(), content)


def load_checkpoint(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest sound checkpoint, and what is wrong with newer ones."""
    problems: list[str] = []
    for path in sorted(folder.glob("round-*.json"), reverse=True):
        try:
            return _load(path), problems
        except (OSError, ValueError, KeyError, InvalidInput, SafetensorError) as error:
            problems.append(f"{path.with_suffix('').name} is damaged ({error})")
    return None, problems


def _load(path: Path) -> Checkpoint:
    manifest = load_json(read_bounded(path))
    content = read_bounded(path.with_suffix(".safetensors"), _MOST_TENSOR_BYTES)
    signed = manifest.pop("sha256", None) if isinstance(manifest, dict) else None
    if signed != _sign(manifest, content):
        raise ValueError("its hash does not match")
    # A hash shows damage, not who wrote it: a run may come from a stranger.
    validate_content(manifest, _Manifest, "its manifest", strict=True)
    return _unpack(load(content), manifest)


def _unpack(tensors: Tensors, manifest: dict[str, Any]) -> Checkpoint:
    def below(prefix: str) -> Tensors:
        start = prefix + "/"
        return {n.removeprefix(start): v for n, v in tensors.items() if n.startswith(start)}

    received: dict[str, int] = manifest["received"]
    if any(name.startswith("vectors/") for name in tensors):
        # A checkpoint of before there were stacks: three tensors a client.
        columns = ("vectors", "labels", "counts")
        rows = {n: Prototypes(*(tensors[f"{each}/{n}"] for each in columns)) for n in received}
    else:
        rows = unstack_prototypes(list(received), below("prototypes"))
    server = Server(below("params"), below("extra"), below("private"))
    arrivals = None
    if (counts := manifest.get("arrivals")) is not None:
        arrivals = ArrivalState.read(ArrivalCounts(**counts), below("sent"))
    state = RoundState(
        manifest["round"],
        server,
        {name: (received[name], each) for name, each in rows.items()},
        median_norm=manifest.get("median_norm"),
        reputations=manifest.get("reputations", {}),
        virtual_seconds=manifest.get("virtual_seconds", 0.0),
        arrivals=arrivals,
    )
    return Checkpoint(state, below("clients"), manifest["record"])
