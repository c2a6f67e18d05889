"""Which numbers a client adds to a secure sum in a round, and what their sums mean."""

from math import prod
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from mpfedcl.messages import Total, Update
from mpfedcl.rounds.assembly import Assembly
from mpfedcl.secure_sums.fixed_point import Ring, decode, encode, is_possible
from mpfedcl.tensors import Tensors


class SumLayout:
    """Names, shapes and order of the numbers: the same at the server and at every client.

    A client adds w_i x_i and w_i, with w_i = n_i its number of samples, what its method collects,
    n_i and n_i loss_i.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._method, self._device = assembly.method, assembly.device
        averaged = self._method.template(assembly.initial)
        tensors = {
            **{f"averaged/{name}": value.double() for name, value in averaged.items()},
            **_named("summed", self._method.totals_of(assembly.sums)),
            **_numbers(0.0, 0, 0.0),
        }
        self._tensors = {name: tensors[name] for name in sorted(tensors)}
        self.size = sum(value.numel() for value in self._tensors.values())

    def encode(self, update: Update, num_clients: int) -> Ring:
        """Return a client's numbers, one of so many; what is out of range is refused."""
        written = update.written_out()
        weight = 0.0 if written.averaged is None else float(update.num_samples)
        assert isinstance(written.averaged, dict | None)
        averaged = written.averaged or {}
        loss = 0.0 if update.loss is None else update.num_samples * update.loss
        own = {
            **_named("summed", self._method.totals_of(written.summed)),
            **_numbers(weight, update.num_samples, loss),
        }
        for name, value in averaged.items():
            own[f"averaged/{name}"] = weight * value.detach().double()
        parts = [
            # A client that withholds its update adds zeros.
            encode(name, _to_numpy(own.get(name, torch.zeros_like(like))), num_clients)
            for name, like in self._tensors.items()
        ]
        return numpy.concatenate(parts)

    def total(self, numbers: Ring, clients: list[str], num_bytes: int) -> Total:
        """Return what the sum of some clients' numbers says."""
        found: Tensors = {}
        place = 0
        for name, like in self._tensors.items():
            count = prod(like.shape)
            part = decode(numbers[place : place + count], is_whole=not like.is_floating_point())
            found[name] = torch.from_numpy(part).view(like.shape).to(self._device)
            place += count
        return Total(
            tuple(sorted(clients)),
            weight=float(found["weight"]),
            averaged=_group(found, "averaged"),
            summed=_group(found, "summed"),
            num_samples=int(found["samples"]),
            loss=float(found["loss"]),
            is_possible=is_possible(numbers),
            num_parameters=self.size,
            num_bytes=num_bytes,
        )


def _numbers(weight: float, num_samples: int, loss: float) -> Tensors:
    """Return the numbers that every method's clients add."""
    return {
        "weight": torch.tensor(weight, dtype=torch.float64),
        "samples": torch.tensor(num_samples),
        "loss": torch.tensor(loss, dtype=torch.float64),
    }


def _named(group: str, tensors: Tensors) -> Tensors:
    return {
        f"{group}/{name}": value.double() if value.is_floating_point() else value.long()
        for name, value in tensors.items()
    }


def _group(tensors: Tensors, group: str) -> Tensors:
    prefix = f"{group}/"
    return {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}


def _to_numpy(value: torch.Tensor) -> NDArray[Any]:
    return value.detach().cpu().numpy()
