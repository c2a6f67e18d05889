"""What stands beside a run's headline: which clients it is the mean of, and whose models."""

from collections.abc import Collection, Mapping
from typing import Any

from mpfedcl.report.tables import PREDICTOR_TITLES, percent

_MOST_NAMES = 5


def describe_mean(
    accuracies: Mapping[str, float | None] | None,
    clients: Collection[str],
    spread: Mapping[str, Any] | None = None,
) -> str:
    """Say of which clients the headline is the mean; `clients` are all of the run.

    `spread` is of those that were read, where not all are listed.
    """
    if spread is not None:
        return _describe_many(spread["clients"], len(clients))
    found = accuracies or {}
    left_out = [name for name in sorted({*clients, *found}) if found.get(name) is None]
    if not left_out:
        return "mean over clients"
    total = len({*clients, *found})
    more = len(left_out) - _MOST_NAMES
    names = ", ".join(left_out[:_MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")
    return f"mean over {total - len(left_out):,} of {total:,} clients (not read: {names})"


def _describe_many(read: int, total: int) -> str:
    if read >= total:
        return "mean over clients"
    return f"mean over {read:,} of {total:,} clients (the others were not read)"


def describe_server_model(
    predictors: Mapping[Any, Mapping[Any, float | None]], judged: Mapping[Any, str]
) -> list[str]:
    """Say of a run over a network what its server's model reaches, where clients' own are judged.

    `judged` is the predictor that the method is judged by on each test.
    """
    if not str(judged.get("local_test")).startswith("personal"):
        return []
    stay = (
        "The headline is of the clients' own models, which stay with the clients: there, "
        "mpfedcl predict DIR/clients/NAME IMAGES uses them."
    )
    predictor = str(judged.get("global_test"))
    value = predictors.get("local_test", {}).get(predictor)
    if not predictor.startswith("global") or value is None:
        return [stay, "The server has no model that could be used without theirs."]
    return [
        f"The server's model reaches {percent(value)} % on the same tests "
        f"({PREDICTOR_TITLES[predictor]}).",
        stay,
    ]
