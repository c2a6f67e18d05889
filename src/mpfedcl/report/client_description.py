"""What a page says of a run's clients: of many, the lowest and how all are spread."""

from mpfedcl.core.json_files import Json
from mpfedcl.report.number_formatting import choose_evenly, rounded
from mpfedcl.rounds.fairness import Fairness, measure_fairness
from mpfedcl.rounds.record import RoundRecord
from mpfedcl.runs.run_files import Partition

_MOST_CLIENTS = 1000
"""Clients of a run that a page knows by name."""
_MOST_HOLDINGS = 200
"""Clients of whom it tells what they hold, where there are more than it names."""


def describe_clients(partition: Partition | None, last: RoundRecord | None) -> list[Json]:
    """Return clients' accuracy on their local test sets in a round, and how much data each has."""
    accuracy = (last.accuracy_per_client if last else None) or {}
    holdings = partition.clients if partition else {}
    names = list(holdings) or list(accuracy)
    if len(names) > _MOST_CLIENTS:
        # Those that were read, the worst first: they are what one looks for.
        read = sorted((value, name) for name, value in accuracy.items() if value is not None)
        listed = {name for _, name in read[:_MOST_CLIENTS]}
        names = [name for name in names if name in listed]
    return [
        {
            "name": name,
            "accuracy": rounded(accuracy.get(name)),
            "train": sum(holdings[name].train) if name in holdings else None,
            "test": holdings[name].test if name in holdings else None,
        }
        for name in names
    ]


def measure_spread(last: RoundRecord | None) -> Fairness | None:
    """Return how accuracy is spread over all clients that were read in a round, listed or not."""
    if last is None:
        return None
    values = (last.accuracy_per_client or {}).values()
    return last.accuracy_spread or measure_fairness(rounded(each) for each in values)


def describe_holdings(partition: Partition | None, *, is_told: bool) -> Json:
    """Return what clients hold; `is_told`: it may be shown."""
    if not is_told:
        return {"missing": "Under a privacy budget it is not shown who holds how much."}
    if partition is None:
        return {"missing": "The run has no partition.json, so who holds what is not known."}
    names, count = list(partition.clients), len(partition.clients)
    shown = choose_evenly(count, count if count <= _MOST_CLIENTS else _MOST_HOLDINGS)
    chosen = [(names[place], partition.clients[names[place]]) for place in shown]
    return {
        "classes": partition.classes,
        "clients": [{"name": n, "train": held.train, "test": held.test} for n, held in chosen],
        "left_out": count - len(chosen),
    }
