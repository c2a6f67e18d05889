"""The sums of several clients of one process, without a second moment written out for each."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.gaussian.sums import pack_symmetric, packed_size

SecondMoment = Literal["within", "moment"]
"""The scatter of samples around their class means, or the sum of phi phi'."""


class StackedSums:
    """Σ_i W_i is one product over the samples of all clients; each W_i is made when asked for.

    Args:
        features: [samples, d] of all clients, client after client.
        labels: [samples].
        sizes: The samples of each client.
        num_classes: C.
        second_moment: What is sent beside counts and sums, if anything.
    """

    def __init__(
        self,
        features: Tensor,
        labels: Tensor,
        sizes: Sequence[int],
        num_classes: int,
        second_moment: SecondMoment | None,
    ) -> None:
        self._sizes = list(sizes)
        self._second_moment = second_moment
        num_clients, dimension = len(self._sizes), features.shape[1]
        owners = torch.arange(num_clients).repeat_interleave(torch.tensor(self._sizes)).to(labels)
        cells = owners * num_classes + labels
        counts = torch.bincount(cells, minlength=num_clients * num_classes)
        sums = features.new_zeros(num_clients * num_classes, dimension)
        sums.index_add_(0, cells, features)
        self._rows = features
        if second_moment == "within":
            self._rows = features - (sums / counts.clamp(min=1).unsqueeze(1))[cells]
        self._small: Tensors = {
            "counts": counts.view(num_clients, num_classes).to(features.dtype),
            "sums": sums.view(num_clients, num_classes, dimension),
        }
        if second_moment == "within":
            self._small["scatter"] = self._scatters(counts.view(num_clients, num_classes))

    def __len__(self) -> int:
        return len(self._sizes)

    def member(self, index: int) -> "MemberSums":
        """Return one client's sums."""
        return MemberSums(self, index)

    @property
    def names(self) -> list[str]:
        """Return what each client sends."""
        return [*self._small, *([self._second_moment] if self._second_moment else [])]

    def tensor(self, name: str, index: int) -> Tensor:
        """Return one tensor of one client, written out."""
        if name != self._second_moment:
            return self._small[name][index]
        rows = torch.split(self._rows, self._sizes)[index]
        return pack_symmetric(rows.T @ rows)

    def total(self, members: Sequence[int]) -> Tensors:
        """Return the sums over some clients, in float64."""
        chosen = torch.tensor(members, device=self._rows.device)
        total = {n: v[chosen].sum(0, dtype=torch.float64) for n, v in self._small.items()}
        if self._second_moment:
            rows = self._rows
            if len(members) < len(self):
                parts = torch.split(rows, self._sizes)
                rows = torch.cat([parts[index] for index in members])
            total[self._second_moment] = pack_symmetric(rows.T @ rows).double()
        return total

    @cached_property
    def is_finite(self) -> list[bool]:
        """Whether all numbers of each client are: a sum of squares is only then."""
        squares = self._rows.square().sum(1, dtype=torch.float64)
        return [bool(part.sum().isfinite()) for part in torch.split(squares, self._sizes)]

    @cached_property
    def template(self) -> Tensors:
        """Return tensors of the shapes and types of what one client sends; values mean nothing."""
        shapes = {name: value[0] for name, value in self._small.items()}
        if self._second_moment:
            size = packed_size(self._rows.shape[1])
            shapes[self._second_moment] = self._rows.new_empty(1).expand(size)
        return shapes

    def _scatters(self, counts: Tensor) -> Tensor:
        """Return |W_i|² / f_i of each client, by whichever of X X' and X'X is smaller."""
        degrees = (counts.sum(1) - (counts > 0).sum(1)).clamp(min=1)
        squares = []
        for rows in torch.split(self._rows, self._sizes):
            product = rows @ rows.T if len(rows) <= rows.shape[1] else rows.T @ rows
            squares.append(product.square().sum(dtype=torch.float64))
        return (torch.stack(squares) / degrees).to(self._rows.dtype)


class MemberSums(Mapping[str, Tensor]):
    """One client's sums out of a stack. It never leaves the process that made it."""

    def __init__(self, stack: StackedSums, index: int) -> None:
        self.stack = stack
        self.index = index

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.stack.names:
            raise KeyError(name)
        return self.stack.tensor(name, self.index)

    def __iter__(self) -> Iterator[str]:
        return iter(self.stack.names)

    def __len__(self) -> int:
        return len(self.stack.names)
