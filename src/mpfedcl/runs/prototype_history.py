"""The prototypes of a run in some of its rounds, so that one can see them move.

It is for the eye alone: half precision, a share of a large pool, and so few rounds that it stays
small. Nothing is computed from it, and a run can be resumed without it.
"""

import json
from pathlib import Path

import torch

from mpfedcl.core.files import write_atomically
from mpfedcl.core.tensors import pack_tensors
from mpfedcl.prototypes import PrototypePool

MOST_ROUNDS = 32
MOST_PROTOTYPES = 256
FOLDER = "trail"


def save_prototypes(path: Path, round_number: int, pool: PrototypePool) -> None:
    """Write a round's prototypes; drop the rounds before it that are too close together."""
    folder = path / FOLDER
    folder.mkdir(exist_ok=True)
    # Waiting for the disk would cost more than all the rest, for a picture that is not needed.
    write_atomically(folder / _name(round_number), _pack(pool), durable=False)
    _keep_only(folder, {*kept_rounds(round_number)})


def drop_later_rounds(path: Path, last: int) -> None:
    """Drop the rounds after the last one that a run resumes from."""
    if (path / FOLDER).is_dir():
        _keep_only(path / FOLDER, {*range(1, last + 1)})


def kept_rounds(newest: int) -> list[int]:
    """Return the rounds that are kept once `newest` is done: evenly spaced, and the newest.

    It hangs on the number alone, so a run that was interrupted keeps the same ones.
    """
    step = 1
    while newest > MOST_ROUNDS * step:
        step *= 2
    return sorted({*range(1, newest + 1, step), newest})


def find_rounds(path: Path) -> dict[int, Path]:
    """Return the files of a run's prototype history by round."""
    found = {}
    for file in (path / FOLDER).glob("round-*.safetensors"):
        number = file.stem.removeprefix("round-")
        if number.isascii() and number.isdigit():
            found[int(number)] = file
    return dict(sorted(found.items()))


def _name(round_number: int) -> str:
    return f"round-{round_number:06d}.safetensors"


def _keep_only(folder: Path, rounds: set[int]) -> None:
    for number, file in find_rounds(folder.parent).items():
        if number not in rounds:
            file.unlink(missing_ok=True)


def _pack(pool: PrototypePool) -> bytes:
    rows, names = _choose(pool)
    vectors = pool.vectors[rows]
    # Raw embeddings may be longer than half precision reaches.
    is_small = not len(rows) or float(vectors.abs().max()) < torch.finfo(torch.float16).max
    number = {owner: place for place, owner in enumerate(names)}
    owners = [number[owner] for owner in pool.owners[rows].tolist()]
    tensors = {
        "vectors": vectors.to(torch.float16 if is_small else torch.float32),
        "labels": pool.labels[rows].to(torch.int32),
        "counts": pool.counts[rows].to(torch.int32),
        "owners": torch.tensor(owners, dtype=torch.int32),
    }
    return pack_tensors(tensors, note=("names", json.dumps([pool.names[each] for each in names])))


def _choose(pool: PrototypePool) -> tuple[torch.Tensor, list[int]]:
    """Return rows of a pool, all of some clients, and those clients: the same every round."""
    owners = pool.owners.cpu()
    if len(pool) <= MOST_PROTOTYPES:
        return torch.arange(len(pool)), list(range(len(pool.names)))
    most = int(owners.bincount(minlength=1).max())
    count = max(1, min(len(pool.names), MOST_PROTOTYPES // most))
    step = len(pool.names) / count
    clients = [int(place * step) for place in range(count)]
    rows = torch.isin(owners, torch.tensor(clients)).nonzero().flatten()
    return rows[:MOST_PROTOTYPES], clients
