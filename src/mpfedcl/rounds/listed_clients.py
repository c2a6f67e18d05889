"""Which clients a record lists by name: all of few, of many those that took part in the round."""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from mpfedcl.rounds.fairness import Fairness, measure_fairness

MOST_LISTED = 1000
"""Clients up to which a record has a row for each, whether or not it took part."""


class AccuracySpread(Fairness):
    """Accuracies of many clients, of whom not all are listed."""

    quartiles: Annotated[list[float], Field(min_length=3, max_length=3)]
    """Below the first are a quarter of the clients; the second is the median."""


class ListedAccuracies(NamedTuple):
    """What a record says of clients' accuracies."""

    rows: dict[str, float | None] | None
    """By client; None where nothing was read."""
    spread: AccuracySpread | None
    """Of all that were read, where not all clients have a row."""


NOT_READ = ListedAccuracies(None, None)


def list_accuracies(
    accuracies: Mapping[str, float | None], took_part: Collection[str]
) -> ListedAccuracies:
    """Return rows of all clients, or, of many, of those that took part and were read.

    Example:
        >>> many = {f"client-{number}": number / 20 for number in range(2000)}
        >>> listed = list_accuracies(many, ["client-7", "client-9"])
        >>> listed.rows, listed.spread.quartiles, listed.spread.clients
        ({'client-7': 0.35, 'client-9': 0.45}, [24.9875, 49.975, 74.9625], 2000)
    """
    if len(accuracies) <= MOST_LISTED:
        return ListedAccuracies(dict(accuracies), None)
    present = set(took_part)
    rows: dict[str, float | None] = {
        name: each for name, each in accuracies.items() if each is not None and name in present
    }
    fairness = measure_fairness(accuracies.values())
    if fairness is None:
        return ListedAccuracies(rows, None)
    known = sorted(each for each in accuracies.values() if each is not None)
    quartiles = [_quantile(known, share) for share in (0.25, 0.5, 0.75)]
    return ListedAccuracies(rows, AccuracySpread(**dict(fairness), quartiles=quartiles))


def mean_accuracy(record: Mapping[str, Any]) -> float | None:
    """Return the mean over the clients that a record tells of; None where nobody was read."""
    if (spread := record.get("accuracy_spread")) is not None:
        return float(spread["mean"])
    known = [each for each in (record["accuracy_per_client"] or {}).values() if each is not None]
    return sum(known) / len(known) if known else None


def _quantile(ascending: list[float], share: float) -> float:
    """Return the number below which is a share of others, between two in proportion."""
    place = share * (len(ascending) - 1)
    below = int(place)
    above = min(below + 1, len(ascending) - 1)
    return round(ascending[below] + (place - below) * (ascending[above] - ascending[below]), 4)
