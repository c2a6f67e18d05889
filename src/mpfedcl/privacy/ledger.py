"""The privacy ledger of a run: the spent budget and the releases, stored before they are used.

Each release is drawn once. Drawing its noise again after a crash would publish two noisy copies of
the same values and cost twice the budget, so a repeated round uses the stored release.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from mpfedcl.core.errors import InvalidInput, explain
from mpfedcl.core.files import write_atomically
from mpfedcl.core.tensors import Tensors, load_tensors, pack_tensors
from mpfedcl.privacy.accounting import spent_epsilon

FOLDER = "privacy"
_KEPT = 2
"""Number of releases kept: one for each checkpoint."""
_SLACK = 1 + 1e-6


class BudgetSpent(InvalidInput):
    """Raised for a release that would exceed the budget."""


_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Ledger:
    """A budget and the releases that were charged to it, the content of `ledger.json`."""

    unit: Literal["record", "client"]
    epsilon: _Positive
    delta: _Positive
    multiplier: _Positive
    """Noise over sensitivity, fixed when the run began."""
    sampling: _Positive = 1.0
    """The probability with which each client takes part in a round."""
    clients: Annotated[int, Field(ge=1)] = 1
    """Number of clients when the run began, the divisor of sums."""
    releases: dict[_Positive, Annotated[int, Field(ge=0)]]
    """Number of releases by multiplier. It has no default: a file without it is damaged."""

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


_LEDGER = TypeAdapter(Ledger)
_NAMES = TypeAdapter(list[str])
_Any = TypeVar("_Any")


class ReleaseLog:
    """The ledger and the latest releases of a run, stored in its directory if it has one.

    The files are readable by their owner only because participation is secret.
    """

    def __init__(self, run: Path | None = None) -> None:
        self._folder = None if run is None else run / FOLDER
        self.ledger = None if run is None else read_ledger(run)
        self._released: dict[int, tuple[int, Tensors]] = {}
        """By round: the number of the release, which shows after a crash whether the release was
        charged, and its tensors."""
        self._chosen: dict[int, list[str]] = {}
        """By round: the sampled clients."""
        if self._folder is not None:
            for path in (*self._folder.glob("release-*"), *self._folder.glob("chosen-*")):
                self._read(path)

    def _read(self, path: Path) -> None:
        """Read a stored release or sample; reject a damaged file."""
        try:
            kind, *numbers = path.stem.split("-")
            if kind == "release":
                round_number, number = map(int, numbers)
                self._released[round_number] = number, load_tensors(path)
            else:
                (round_number,) = map(int, numbers)
                self._chosen[round_number] = _NAMES.validate_json(path.read_bytes())
        except ValueError as error:
            raise InvalidInput(
                f"{path} cannot be read ({explain(error)}); the run must be restarted in a new "
                "folder."
            ) from None

    def begin(self, ledger: Ledger) -> None:
        """Set the ledger, unless the run has one."""
        if self.ledger is None:
            self._set_ledger(ledger)

    def release(self, round_number: int, multiplier: float, make: Callable[[], Tensors]) -> Tensors:
        """Return a round's release: the stored one, else a new one that is stored and charged."""
        assert self.ledger is not None
        found = self._released.get(round_number)
        number = self.ledger.num_releases + 1
        if found is not None and found[0] < number:
            return found[1]
        # Charged before noise is drawn: a release that is not covered is never made.
        charged = self.ledger.charge(multiplier)
        if found is None:
            found = number, make()
            name = f"release-{round_number:06d}-{number:06d}.safetensors"
            self._write(name, pack_tensors(found[1]))
            _remember(self._released, round_number, found)
        self._set_ledger(charged)
        return found[1]

    def choose(self, round_number: int, draw: Callable[[], list[str]]) -> list[str]:
        """Return the clients of a round: the stored sample, or a new one that is stored."""
        if round_number not in self._chosen:
            names = draw()
            self._write(f"chosen-{round_number:06d}.json", json.dumps(names).encode())
            _remember(self._chosen, round_number, names)
        return self._chosen[round_number]

    def _set_ledger(self, ledger: Ledger) -> None:
        self._write("ledger.json", _LEDGER.dump_json(ledger))
        self.ledger = ledger

    def _write(self, name: str, content: bytes) -> None:
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        self._folder.chmod(0o700)
        write_atomically(self._folder / name, content)
        kind, _, is_numbered = name.partition("-")
        for path in sorted(self._folder.glob(f"{kind}-*"))[:-_KEPT] if is_numbered else ():
            path.unlink()


def _remember(known: dict[int, _Any], round_number: int, value: _Any) -> None:
    """Add the value of a round, and forget those of all but the latest rounds."""
    known[round_number] = value
    for old in sorted(known)[:-_KEPT]:
        del known[old]


def read_ledger(run: Path) -> Ledger | None:
    """Return the ledger of a run, or None if nothing was spent; reject a damaged file."""
    path = run / FOLDER / "ledger.json"
    if not path.is_file():
        return None
    try:
        return _LEDGER.validate_json(path.read_bytes())
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"]
        raise InvalidInput(
            f"{path} cannot be read ({reason}); the spent budget is unknown, so the run must be "
            "restarted in a new folder."
        ) from None
