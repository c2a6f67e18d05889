"""A stack of clients: their parameters are the rows of one tensor."""

import torch
from torch import Tensor


class Stack:
    """A stack of clients with one parameter `w`, as a trainer of several clients returns it."""

    def __init__(self, start: Tensor, rows: list[list[float]]) -> None:
        self.values = torch.tensor(rows, dtype=torch.float64)
        self.template = {"w": self.values[0]}
        self.squared_changes: list[float] = (self.values - start).square().sum(1).tolist()

    def __len__(self) -> int:
        return len(self.values)

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        return {"w": weights @ self.values}

    def tensors(self, index: int) -> dict[str, Tensor]:
        return {"w": self.values[index]}
