"""Successive halving: which settings get more rounds, and which are chosen in the end."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_SHARES = (4, 2, 1)
"""A quarter of the rounds with all settings, half of them with half, all with a quarter."""

Scores = Mapping[int, float | None]
"""Accuracy in % by the number of the settings; None where a run has none, which is the worst."""


@dataclass(frozen=True)
class Rung:
    """This many settings are run up to this round; the defaults are run to the end in any case."""

    rounds: int
    settings: int


def plan_rungs(rounds: int, num_settings: int) -> tuple[Rung, ...]:
    """Return the rungs of a search; runs of a few rounds have fewer."""
    rungs: dict[int, Rung] = {}
    for share, kept in zip(_SHARES, reversed(_SHARES), strict=True):
        up_to = math.ceil(rounds / share)
        rungs.setdefault(up_to, Rung(up_to, math.ceil(num_settings / kept)))
    return tuple(rungs.values())


def keep_best(scores: Scores, count: int) -> list[int]:
    """Return the `count` best, and the defaults (number 0), by number; of equals the first."""
    ranked = sorted(scores, key=lambda n: (scores[n] is None, -(scores[n] or 0.0), n))
    return sorted({*ranked[:count], *(number for number in scores if number == 0)})


def choose_settings(
    scores: Scores, num_changes: Sequence[int], error: float
) -> tuple[int, list[int]]:
    """Return the settings chosen, and all that are within `error` of the best.

    Among those within it the choice falls on the fewest changes to the defaults, then the best
    score: a difference that may be luck is no reason to change anything.
    """
    known = {number: score for number, score in scores.items() if score is not None}
    if not known:
        return 0, []
    # A rounding must not part equals.
    limit = max(known.values()) - error - 1e-9
    within = sorted(number for number, score in known.items() if score >= limit)
    chosen = min(within, key=lambda number: (num_changes[number], -known[number], number))
    return chosen, within


def standard_error(score: float, test_sizes: Sequence[Sequence[int]], *, shared: bool) -> float:
    """Return the standard error of a score in %, from how many images each client is tested on.

    `test_sizes` has a list per seed. Where the test is shared all clients see the same images, so
    they count once; else a score is a mean over clients, and small tests make it unsure.
    """
    variances = []
    for sizes in test_sizes:
        known = [size for size in sizes if size > 0]
        if shared:
            variances.append(1 / max(known))
        else:
            variances.append(sum(1 / size for size in known) / len(known) ** 2)
    share = score / 100
    return 100 * math.sqrt(share * (1 - share) * sum(variances)) / len(variances)
