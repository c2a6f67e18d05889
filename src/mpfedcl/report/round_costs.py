"""What the rounds up to a round have cost, so that curves can be drawn over it."""

from collections.abc import Iterable, Sequence
from itertools import accumulate

from mpfedcl.core.json_files import Json
from mpfedcl.report.number_formatting import finite_values, mean, round_significant
from mpfedcl.report.run_description import RunRecords


def describe_round_costs(runs: Sequence[RunRecords], rounds: Iterable[int]) -> Json:
    """Return the megabytes and virtual seconds by the end of some rounds: the mean over runs.

    Virtual seconds are left out where a run has no clock.
    """
    chosen = sorted(rounds)
    several = {
        "megabytes": [_sum_megabytes(run) for run in runs],
        "virtual_seconds": [
            {line.round: line.virtual_seconds for line in run.rounds} for run in runs
        ],
    }
    found: Json = {"round": chosen}
    for name, costs in several.items():
        values = [finite_values([each.get(number) for each in costs]) for number in chosen]
        if all(len(each) == len(runs) for each in values):
            found[name] = [round_significant(mean(each), 5) for each in values]
    return found


def _sum_megabytes(run: RunRecords) -> dict[int, float | None]:
    totals = accumulate(sum(line.bytes.values()) / 1e6 for line in run.rounds)
    return {line.round: total for line, total in zip(run.rounds, totals, strict=True)}
