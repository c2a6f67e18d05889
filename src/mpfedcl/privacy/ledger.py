"""The privacy ledger of a run: the spent budget and the releases, stored before they are used.

Each release is drawn once. Drawing its noise again after a crash would publish two noisy copies of
the same values and cost twice the budget, so a repeated round uses the stored release.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import write_atomically
from mpfedcl.core.tensors import Tensors, load_tensors, pack_tensors
from mpfedcl.privacy.accounting import spent_epsilon

FOLDER = "privacy"
_KEPT = 2
"""Number of releases kept: one for each checkpoint."""
_SLACK = 1 + 1e-6


class BudgetSpent(InvalidInput):
    """Raised for a release that would exceed the budget."""


@dataclass(frozen=True)
class Ledger:
    """A budget and the releases that were charged to it."""

    unit: Literal["record", "client"]
    epsilon: float
    delta: float
    multiplier: float
    """Noise over sensitivity, fixed when the run began."""
    sampling: float = 1.0
    """The probability with which each client takes part in a round."""
    clients: int = 1
    """Number of clients when the run began, the divisor of sums."""
    releases: dict[float, int] = field(default_factory=dict)
    """Number of releases by multiplier."""

    def charge(self, multiplier: float) -> Self:
        """Return the ledger with one more release; raise BudgetSpent if it is not covered."""
        count = self.releases.get(multiplier, 0) + 1
        charged = replace(self, releases={**self.releases, multiplier: count})
        if charged.spent > self.epsilon * _SLACK:
            raise BudgetSpent(
                f"privacy.epsilon is {self.epsilon:g}; {self.spent:.3f} is spent, and one more "
                f"release would make it {charged.spent:.3f}, which exceeds the budget."
            )
        return charged

    @property
    def num_releases(self) -> int:
        """Number of releases so far."""
        return sum(self.releases.values())

    @property
    def spent(self) -> float:
        """Epsilon spent so far, at the stated delta."""
        return spent_epsilon(self.releases, self.delta, sampling=self.sampling)

    def summary(self) -> dict[str, Any]:
        """Return the fields for round records and for the summary of a run."""
        spent = min(float(f"{self.spent:.6g}"), self.epsilon)
        return {"unit": self.unit, "epsilon": self.epsilon, "delta": self.delta, "spent": spent}

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `ledger.json`."""
        return {**vars(self), "releases": [[*each] for each in self.releases.items()]}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Return the ledger that `to_json` was called on; raise ValueError for invalid values."""
        releases = {float(multiplier): int(count) for multiplier, count in values["releases"]}
        found = cls(**{**values, "releases": releases})
        positive = [found.epsilon, found.delta, found.multiplier, found.sampling, *releases]
        if not all(isinstance(each, float) and 0 < each < math.inf for each in positive):
            raise ValueError("epsilon, delta and multipliers must be positive")
        if any(count < 0 for count in releases.values()) or found.clients < 1:
            raise ValueError("counts must not be negative")
        return found


class ReleaseLog:
    """The ledger and the latest releases of a run, in memory."""

    def __init__(self) -> None:
        self.ledger: Ledger | None = None
        self._released: dict[int, tuple[int, Tensors]] = {}
        """By round: the number of the release, and its tensors."""
        self._chosen: dict[int, list[str]] = {}

    def begin(self, ledger: Ledger) -> None:
        """Set the ledger, unless the run has one."""
        if self.ledger is None:
            self._write_ledger(ledger)

    def release(self, round_number: int, multiplier: float, make: Callable[[], Tensors]) -> Tensors:
        """Return a round's release: the stored one, else a new one that is stored and charged."""
        assert self.ledger is not None
        found = self._find(round_number)
        number = self.ledger.num_releases + 1
        if found is not None and found[0] < number:
            return found[1]
        # Charged before noise is drawn: a release that is not covered is never made.
        charged = self.ledger.charge(multiplier)
        if found is None:
            found = number, make()
            self._write_release(round_number, *found)
        self._write_ledger(charged)
        return found[1]

    def charge(self, multiplier: float, epsilon: float) -> None:
        """Charge a release that is stored elsewhere, up to an epsilon."""
        assert self.ledger is not None
        self._write_ledger(replace(self.ledger, epsilon=epsilon).charge(multiplier))

    def choose(self, round_number: int, draw: Callable[[], list[str]]) -> list[str]:
        """Return the clients of a round: the stored sample, or a new one that is stored."""
        if round_number not in self._chosen:
            self._chosen[round_number] = draw()
        return self._chosen[round_number]

    def _find(self, round_number: int) -> tuple[int, Tensors] | None:
        return self._released.get(round_number)

    def _write_release(self, round_number: int, number: int, released: Tensors) -> None:
        self._released[round_number] = number, released

    def _write_ledger(self, ledger: Ledger) -> None:
        self.ledger = ledger


class ReleaseFolder(ReleaseLog):
    """The log in a run directory, readable by its owner only because participation is secret."""

    def __init__(self, run: Path) -> None:
        super().__init__()
        self._folder = run / FOLDER
        self.ledger = read_ledger(run)

    def choose(self, round_number: int, draw: Callable[[], list[str]]) -> list[str]:
        """Return the clients of a round: the stored sample, or a new one that is stored."""
        path = self._folder / f"chosen-{round_number:06d}.json"
        if path.is_file():
            return [str(name) for name in json.loads(path.read_bytes())]
        names = draw()
        self._write(path, json.dumps(names).encode())
        self._drop_old("chosen")
        return names

    def _find(self, round_number: int) -> tuple[int, Tensors] | None:
        for path in self._folder.glob(f"release-{round_number:06d}-*.safetensors"):
            return int(path.stem.rpartition("-")[2]), load_tensors(path)
        return None

    def _write_release(self, round_number: int, number: int, released: Tensors) -> None:
        # After a crash, the number shows whether the release was charged.
        name = f"release-{round_number:06d}-{number:06d}.safetensors"
        self._write(self._folder / name, pack_tensors(released))
        self._drop_old("release")

    def _write_ledger(self, ledger: Ledger) -> None:
        self._write(self._folder / "ledger.json", json.dumps(ledger.to_json()).encode())
        self.ledger = ledger

    def _write(self, path: Path, content: bytes) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._folder.chmod(0o700)
        write_atomically(path, content)

    def _drop_old(self, kind: str) -> None:
        for path in sorted(self._folder.glob(f"{kind}-*"))[:-_KEPT]:
            path.unlink()


def read_ledger(run: Path) -> Ledger | None:
    """Return the ledger of a run, or None if nothing was spent; reject a damaged file."""
    path = run / FOLDER / "ledger.json"
    if not path.is_file():
        return None
    try:
        return Ledger.from_json(json.loads(path.read_bytes()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(
            f"{path} cannot be read ({error}); the spent budget is unknown, so the run must be "
            "restarted in a new folder."
        ) from None
