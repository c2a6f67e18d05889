"""Updates that are tampered with in transit, and the reason to reject each of them."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.engines import Engine
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.prototypes import Prototypes
from mpfedcl.rounds.loop import RoundLoop
from mpfedcl.rounds.record import RoundRecord
from small_experiments import MeddledEngine, assert_same_tensors, tensors_of

VICTIM = "client-1"
WEIGHT = "hidden.0.weight"
BIAS = "classifier.bias"

Tamper = Callable[[Update], Sequence[Update]]


class TamperingEngine(MeddledEngine):
    """An engine that tampers with, or drops, the updates of some clients."""

    def __init__(self, engine: Engine, tamper: Tamper, victims: Sequence[str] = (VICTIM,)) -> None:
        super().__init__(engine)
        self._tamper = tamper
        self._victims = victims

    def meddle(
        self, broadcast: Broadcast, names: Sequence[str], updates: Iterable[Update]
    ) -> Iterator[Update]:
        for update in updates:
            yield from self._tamper(update) if update.client in self._victims else [update]


def drop(_: Update) -> list[Update]:
    return []


def with_tensor(name: str, change: Callable[[Tensor], Tensor]) -> Tamper:
    def tamper(update: Update) -> list[Update]:
        sums = tensors_of(update)
        return [replace(update, averaged={**sums, name: change(sums[name])})]

    return tamper


def with_value(index: int, value: float, name: str = WEIGHT) -> Tamper:
    def change(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        changed.view(-1)[index] = value
        return changed

    return with_tensor(name, change)


def with_sums(change: Callable[[Tensors], Tensors]) -> Tamper:
    return lambda update: [replace(update, averaged=change(dict(tensors_of(update))))]


def with_field(**fields: Any) -> Tamper:
    return lambda update: [replace(update, **fields)]


def forge(rows: Prototypes, **columns: Tensor) -> Prototypes:
    """Return prototypes that bypass the checks of their constructor."""
    forged = object.__new__(Prototypes)
    for name in ("vectors", "labels", "counts"):
        object.__setattr__(forged, name, columns.get(name, getattr(rows, name)))
    return forged


def with_rows(change: Callable[[Prototypes], dict[str, Tensor]]) -> Tamper:
    return lambda update: [
        replace(update, prototypes=forge(update.prototypes, **change(update.prototypes)))
    ]


def filled(tensor: Tensor, value: float) -> Tensor:
    """Return a copy with another first value."""
    changed = tensor.clone()
    changed.view(-1)[0] = value
    return changed


def too_many(rows: Prototypes) -> dict[str, Tensor]:
    """Return three prototypes of one class; the limit is two."""
    return {
        "vectors": rows.vectors[:1].repeat(3, 1),
        "labels": rows.labels[:1].repeat(3),
        "counts": torch.ones(3, dtype=torch.int64),
    }


BAD_WEIGHTS: dict[str, tuple[Tamper, str]] = {
    "NaN": (with_value(5, math.nan), "not finite"),
    "NaN in the last tensor": (with_value(-1, math.nan, BIAS), "not finite"),
    "infinity": (with_value(0, math.inf), "not finite"),
    "minus infinity": (with_value(0, -math.inf), "not finite"),
    "huge": (with_value(0, 2e6), "changed by 2e+06; at most 1e+06"),
    "huge beyond its square": (with_value(0, 1e30), "not finite"),
    "shape that broadcasts": (with_tensor(BIAS, lambda b: b[:1]), "shape [1]; expected [3]"),
    "scalar": (with_tensor(BIAS, lambda b: b.sum()), "shape []; expected [3]"),
    "one axis more": (with_tensor(BIAS, lambda b: b.unsqueeze(0)), "shape [1, 3]; expected [3]"),
    "transposed": (with_tensor(WEIGHT, lambda w: w.T), "shape [36, 8]; expected [8, 36]"),
    "empty": (with_tensor(BIAS, lambda b: b[:0]), "shape [0]; expected [3]"),
    "float64": (with_tensor(WEIGHT, Tensor.double), "type torch.float64"),
    "float16": (with_tensor(WEIGHT, Tensor.half), "type torch.float16"),
    "integers": (with_tensor(WEIGHT, Tensor.long), "type torch.int64"),
    "complex": (with_tensor(WEIGHT, lambda w: w.to(torch.complex64)), "type torch.complex64"),
    "missing tensor": (with_sums(lambda s: {n: s[n] for n in s if n != BIAS}), BIAS),
    "no tensors": (with_sums(lambda _: {}), "missing or unknown"),
    "renamed tensor": (
        with_sums(lambda s: {n.replace(BIAS, "bias"): v for n, v in s.items()}),
        "['bias', 'classifier.bias']",
    ),
    "extra tensor": (with_sums(lambda s: {**s, "backdoor": s[BIAS]}), "backdoor"),
}
BAD_NUMBERS: dict[str, tuple[Tamper, str]] = {
    "num_samples 1e15": (with_field(num_samples=10**15), "num_samples is 1000000000000000"),
    "num_samples negative": (with_field(num_samples=-5), "num_samples is -5"),
    "num_samples 0": (with_field(num_samples=0), "num_samples is 0"),
    "num_samples bool": (with_field(num_samples=True), "num_samples is True"),
    "num_samples float": (
        lambda update: [replace(update, num_samples=float(update.num_samples))],  # type: ignore[arg-type]
        "num_samples is ",
    ),
    "num_samples one more": (
        lambda update: [replace(update, num_samples=update.num_samples + 1)],
        "num_samples is ",
    ),
    "loss NaN": (with_field(loss=math.nan), "loss is nan"),
    "loss infinite": (with_field(loss=math.inf), "loss is inf"),
    "loss that overflows": (with_field(loss=1.7e308), "loss is 1.7e+308; at most 1e+12"),
    "loss that overflows below": (with_field(loss=-1.7e308), "loss is -1.7e+308; at most 1e+12"),
    "loss an integer": (with_field(loss=1), "loss is 1"),
}
BAD_PROTOTYPES: dict[str, tuple[Tamper, str]] = {
    "label too large": (with_rows(lambda r: {"labels": filled(r.labels, 3)}), "labels"),
    "label negative": (with_rows(lambda r: {"labels": filled(r.labels, -1)}), "labels"),
    "label far too large": (with_rows(lambda r: {"labels": filled(r.labels, 2**40)}), "labels"),
    "labels as floats": (with_rows(lambda r: {"labels": r.labels.float()}), "labels has type"),
    "labels in two axes": (with_rows(lambda r: {"labels": r.labels.unsqueeze(0)}), "labels"),
    "a single label": (with_rows(lambda r: {"labels": r.labels.sum()}), "labels"),
    "count 0": (with_rows(lambda r: {"counts": filled(r.counts, 0)}), "counts"),
    "count negative": (with_rows(lambda r: {"counts": filled(r.counts, -7)}), "counts"),
    "more than its samples": (with_rows(lambda r: {"counts": filled(r.counts, 61)}), "counts"),
    "counts that overflow": (
        with_rows(lambda r: {"counts": torch.full_like(r.counts, 2**62)}),
        "counts",
    ),
    "counts as floats": (with_rows(lambda r: {"counts": r.counts.double()}), "counts has type"),
    "a count too few": (with_rows(lambda r: {"counts": r.counts[1:]}), "counts has shape"),
    "vectors NaN": (with_rows(lambda r: {"vectors": filled(r.vectors, math.nan)}), "not finite"),
    "vectors infinite": (
        with_rows(lambda r: {"vectors": filled(r.vectors, math.inf)}),
        "not finite",
    ),
    "vectors huge": (with_rows(lambda r: {"vectors": filled(r.vectors, 2e6)}), "norm 2e+06"),
    "vectors float64": (with_rows(lambda r: {"vectors": r.vectors.double()}), "torch.float64"),
    "vectors as integers": (with_rows(lambda r: {"vectors": r.vectors.long()}), "torch.int64"),
    "wrong dimension": (with_rows(lambda r: {"vectors": r.vectors[:, :3]}), "vectors has shape"),
    "dimension that broadcasts": (
        with_rows(lambda r: {"vectors": r.vectors[:, :1]}),
        "vectors has shape",
    ),
    "none, of a wrong dimension": (
        lambda update: [replace(update, prototypes=Prototypes.empty(999))],
        "vectors has shape",
    ),
    "too many of a class": (with_rows(too_many), "a class has 3 prototypes; at most 2"),
}
ALL_BAD = BAD_WEIGHTS | BAD_NUMBERS | BAD_PROTOTYPES


def run_rounds(federation: RoundLoop, rounds: int = 2) -> list[RoundRecord]:
    return [federation.run_round(evaluate=True) for _ in range(rounds)]


def assert_same_state(left: RoundLoop, right: RoundLoop) -> None:
    assert left.state.round == right.state.round
    assert_same_tensors(left.state.server.params, right.state.server.params)
    assert_same_tensors(left.state.server.extra, right.state.server.extra)
    assert left.pool.names == right.pool.names
    for column in ("vectors", "labels", "counts", "owners"):
        assert torch.equal(getattr(left.pool, column), getattr(right.pool, column))
