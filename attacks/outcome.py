"""The expected and the observed outcome of an attack."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Outcome:
    """One line of the table."""

    attack: str
    expected: str
    seen: str
    ok: bool
    """Whether what was seen is what the documents say."""


class Attack(Protocol):
    """A module of this folder: its docstring says what an attacker tries."""

    __doc__: str | None

    def attack(self, *, full: bool) -> list[Outcome]:
        """Try it; at length where `full`."""
