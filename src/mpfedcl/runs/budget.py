"""How many rounds a privacy budget covers: a run ends before it would be exceeded."""

import re
from collections.abc import Callable
from pathlib import Path

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.methods import SharesPrototypes, find_method
from mpfedcl.privacy.accounting import spent_epsilon
from mpfedcl.privacy.ledger import FOLDER, read_ledger
from mpfedcl.privacy.releases import planned_releases

_SLACK = 1 + 1e-6


def limit_rounds(
    experiment: Experiment, warn: Callable[[str], None], run: Path | None = None
) -> Experiment:
    """Return an experiment with no more rounds than its budget covers.

    Args:
        experiment: Resolved.
        warn: Told where rounds are left out.
        run: The folder of a run that is resumed: what it has spent is spent.
    """
    settings, method = experiment.privacy, find_method(experiment.method)
    ledger = read_ledger(run) if run is not None else None
    if settings.epsilon is None or not method.trains or (ledger is None and settings.noise is None):
        # Noise is made for as many rounds as there are.
        return experiment
    multiplier = settings.noise if ledger is None else ledger.multiplier
    spent = {} if ledger is None else ledger.releases
    delta = settings.delta if ledger is None else ledger.delta
    epsilon = settings.epsilon if ledger is None else ledger.epsilon
    sampling = experiment.fraction if ledger is None else ledger.sampling
    assert multiplier is not None
    done = 0 if run is None else _last_release(run)

    def costs(rounds: int) -> float:
        planned = planned_releases(
            experiment.replace(rounds=rounds),
            shares_prototypes=isinstance(method, SharesPrototypes),
            first=done + 1,
        )
        releases = dict(spent)
        for sensitivity, count in planned.items():
            kind = multiplier / sensitivity
            releases[kind] = releases.get(kind, 0) + count
        return spent_epsilon(releases, delta, sampling=sampling)

    if costs(experiment.rounds) <= epsilon * _SLACK:
        return experiment
    low, high = done, experiment.rounds
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if costs(middle) <= epsilon * _SLACK else (low, middle)
    if low == 0 or low <= _last_checkpoint(run):
        raise InvalidInput(
            f"privacy.epsilon is {epsilon:g}; {costs(done) if done else 0:.3f} is spent after "
            f"{done} rounds, and it does not cover another: rounds must stay at {done}, or "
            "privacy.noise be more."
        )
    warn(
        f"The privacy budget covers {low} of {experiment.rounds} rounds; the run ends after round "
        f"{low}."
    )
    return experiment.replace(rounds=low)


def _last_release(run: Path) -> int:
    """Return the last round that has released something."""
    return _last_number(run / FOLDER, r"release-(\d+)-.*")


def _last_checkpoint(run: Path | None) -> int:
    return 0 if run is None else _last_number(run / "checkpoint", r"round-(\d+)\.json")


def _last_number(folder: Path, pattern: str) -> int:
    found = [re.fullmatch(pattern, path.name) for path in folder.glob("*")]
    return max((int(each[1]) for each in found if each), default=0)
