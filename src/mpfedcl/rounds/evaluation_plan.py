"""How often a run is evaluated, and how many personal models, so that it stays a small part of it.

By a count of the work alone, never by seconds: the same experiment is evaluated in the same rounds
on every machine.
"""

from dataclasses import dataclass
from itertools import count

from torch import Tensor

from mpfedcl.experiment import Experiment
from mpfedcl.methods import TESTS, Method, prototype_rule
from mpfedcl.rounds.evaluation import WantedPredictors, wanted_predictors

MANY_CLIENTS = 1000
"""Of a population with more, not all personal models are read."""
SOME_CLIENTS, FEWEST_CLIENTS = 100, 10
"""How many are then read at most, and at least where their reading is dear."""
_STEP = 1.5
"""Multiplications of training, in small batches, take so many times as long as those of predictor."""


@dataclass(frozen=True)
class Workload:
    """The sizes that the work of a run depends on."""

    num_clients: int
    train_samples: int
    """Of all clients together."""
    test_images: int
    """Of the union of all tests."""
    own_images: int
    """Of all clients' local test sets, added up."""
    parameters: int
    """Multiplications of a sample's way through the model, about."""
    prototype_numbers: int
    """Of the pool: multiplications that compare one embedding with it."""

    @classmethod
    def of(
        cls,
        method: Method,
        label_counts: Tensor,
        tests: tuple[int, int],
        parameters: int,
        width: int,
    ) -> "Workload":
        """Count; `label_counts` are [N, C], `tests` images of the union and of local test sets."""
        settings = method.experiment.prototypes
        held = int((label_counts > 0).sum()) * (prototype_rule(method).num_prototypes or 1)
        most = held if settings.pool_size is None else settings.pool_size * label_counts.shape[1]
        total = int(label_counts.sum())
        return cls(len(label_counts), total, *tests, parameters, min(held, most) * width)

    def taking_part(self, experiment: Experiment) -> int:
        """Return the clients of a round."""
        drawn = max(experiment.min_clients, round(experiment.fraction * self.num_clients))
        return min(self.num_clients, drawn)

    def training(self, method: Method) -> float:
        """Return the work of a round's training: forward, and twice as much backward."""
        share = self.taking_part(method.experiment) / max(1, self.num_clients)
        passes = 3 * method.local_training(1).passes if method.trains else 1
        return _STEP * passes * share * self.train_samples * self.parameters

    def predictor(self, method: Method, wanted: WantedPredictors) -> float:
        """Return the work of an evaluation: which models read how many images, and how."""
        experiment = method.experiment
        part = self.taking_part(experiment)
        read = min(part, experiment.evaluate_clients or part)
        is_shared = self.own_images >= self.num_clients * self.test_images
        personal = {t: [r for r in wanted[t] if r.startswith("personal")] for t in TESTS}
        images = 0.0
        if personal["global_test"] or (personal["local_test"] and is_shared):
            images = read * self.test_images
        elif personal["local_test"]:
            images = read * self.own_images / max(1, self.num_clients)
        work = images * self._image(any("prototype" in r for t in TESTS for r in personal[t]))
        averaged = [r for t in TESTS for r in wanted[t] if r.startswith("global")]
        if averaged:
            work += self.test_images * self._image(any("prototype" in r for r in averaged))
        return work

    def _image(self, compares: bool) -> int:
        return self.parameters + (self.prototype_numbers if compares else 0)


def settle_evaluation(experiment: Experiment, method: Method, work: Workload) -> Experiment:
    """Return the experiment with what it leaves open about its evaluation filled in."""
    if experiment.evaluate_clients is None and work.num_clients > MANY_CLIENTS:
        experiment = experiment.replace(evaluate_clients=_choose_clients(method, work))
        method = type(method)(experiment, method.num_classes)
    if experiment.evaluate_every != "auto":
        return experiment
    between = work.predictor(method, wanted_predictors(method, is_complete=False))
    last = work.predictor(method, wanted_predictors(method, is_complete=True))
    every = choose_spacing(experiment.rounds, work.training(method), between, last)
    return experiment.replace(evaluate_every=every)


def _choose_clients(method: Method, work: Workload) -> int | None:
    """Return how many personal models the last round reads in a fifth of the run's work."""
    part = work.taking_part(method.experiment)
    wanted = wanted_predictors(method, is_complete=True)
    one, two = (
        work.predictor(type(method)(method.experiment.replace(evaluate_clients=n), 1), wanted)
        for n in (1, 2)
    )
    left = method.experiment.rounds * work.training(method) / 4 - (one - (two - one))
    affordable = int(left / max(1.0, two - one))
    chosen = min(SOME_CLIENTS, max(FEWEST_CLIENTS, affordable))
    return None if chosen >= part else chosen


def choose_spacing(rounds: int, training: float, between: float, last: float) -> int:
    """Return the least of 1, 2, 3, 5, 10, 20, ... rounds between evaluations that is cheap enough.

    All evaluations together are at most a fifth of the run's work, which is a quarter of its
    training. Where the last one alone takes (nearly) that much, the others get a twentieth of the
    training, so that a short run is seen on its way if that costs little.

    Args:
        rounds: Rounds of the run.
        training: Work of a round.
        between: Work of an evaluation before the last round.
        last: Work of the last round's, which reads everything.

    Example:
        >>> choose_spacing(60, training=9.0, between=10.0, last=60.0)
        10
        >>> choose_spacing(60, training=1.0, between=10.0, last=60.0)
        60
    """
    budget = max(rounds * training / 4 - last, rounds * training / 20)
    for power in count():
        for digit in (1, 2, 3, 5):
            every: int = digit * 10**power
            if every >= rounds:
                return rounds
            if (rounds - 1) // every * between <= budget:
                return every
    raise AssertionError("a spacing is found before numbers end")
