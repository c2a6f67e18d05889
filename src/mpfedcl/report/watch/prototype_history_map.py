"""The prototype map over rounds: every round in the same two directions, so that it does not jump.

The directions are those in which prototypes of one round differ most, over all rounds together:
were rounds not centered each for itself, the common drift would outweigh the classes. They are
fitted anew only when the number of rounds read has doubled; in between a new round moves nothing.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.json_files import Json
from mpfedcl.report.number_formatting import choose_evenly, rounded
from mpfedcl.report.prototype_map import MOST_PROTOTYPES, list_coordinates
from mpfedcl.report.watch.regular_files import Signature, file_signature, read_regular_file
from mpfedcl.runs.prototype_history import FOLDER, find_rounds

_MOST_ROUNDS = 80
_MOST_BYTES = 32 * 2**20


@dataclass(frozen=True)
class RoundPrototypes:
    """The prototypes of one round."""

    vectors: NDArray[numpy.float64]
    labels: list[int]
    counts: list[int]
    owners: list[str]


class PrototypeHistoryMap:
    """Reads the prototype history of a run as it grows, and lays it out in the plane."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rounds: dict[int, tuple[Signature, RoundPrototypes | None]] = {}
        self._axes: NDArray[numpy.float64] | None = None
        self._shares = [0.0, 0.0]
        self._fitted_on = 0

    def refresh(self, last_round: int) -> bool:
        """Read the rounds that are new; without a history, the pool at the end of the run.

        Return whether anything has changed.
        """
        before = {number: signature for number, (signature, _) in self._rounds.items()}
        folder = self._path / FOLDER
        files = find_rounds(self._path) if folder.is_dir() and not folder.is_symlink() else {}
        if not files and last_round and (self._path / "summary.json").is_file():
            files = {last_round: self._path / "pool.safetensors"}
        files = {number: files[number] for number in list(files)[-_MOST_ROUNDS:]}
        for number in self._rounds.keys() - files.keys():
            del self._rounds[number]
        for number, file in files.items():
            signature = file_signature(file)
            if signature is None:
                self._rounds.pop(number, None)
            elif number not in self._rounds or self._rounds[number][0] != signature:
                self._rounds[number] = signature, _read_round_prototypes(file)
        return before != {number: signature for number, (signature, _) in self._rounds.items()}

    def describe(self, class_names: list[str]) -> Json:
        """Return the map, or under `missing` why there is none."""
        frames = self._comparable_rounds(len(class_names))
        if not any(len(frame.labels) for frame in frames.values()):
            return {"missing": "There is no prototype history in this run's folder (yet)."}
        self._fit(frames)
        assert self._axes is not None
        origin = list(frames.values())[-1].vectors.mean(axis=0)
        places = numpy.concatenate([each.vectors - origin for each in frames.values()])
        drawn = list_coordinates(places @ self._axes.T)
        owners = list(dict.fromkeys(name for each in frames.values() for name in each.owners))
        number = {name: place for place, name in enumerate(sorted(owners))}
        described, start = [], 0
        for round_number, frame in frames.items():
            end = start + len(frame.labels)
            described.append({
                "round": round_number,
                "x": drawn["x"][start:end],
                "y": drawn["y"][start:end],
                "class": frame.labels,
                "client": [number[name] for name in frame.owners],
                "count": frame.counts,
            })  # fmt: skip
            start = end
        unread = len(self._rounds) - len(frames)
        rounds = "1 round is" if unread == 1 else f"{unread} rounds are"
        return {
            "classes": class_names,
            "clients": sorted(owners),
            "shares": [rounded(share, 3) for share in self._shares],
            "frames": described,
            "notes": [f"{rounds} left out: the file is damaged or empty."] if unread else [],
        }

    def _comparable_rounds(self, num_classes: int) -> dict[int, RoundPrototypes]:
        """Return the frames that can be drawn together: of one dimension, of known classes."""
        sound = {
            number: frame
            for number, (_, frame) in sorted(self._rounds.items())
            if frame is not None and len(frame.labels) and max(frame.labels) < num_classes
        }
        size = next((each.vectors.shape[1] for each in reversed(sound.values())), 0)
        return {n: each for n, each in sound.items() if each.vectors.shape[1] == size}

    def _fit(self, frames: dict[int, RoundPrototypes]) -> None:
        size = next(iter(frames.values())).vectors.shape[1]
        is_fit = self._axes is not None and self._axes.shape[1] == size
        if is_fit and len(frames) < 2 * self._fitted_on and len(frames) >= self._fitted_on:
            return
        centered = [each.vectors - each.vectors.mean(axis=0) for each in frames.values()]
        scatter = sum(each.T @ each for each in centered)
        sizes, directions = numpy.linalg.eigh(scatter)
        axes = numpy.zeros((2, size))
        axes[: min(2, size)] = directions.T[::-1][:2]
        if is_fit and self._axes is not None:
            # A direction's sign is free: keep it, so that the map is not mirrored.
            signs = numpy.sign((axes * self._axes).sum(axis=1))
        else:
            signs = numpy.sign(axes[numpy.arange(2), numpy.abs(axes).argmax(axis=1)])
        self._axes = axes * numpy.where(signs < 0, -1, 1)[:, None]
        total = float(sizes.clip(min=0).sum())
        top = [*sizes[::-1][:2], 0.0, 0.0][:2]
        self._shares = [max(0.0, float(each)) / total if total else 0.0 for each in top]
        self._fitted_on = len(frames)


def _read_round_prototypes(file: Path) -> RoundPrototypes | None:
    """Return what a file of the history holds, None where it is damaged."""
    try:
        content = read_regular_file(file, _MOST_BYTES)
        tensors = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        names = json.loads(header["__metadata__"]["names"])
        vectors = tensors["vectors"].astype(numpy.float64)
        labels, counts, owners = (tensors[each].tolist() for each in ("labels", "counts", "owners"))
        rows = choose_evenly(len(labels), MOST_PROTOTYPES)
        frame = RoundPrototypes(
            vectors[rows],
            [int(labels[row]) for row in rows],
            [int(counts[row]) for row in rows],
            [str(names[int(owners[row])]) for row in rows],
        )
    except (InvalidInput, SafetensorError, ValueError, LookupError, TypeError, RecursionError):
        return None
    is_sound = (
        vectors.ndim == 2
        and len(vectors) == len(labels) == len(counts) == len(owners)
        and vectors.shape[1] <= 8192
        and bool((numpy.abs(frame.vectors) < 1e30).all())
        and min(frame.labels, default=0) >= 0
        and min(frame.counts, default=1) >= 0
    )
    return frame if is_sound else None
