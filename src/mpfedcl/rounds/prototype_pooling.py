"""From the prototypes that clients have sent to the pool that the server sends."""

from collections.abc import Mapping
from typing import Any

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.rng import generator
from mpfedcl.methods import Method, SharesPrototypes, prototype_rule
from mpfedcl.prototypes import PrototypePool, Prototypes, merge_prototypes, spread_kept


class PrototypePooling:
    """Makes a round's pool once, and merges it where `prototypes.pool_size` asks for it."""

    def __init__(self, method: Method, empty: PrototypePool) -> None:
        self._method = method
        self._empty = empty
        self._most: int | None = method.experiment.prototypes.pool_size
        self._rows: Mapping[str, tuple[int, Prototypes]] = {}
        self._pool = empty
        self._told: dict[str, Any] = {}
        self._rule = prototype_rule(method)
        if self._most is None or not isinstance(method, SharesPrototypes):
            return
        if method.compares_with_own:
            raise InvalidInput(
                f"prototypes.pool_size is {self._most}; with method {method.name} it must be left "
                "out: its clients look up their own prototypes in the pool."
            )

    def make(self, rows: Mapping[str, tuple[int, Prototypes]], number: int) -> PrototypePool:
        """Return the pool of clients' prototypes, each with the round they came in, at a round."""
        if rows is not self._rows:
            self._rows, self._told = rows, {}
            self._pool = self._merge(self._gather(rows), number) if rows else self._empty
        return self._pool

    def remarks(self) -> dict[str, Any]:
        """Return what a record should say of the pool: how far it was merged."""
        return {"pool": self._told} if self._told else {}

    def _gather(self, rows: Mapping[str, tuple[int, Prototypes]]) -> PrototypePool:
        return PrototypePool.gather(
            {name: prototypes for name, (_, prototypes) in rows.items()},
            num_classes=self._method.num_classes,
            num_prototypes=self._rule.num_prototypes,
        )

    def _merge(self, full: PrototypePool, number: int) -> PrototypePool:
        # A method that sends something else instead makes it of the single clients' prototypes.
        if self._most is None or self._rule.reference(full) is not full:
            return full
        key = (self._method.experiment.seed, number, "merged pool")
        merged = merge_prototypes(full, self._most, generator(*key))
        if merged is not full:
            self._told = {
                "prototypes": len(full),
                "merged_into": len(merged),
                "spread_kept": round(spread_kept(full, merged), 3),
            }
        return merged
