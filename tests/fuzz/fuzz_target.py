"""What a fuzzer's target must say: what it is given, and what it must do with it."""

from abc import ABC, abstractmethod
from random import Random
from typing import Any, ClassVar


class Target(ABC):
    """Something that takes what strangers give."""

    name: ClassVar[str]
    refusals: ClassVar[tuple[type[Exception], ...]]
    """The exceptions by which it may refuse; any other is a fault."""

    @abstractmethod
    def make(self, random: Random) -> Any:
        """Return an input: an honest one, changed."""

    @abstractmethod
    def check(self, made: Any) -> None:
        """Give it to the program, and hold what comes of it to what was promised."""

    def to_bytes(self, made: Any) -> bytes:
        """Return what is kept in the corpus."""
        content: bytes = made
        return content

    def from_bytes(self, content: bytes) -> Any:
        """Return what `to_bytes` was given."""
        return content

    def runs(self, made: Any) -> bool:
        """Check an input; tell whether it was taken, not refused."""
        try:
            self.check(made)
        except self.refusals:
            return False
        return True
