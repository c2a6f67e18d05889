"""Who has joined a finished run: its pool is the only truth, and a log tells how it came about.

A client is in the pool or it is not, by one atomic write of pool.safetensors. What else is kept of
it lies in `joined/` under a key made of its name and prototypes, so that it counts only while the
pool has those very prototypes. The log, joins.jsonl, is brought up to date with the pool whenever
somebody joins or leaves: after a crash, and after a resumed run that wrote its pool anew.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import write_atomically
from mpfedcl.core.json_files import load_json
from mpfedcl.core.tensors import Tensors, digest, pack_tensors
from mpfedcl.inference.ledger import make_event, read_events, write_events
from mpfedcl.prototypes import PrototypePool, Prototypes
from mpfedcl.runs.directory import pack_pool

Json = dict[str, Any]

_LONGEST_NAME = 200
_FILE = re.compile(r"\.?([0-9a-f]{24})\.(?:json|safetensors)(?:(?:\.[0-9a-f]{8})?\.tmp)?")
"""What lies in joined/, and what a crash may leave of it."""


def check_name(name: str) -> None:
    """Refuse a name that cannot be a client's: it names files and travels as text."""
    plain = name.isprintable() and "/" not in name and not name.startswith(".")
    if not name or not plain or len(name.encode()) > _LONGEST_NAME:
        raise InvalidInput(
            f"name is {name!r}; it must be printable text of at most {_LONGEST_NAME} bytes "
            "without a slash, and must not begin with a dot."
        )


def prototypes_key(name: str, prototypes: Prototypes) -> str:
    """Return what tells a client's prototypes from all others."""
    sha = hashlib.sha256(json.dumps([name, list(prototypes.vectors.shape)]).encode())
    for part in (prototypes.vectors, prototypes.labels, prototypes.counts):
        sha.update(part.detach().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()[:24]


def find_joined_models(path: Path, pool: PrototypePool | None) -> dict[str, Path]:
    """Return the files of personal models that joined clients have left, by client."""
    if pool is None or not (path / "joined").is_dir():
        return {}
    found = {name: _joined_file(path, pool, name, ".safetensors") for name in pool.names}
    return {name: file for name, file in found.items() if file.is_file()}


def _joined_file(path: Path, pool: PrototypePool, name: str, suffix: str) -> Path:
    return path / "joined" / f"{prototypes_key(name, pool.of(name))}{suffix}"


class JoinedClients:
    """The joined clients of a run. Whoever changes them holds the run's lock."""

    def __init__(
        self, path: Path, pool: PrototypePool, original_clients: Mapping[str, Any]
    ) -> None:
        self.path = path
        self.pool = pool
        self._original_clients = original_clients
        """The clients that the run was trained with, by name."""

    @property
    def joined(self) -> list[str]:
        """The clients that have joined since, in order of name."""
        return [name for name in self.pool.names if name not in self._original_clients]

    def describe(self, name: str) -> Json:
        """Return the record of a joined client; little where it was lost."""
        record: Json = {"client": name}
        with contextlib.suppress(OSError, ValueError):
            found = load_json(_joined_file(self.path, self.pool, name, ".json").read_bytes())
            record |= found if isinstance(found, dict) else {}
        return record

    def check_new_name(self, name: str, *, replace: bool) -> None:
        """Refuse a name that is in use, or cannot be."""
        check_name(name)
        if name in self._original_clients:
            raise InvalidInput(
                f"name is {name!r}, a client that the run was trained with; it must be another."
            )
        if name in self.joined and not replace:
            raise InvalidInput(
                f"name is {name!r}, which has joined already; give another one, or --replace to "
                f"have its prototypes made again, or --leave {name}."
            )

    def add(self, name: str, prototypes: Prototypes, model: Tensors | None, record: Json) -> None:
        """Put a client's prototypes into the pool, in place of those it may have there."""
        if not len(prototypes):
            raise InvalidInput(
                f"{name} has no prototype to add: prototypes.min_cluster_size leaves none, so it "
                "must have more images."
            )
        self._reconcile_log()
        before = pack_pool(self.pool)
        after = self.pool.without(name).with_client(name, prototypes)
        content = pack_pool(after)
        key = prototypes_key(name, after.of(name))
        event = {
            **make_event("replaced" if name in self.joined else "joined", name),
            "key": key,
            **record,
            "pool_before": digest(before),
            "pool_after": digest(content),
        }
        (self.path / "joined").mkdir(exist_ok=True)
        # All before the pool: none of it counts until the pool has these prototypes.
        write_atomically(
            self.path / "joined" / f"{key}.json", json.dumps(event, allow_nan=False).encode()
        )
        if model is not None:
            file = self.path / "joined" / f"{key}.safetensors"
            write_atomically(file, pack_tensors(model))
        self._commit(after, content, event)

    def remove(self, name: str) -> None:
        """Take a joined client's prototypes out of the pool again."""
        if name in self._original_clients:
            raise InvalidInput(
                f"leave is {name!r}, a client that the run was trained with; only a client that "
                "has joined can leave."
            )
        if name not in self.joined:
            known = ", ".join(self.joined)
            raise InvalidInput(
                f"leave is {name!r}; "
                + (f"it must be one of {known}." if known else "nobody has joined this run.")
            )
        self._reconcile_log()
        after = self.pool.without(name)
        content = pack_pool(after)
        self._commit(after, content, {**make_event("left", name), "pool_after": digest(content)})

    def note_rejection(self, name: str, reason: str, record: Json) -> None:
        """Write down who was not taken in, and why."""
        self._reconcile_log()
        write_events(self.path, {**make_event("rejected", name), "reason": reason, **record})

    def _commit(self, after: PrototypePool, content: bytes, event: Json) -> None:
        write_atomically(self.path / "pool.safetensors", content)
        self.pool = after
        write_events(self.path, event)
        self._remove_unused_files()

    def _reconcile_log(self) -> None:
        """Log what a crash or a resume has kept from the log."""
        said: dict[str, str] = {}
        for event in read_events(self.path):
            if event.get("event") in ("joined", "replaced"):
                said[str(event.get("client"))] = str(event.get("key"))
            elif event.get("event") in ("left", "dropped"):
                said.pop(str(event.get("client")), None)
        true = {name: prototypes_key(name, self.pool.of(name)) for name in self.joined}
        missed = [
            {**make_event("joined", name), "key": true[name], **self.describe(name)}
            for name in true
            if said.get(name) != true[name]
        ]
        gone = [
            {**make_event("dropped", name), "reason": "its prototypes are no longer in the pool"}
            for name in said
            if name not in true
        ]
        if missed or gone:
            write_events(self.path, *gone, *missed)

    def _remove_unused_files(self) -> None:
        """Remove what belongs to nobody in the pool any more."""
        folder = self.path / "joined"
        if not folder.is_dir():
            return
        kept = {prototypes_key(name, self.pool.of(name)) for name in self.joined}
        for file in list(folder.iterdir()):
            ours = _FILE.fullmatch(file.name)
            if ours and ours[1] not in kept:
                file.unlink()
        # Somebody may have put something of their own there.
        with contextlib.suppress(OSError):
            folder.rmdir()
