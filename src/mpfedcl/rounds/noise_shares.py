"""A privacy budget in a secure sum: each client adds its share of the noise before it masks.

No server adds noise, because none may see the bare sum. A share is sigma / sqrt(t), with t the
clients that must be left to open the sum: as shares add up in their squares, the sum of those who
are left has noise of sigma or more.
"""

import torch
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.methods import Method, OneShot, find_method
from mpfedcl.privacy.accounting import calibrate_multiplier, spent_epsilon
from mpfedcl.privacy.noise import draw_noise, share_sigma
from mpfedcl.privacy.secure_aggregation import least_left
from mpfedcl.rounds.budget_check import planned_releases
from mpfedcl.rounds.processors.clip import MODEL_CLIP, ROUNDING

_SLACK = 1 + 1e-6


def fix_noise(experiment: Experiment) -> Experiment:
    """Return the experiment with the noise of its rounds fixed, where clients must know it.

    It stays what it is when the run is resumed, however many rounds are asked for then.
    """
    settings, method = experiment.privacy, find_method(experiment.method)
    if not (experiment.secure_aggregation and settings.epsilon and method.trains) or settings.noise:
        return experiment
    planned = planned_releases(experiment, shares_prototypes=False)
    return experiment.replace(
        privacy__noise=calibrate_multiplier(settings.epsilon, settings.delta, planned)
    )


class NoiseShares:
    """One client's shares of the noise.

    Args:
        method: With a budget, and secure aggregation.
    """

    def __init__(self, method: Method) -> None:
        self._method = method
        self._settings = method.experiment.privacy
        self._share = method.experiment.secure.threshold

    def check(self) -> None:
        """Refuse noise that does not keep the budget: clients look at what the server asks for."""
        epsilon, noise = self._settings.epsilon, self._settings.noise
        if epsilon is None or not self._method.trains:
            return
        rounds = self._method.experiment.rounds
        if noise is None or spent_epsilon({noise: rounds}, self._settings.delta) > epsilon * _SLACK:
            raise InvalidInput(
                f"privacy.noise is {noise}; with secure_aggregation it must be so much that {rounds} "
                f"rounds cost at most privacy.epsilon, {epsilon:g}."
            )

    def on_sums(self, summed: Tensors, num_clients: int) -> Tensors:
        """Return a client's sums of one exchange with its share of the noise."""
        assert isinstance(self._method, OneShot)
        mechanism = self._method.private_sums
        assert mechanism is not None
        sigma = share_sigma(mechanism.sigma, least_left(num_clients, self._share))
        return mechanism.with_share(sigma).add_noise(summed)

    def on_model(self, value: Tensor, num_clients: int) -> Tensor:
        """Return a tensor of a client's model with its share of the noise, in float64."""
        assert self._settings.noise is not None
        sigma = self._settings.noise * (self._settings.clip or MODEL_CLIP) * (1 + ROUNDING)
        share = share_sigma(sigma, least_left(num_clients, self._share))
        return value.double() + draw_noise(share, value.shape).to(value.device)

    def in_sum(self, num_left: int, num_clients: int) -> Tensor:
        """Return how many times sigma² the variance of the noise in a sum is: at least 1."""
        return torch.tensor(num_left / least_left(num_clients, self._share), dtype=torch.float64)
