"""Compress uploads: half precision, one byte per value, or only the largest changes."""

import math
from collections.abc import Collection, MutableMapping
from dataclasses import replace
from functools import partial
from typing import Literal, Self

import torch
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.rng import generator
from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.methods.messages import Broadcast, StackMember, Update
from mpfedcl.rounds.processors.base import Processor

FEWEST_NUMBERS = 256
"""Smaller tensors are sent as they are."""
_LARGEST_CODE = 127
_MATRIX_AXES = 2
_LONG_ROW = 16
"""Shortest row that has a scale of its own."""
_KEPT = 0.05


class Compress(Processor):
    """Compresses changes of the model, prototypes and statistics.

    A tensor keeps its name. Its scales, or the positions of its values, are in `Update.coding`.
    """

    name = "compress"

    def __init__(self, kind: Literal["half", "int8", "topk"], keep: float, seed: int) -> None:
        self._kind = kind
        self._keep = keep
        self._seed = seed
        self._unsent: MutableMapping[str, Tensors] = {}
        """topk: changes by client that accepted updates have not sent yet."""
        self._pending: dict[str, Tensors] = {}
        """The same after updates that the server may still reject."""

    @classmethod
    def of(cls, experiment: Experiment) -> Self | None:
        """Return the compression that `update.compress` names."""
        kind = experiment.update.compress
        if kind is None or kind == "none":
            return None
        if experiment.secure_aggregation:
            raise InvalidInput(
                f"update.compress is {kind!r}; with secure_aggregation it must be none: masked "
                "numbers have no size that could be left out."
            )
        return cls(kind, experiment.update.keep or _KEPT, experiment.seed)

    @torch.no_grad()
    def outgoing(self, update: Update, broadcast: Broadcast) -> Update:
        """Compress the large tensors of an update."""
        if update.left_out:
            # A part of a model is small, and only the server knows the positions of its values.
            return update
        key = (self._seed, broadcast.round, broadcast.dispatch or 0, update.client, "rounding")
        coding: Tensors = {}
        encode = partial(_encode, key, coding)
        averaged = update.written_out().averaged
        assert not isinstance(averaged, StackMember)
        if averaged is not None and self._kind == "topk":
            averaged = self._send_largest(update.client, averaged, broadcast, coding)
        elif averaged is not None:
            averaged = {
                name: encode(f"averaged/{name}", value, self._kind, broadcast.params.get(name))
                for name, value in averaged.items()
            }
        # Statistics must stay possible, for which a byte is too coarse.
        summed = {n: encode(f"summed/{n}", value, "half") for n, value in update.summed.items()}
        kind = "half" if self._kind == "topk" else self._kind
        vectors = encode("prototypes", update.prototypes.vectors, kind)
        rows = replace(update.prototypes, vectors=vectors)
        return replace(update, averaged=averaged, summed=summed, prototypes=rows, coding=coding)

    @torch.no_grad()
    def incoming(self, update: Update, broadcast: Broadcast) -> Update:
        """Decompress an untrusted update."""
        if not update.coding:
            return update
        assert not isinstance(update.averaged, StackMember)
        averaged, summed, rows = dict(update.averaged or {}), dict(update.summed), update.prototypes
        for key, code in update.coding.items():
            group, _, name = key.partition("/")
            if key == "prototypes":
                rows = replace(rows, vectors=_decode(rows.vectors, code, None))
            elif group == "averaged" and name in averaged:
                averaged[name] = _decode(averaged[name], code, broadcast.params.get(name))
            elif group == "summed" and name in summed:
                summed[name] = _decode(summed[name], code, None)
            else:
                raise ValueError(f"nothing is called {key[:80]!r}")
        sent = None if update.averaged is None else averaged
        return replace(update, averaged=sent, summed=summed, prototypes=rows, coding={})

    def keep_accepted(self, accepted: Collection[str]) -> None:
        """Keep what accepted updates have left out; rejected ones do not count as sent."""
        for client in accepted:
            if client in self._pending:
                self._unsent[client] = self._pending.pop(client)

    def keep_in(self, kept: MutableMapping[str, Tensors]) -> None:
        """Set where unsent changes are kept by client."""
        self._unsent = kept

    def _send_largest(
        self, client: str, averaged: Tensors, broadcast: Broadcast, coding: Tensors
    ) -> Tensors:
        """Return the largest changes of each large tensor, including unsent earlier changes."""
        before, sent, left = self._unsent.get(client, {}), {}, {}
        for name, value in averaged.items():
            start = broadcast.params.get(name)
            if start is None or not _is_worth_it(value):
                continue
            change = (value - start).flatten()
            if name in before:
                change += before[name].to(change)
            count = max(1, math.ceil(self._keep * len(change)))
            # Sorted, so that equal updates have equal bytes.
            places = change.abs().topk(count).indices.sort().values
            sent[name] = change[places]
            coding[f"averaged/{name}"] = places.int()
            left[name] = change.index_fill(0, places, 0)
        self._pending[client] = left
        return {**averaged, **sent}


def _encode(
    key: tuple[int, int, int, str, str],
    coding: Tensors,
    name: str,
    value: Tensor,
    kind: str,
    start: Tensor | None = None,
) -> Tensor:
    """Encode a large tensor, or its change, in bytes or halves; put its scale into `coding`."""
    if not _is_worth_it(value):
        return value
    change = value if start is None else value - start
    # One scale per unit or prototype, because errors are relative to the largest value.
    by_row = kind == "int8" and change.ndim == _MATRIX_AXES and len(change.T) >= _LONG_ROW
    largest = change.abs().amax(1, keepdim=True) if by_row else change.abs().max()
    if not bool(largest.isfinite().all()):
        # Sent as it is, so that validation can reject it.
        return value
    largest = largest.where(largest > 0, 1)
    coding[name] = largest / _LARGEST_CODE if kind == "int8" else largest
    exact = change / coding[name]
    if kind == "half":
        return exact.half()
    draws = torch.rand(value.shape, generator=generator(*key, name))
    return (exact + draws.to(exact)).floor().clamp(-_LARGEST_CODE, _LARGEST_CODE).char()


def _is_worth_it(value: Tensor) -> bool:
    """Return whether a tensor is large and not integral; integers stay exact."""
    if value.numel() < FEWEST_NUMBERS or value.dtype not in (torch.float32, torch.float64):
        return False
    return not bool((value == value.round()).all())


def _decode(sent: Tensor, code: Tensor, start: Tensor | None) -> Tensor:
    """Decode a tensor: scale it, or put its values at their positions, and add the start."""
    if code.dtype == torch.int32:
        if start is None or code.ndim != 1 or code.shape != sent.shape:
            raise ValueError("places must be as many as numbers, of a tensor that was sent")
        change = torch.zeros_like(start).flatten()
        # Raises where a place is out of range.
        change = change.index_copy(0, code.long(), sent.to(start.dtype)).view_as(start)
        return start + change
    by_row = sent.ndim == _MATRIX_AXES and code.shape == (len(sent), 1)
    if not (code.ndim == 0 or by_row) or code.dtype not in (torch.float32, torch.float64):
        raise ValueError("a scale must be one number, or one for each row")
    if start is not None and sent.shape != start.shape:
        raise ValueError("a change must have the shape of what it changes")
    change = sent.to(code.dtype) * code
    return change if start is None else start + change
