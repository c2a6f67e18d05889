"""The vector that a client adds to a secure sum, with its share of a privacy budget's noise.

The server cannot add noise, because it must not see the sum without it. Each client adds noise of
standard deviation sigma / sqrt(h) before masking, where h is the number of honest clients that
every sum is assumed to contain (`secure.honest_clients`). The number of clients that the server
shows does not matter: it could invent them. Variances add up, so the noise that h honest clients
add has a standard deviation of sigma, and the rest of the sum cannot reduce it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors, take_group
from mpfedcl.experiment import Experiment
from mpfedcl.gaussian.mechanism import draw_noise, share_sigma
from mpfedcl.methods import CollectsStatistics, Method, OneShot, find_method
from mpfedcl.methods.messages import Total, Update
from mpfedcl.privacy.accounting import calibrate_multiplier, spent_epsilon
from mpfedcl.privacy.private_rounds import MODEL_CLIP, ROUNDING
from mpfedcl.privacy.secure_aggregation import check_honest_clients
from mpfedcl.privacy.secure_aggregation.primitives import Ring, decode, encode, is_possible

if TYPE_CHECKING:
    from mpfedcl.rounds.assembly import Assembly

_SLACK = 1 + 1e-6


def fix_noise(experiment: Experiment) -> Experiment:
    """Return the experiment with `privacy.noise` set, if clients must know it.

    The noise stays fixed when the run is resumed with another number of rounds.
    """
    settings, method = experiment.privacy, find_method(experiment.method)
    if not (experiment.secure_aggregation and settings.epsilon and method.trains) or settings.noise:
        return experiment
    noise = calibrate_multiplier(settings.epsilon, settings.delta, experiment.rounds)
    return experiment.replace(privacy__noise=noise)


class NoiseShares:
    """One client's shares of the noise, with a privacy budget and secure aggregation."""

    def __init__(self, method: Method) -> None:
        self._method = method
        self._settings = method.experiment.privacy
        self._secure = method.experiment.secure

    def check(self, num_clients: int) -> None:
        """Reject noise that exceeds the budget: clients verify the server's request."""
        check_honest_clients(self._secure, num_clients)
        epsilon, noise = self._settings.epsilon, self._settings.noise
        if epsilon is None or not self._method.trains:
            return
        rounds = self._method.experiment.rounds
        if noise is None or spent_epsilon({noise: rounds}, self._settings.delta) > epsilon * _SLACK:
            raise InvalidInput(
                f"privacy.noise is {noise}; with secure_aggregation it must be large enough that "
                f"{rounds} rounds cost at most privacy.epsilon, {epsilon:g}."
            )

    def on_sums(self, summed: Tensors) -> Tensors:
        """Return a client's one-shot statistics with its share of the noise."""
        assert isinstance(self._method, OneShot)
        mechanism = self._method.private_sums
        assert mechanism is not None
        sigma = share_sigma(mechanism.sigma, self._secure.honest_clients)
        return mechanism.with_share(sigma).add_noise(summed)

    def on_model(self, value: Tensor) -> Tensor:
        """Return a tensor of a client's model with its share of the noise, in float64."""
        assert self._settings.noise is not None
        sigma = self._settings.noise * (self._settings.clip or MODEL_CLIP) * (1 + ROUNDING)
        share = share_sigma(sigma, self._secure.honest_clients)
        return value.double() + draw_noise(share, value.shape).to(value.device)

    def in_sum(self, num_left: int) -> Tensor:
        """Return the variance of the noise in a sum relative to sigma²: at least 1."""
        return torch.tensor(num_left / self._secure.honest_clients, dtype=torch.float64)


class SumLayout:
    """The names, shapes and order of the values, the same on the server and on every client.

    A client adds w_i x_i and w_i, with w_i = n_i its number of samples, its statistics, n_i and
    n_i loss_i. Under a privacy budget all weights are 1, n_i and losses are left out, and the other
    values have the client's share of the noise.
    """

    def __init__(self, assembly: "Assembly") -> None:
        self._method, self._device = assembly.method, assembly.device
        self._noise = NoiseShares(self._method) if assembly.experiment.privacy.has_budget else None
        tensors = {
            **{f"averaged/{name}": value.double() for name, value in assembly.template.items()},
            **_name_sums(self._totals_of(assembly.sums)),
            **_scalars(0.0, 0, 0.0),
        }
        self._tensors = {name: tensors[name] for name in sorted(tensors)}
        self.size = sum(value.numel() for value in self._tensors.values())

    def encode(self, update: Update, num_clients: int) -> Ring:
        """Return a client's values as integers; raise OutOfRange for values that are too large."""
        written, noise = update.written_out(), self._noise
        assert isinstance(written.averaged, dict | None)
        # A client that withholds its update has the weight 0.
        averaged = {n: value.detach() for n, value in (written.averaged or {}).items()}
        statistics = self._totals_of(written.summed)
        if noise is None:
            size, loss = update.num_samples, update.num_samples * (update.loss or 0.0)
            weight = 0.0 if written.averaged is None else float(size)
            averaged = {n: weight * value.double() for n, value in averaged.items()}
        else:
            noise.check(num_clients)
            size, loss, weight = 1, 0.0, 0.0 if written.averaged is None else 1.0
            averaged = {n: noise.on_model(value) for n, value in averaged.items()}
            statistics = noise.on_sums(statistics) if statistics else {}
        own = {
            **{f"averaged/{name}": value for name, value in averaged.items()},
            **_name_sums(statistics),
            **_scalars(weight, size, loss),
        }
        values = {name: own.get(name, torch.zeros_like(e)) for name, e in self._tensors.items()}
        return numpy.concatenate(
            [encode(n, v.detach().cpu().numpy(), num_clients) for n, v in values.items()]
        )

    def _totals_of(self, summed: Mapping[str, Tensor]) -> Tensors:
        method = self._method
        return method.totals_of(summed) if isinstance(method, CollectsStatistics) else {}

    def total(self, opened: Ring, clients: list[str], num_bytes: int) -> Total:
        """Return the opened total of `clients`."""
        found: Tensors = {}
        ends = numpy.cumsum([like.numel() for like in self._tensors.values()])
        parts = numpy.split(opened, ends[:-1])
        for (name, like), part in zip(self._tensors.items(), parts, strict=True):
            values = decode(part, is_whole=not like.is_floating_point())
            found[name] = torch.from_numpy(values).view(like.shape).to(self._device)
        return Total(
            tuple(sorted(clients)),
            weight=float(found["weight"]),
            averaged=take_group(found, "averaged/"),
            summed=take_group(found, "summed/"),
            num_samples=int(found["samples"]),
            loss=float(found["loss"]),
            is_possible=is_possible(opened),
            num_parameters=self.size,
            num_bytes=num_bytes,
            noise=None if self._noise is None else self._noise.in_sum(len(clients)),
        )


def _scalars(weight: float, num_samples: int, loss: float) -> Tensors:
    """Return the scalars that clients of every method add."""
    return {
        "weight": torch.tensor(weight, dtype=torch.float64),
        "samples": torch.tensor(num_samples),
        "loss": torch.tensor(loss, dtype=torch.float64),
    }


def _name_sums(tensors: Tensors) -> Tensors:
    return {
        f"summed/{name}": value.double() if value.is_floating_point() else value.long()
        for name, value in tensors.items()
    }
