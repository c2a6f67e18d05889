"""Which numbers a client adds to a secure sum in a round, and what their sums mean."""

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from mpfedcl.core.tensors import Tensors
from mpfedcl.methods import CollectsStatistics
from mpfedcl.methods.messages import Total, Update
from mpfedcl.privacy.secure_aggregation.fixed_point import Ring, decode, encode, is_possible
from mpfedcl.rounds.assembly import Assembly
from mpfedcl.rounds.noise_shares import NoiseShares


class SumLayout:
    """Names, shapes and order of the numbers: the same at the server and at every client.

    A client adds w_i x_i and w_i, with w_i = n_i its number of samples, what its method collects,
    n_i and n_i loss_i. Under a privacy budget all clients weigh 1, neither n_i nor a loss is told,
    and the rest has the client's share of the noise.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._method, self._device = assembly.method, assembly.device
        self._noise = NoiseShares(self._method) if assembly.experiment.privacy.has_budget else None
        averaged = assembly.template
        tensors = {
            **{f"averaged/{name}": value.double() for name, value in averaged.items()},
            **_named("summed", self._totals_of(assembly.sums)),
            **_numbers(0.0, 0, 0.0),
        }
        self._tensors = {name: tensors[name] for name in sorted(tensors)}
        self.size = sum(value.numel() for value in self._tensors.values())

    def encode(self, update: Update, num_clients: int) -> Ring:
        """Return a client's numbers, one of so many; what is out of range is refused."""
        written = update.written_out()
        assert isinstance(written.averaged, dict | None)
        own = (
            self._bare_numbers(update, written.averaged, written.summed)
            if self._noise is None
            else self._noisy_numbers(self._noise, written.averaged, written.summed, num_clients)
        )
        parts = [
            # A client that withholds its update adds zeros.
            encode(name, _to_numpy(own.get(name, torch.zeros_like(like))), num_clients)
            for name, like in self._tensors.items()
        ]
        return numpy.concatenate(parts)

    def _totals_of(self, summed: Mapping[str, torch.Tensor]) -> Tensors:
        method = self._method
        return method.totals_of(summed) if isinstance(method, CollectsStatistics) else {}

    def _bare_numbers(
        self, update: Update, averaged: Tensors | None, summed: Mapping[str, torch.Tensor]
    ) -> Tensors:
        weight = 0.0 if averaged is None else float(update.num_samples)
        loss = 0.0 if update.loss is None else update.num_samples * update.loss
        models = {
            f"averaged/{name}": weight * value.detach().double()
            for name, value in (averaged or {}).items()
        }
        sums = _named("summed", self._totals_of(summed))
        return {**models, **sums, **_numbers(weight, update.num_samples, loss)}

    def _noisy_numbers(
        self,
        noise: NoiseShares,
        averaged: Tensors | None,
        summed: Mapping[str, torch.Tensor],
        num_clients: int,
    ) -> Tensors:
        noise.check()
        models = {
            f"averaged/{name}": noise.on_model(value.detach(), num_clients)
            for name, value in (averaged or {}).items()
        }
        sums = self._totals_of(summed)
        noisy = _named("summed", noise.on_sums(sums, num_clients)) if sums else {}
        return {**models, **noisy, **_numbers(0.0 if averaged is None else 1.0, 1, 0.0)}

    def total(self, numbers: Ring, clients: list[str], of: int, num_bytes: int) -> Total:
        """Return what the sum of some clients' numbers says, `of` those who took part."""
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
            noise=None if self._noise is None else self._noise.in_sum(len(clients), of),
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
