"""What one client shares about its data: a few vectors a class."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Prototypes:
    """One client's prototypes, sorted by class.

    Within a class the prototype that stands for most samples comes first; equal counts are ordered
    by the lowest index among the samples they stand for.
    """

    vectors: Tensor
    """[M, d] the prototypes."""
    labels: Tensor
    """[M] int64, the class of each."""
    counts: Tensor
    """[M] int64, how many samples each stands for."""

    def __post_init__(self) -> None:
        if self.vectors.dim() != 2:
            raise ValueError(
                f"prototype vectors have shape {tuple(self.vectors.shape)}; they must be [M, d]."
            )
        for name, column in (("labels", self.labels), ("counts", self.counts)):
            if column.shape != self.vectors.shape[:1] or column.dtype != torch.int64:
                raise ValueError(
                    f"prototype {name} are {column.dtype} of shape {tuple(column.shape)}; "
                    f"{len(self.vectors)} vectors need int64 of shape [{len(self.vectors)}]."
                )

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def dimension(self) -> int:
        """d, the length of a vector."""
        return self.vectors.shape[1]

    def to(self, device: torch.device | str) -> Self:
        """Return the prototypes on another device."""
        return type(self)(self.vectors.to(device), self.labels.to(device), self.counts.to(device))

    @classmethod
    def empty(
        cls,
        dimension: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Return no prototypes, of a known dimension."""
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return cls(torch.zeros(0, dimension, dtype=dtype, device=device), none, none.clone())
