"""The words of a report: names of predictors and test sets, numbers as text, and sentences."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

import numpy

from mpfedcl.core.errors import enumerate_names
from mpfedcl.core.json_files import Json
from mpfedcl.experiment.names import is_in_percent, metric_title
from mpfedcl.methods import PREDICTORS, PredictorKind
from mpfedcl.rounds.metrics import mean_accuracy
from mpfedcl.studies.statistics import interval_half_width

_PRIORS = {"none": "", "labels": " + prior", "estimated": " + estimated prior"}
_KINDS = {name: PredictorKind.of(name) for name in PREDICTORS}
PREDICTOR_TITLES: dict[str, str] = {
    name: f"{kind.model}, {kind.rule}{_PRIORS[kind.prior]}" for name, kind in _KINDS.items()
}
TEST_TITLES = {"local_test": "local test set", "global_test": "global test set"}
MARKS = {"best": "▲", "within": "≈"}
"""Signs before a number. A star marks the primary metric."""
ONE_TEST = "All clients share one test set."


def describe_round(record: Mapping[str, Any]) -> str:
    """Return the results of a round's record, short enough for a progress bar."""
    found = mean_accuracy(record)
    accuracy = "" if found is None else f"accuracy {found:.1f} %  "
    loss = "" if record["loss"] is None else f"loss {record['loss']:.3f}"
    rejected = (
        f"  {len(record['clients']['rejected'])} rejected" if record["clients"]["rejected"] else ""
    )
    return accuracy + loss + rejected


def printable_name(name: str, longest: int = 80) -> str:
    """Return a name of limited length in which all characters are printable."""
    seen = "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name
    )
    return seen if len(seen) <= longest else f"{seen[: longest - 1]}…"


# Numbers


def choose_evenly(count: int, most: int) -> list[int]:
    """Return at most `most` places of `count`, evenly spread, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [round(place * (count - 1) / (most - 1)) for place in range(most)]


def known_values(values: Iterable[float | None]) -> list[float]:
    """Return the values that are not None."""
    return [value for value in values if value is not None]


def deviation(values: Sequence[float]) -> float | None:
    """Return the standard deviation (ddof 1), None of fewer than two values."""
    return stdev(values) if len(values) > 1 else None


def percent(value: float | None) -> str:
    """Return an accuracy with one decimal, a dash for None."""
    return "-" if value is None else f"{value:.1f}"


def metric_digits(metric: str) -> int:
    """Return how many decimals a metric has in tables."""
    return 1 if is_in_percent(metric) else 3


def metric_value(metric: str, value: float | None) -> str:
    """Return the value of a metric; a dash for None."""
    return "-" if value is None else f"{value:.{metric_digits(metric)}f}"


def name_value(metric: str, value: float | None) -> str:
    """Return a metric with its value in a sentence.

    Example:
        >>> name_value("macro_f1", 71.24), name_value("nll", 0.5), name_value("accuracy", None)
        ('macro F1 71.2 %', 'NLL 0.500', 'accuracy -')
    """
    unit = " %" if is_in_percent(metric) and value is not None else ""
    return f"{metric_title(metric).removesuffix(' in %')} {metric_value(metric, value)}{unit}"


def mean_and_deviation(values: Sequence[float | None], digits: int = 1) -> str:
    """Return mean(std) over seeds; a dash if no seed has a number.

    "✗1" after it: one seed has no number, and the mean is of the others.
    """
    known = known_values(values)
    if not known:
        return "-"
    missing = f"✗{len(values) - len(known)}" if len(known) < len(values) else ""
    spread = "" if len(known) == 1 else f"({deviation(known):.{digits}f})"
    return f"{fmean(known):.{digits}f}{spread}{missing}"


# Test sets


def judged_by(entry: Mapping[str, Any]) -> dict[str, str]:
    """Return the primary predictor on each test set, as a summary names it."""
    return {
        "local_test": entry["predictor"],
        "global_test": entry.get("predictor_global") or entry["predictor"],
    }


def title_tests(groups: Sequence[Json]) -> dict[Any, str]:
    """Return the test sets with their titles: one if all clients of all groups share it."""
    return {"local_test": "test set"} if all(g["shared_test"] for g in groups) else TEST_TITLES


def tests_differ(local: Mapping[Any, Any], union: Mapping[Any, Any]) -> bool:
    """Return whether two test sets gave these accuracies, or one that all clients share."""
    pairs = [(local.get(name), value) for name, value in union.items()]
    # Means over clients of one and the same number are a rounding apart.
    return any(
        a is not None and b is not None and not math.isclose(a, b, abs_tol=1e-6) for a, b in pairs
    )


# Sentences


def name_seeds(seeds: Collection[int]) -> str:
    """Return seeds with their noun."""
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def explain_divergence(diverged: Mapping[str, Iterable[int]]) -> str:
    """Return the runs that diverged, by method and seed; nothing if none did."""
    named = [
        f"{name}, {name_seeds(found)}" for name, seeds in diverged.items() if (found := list(seeds))
    ]
    if not named:
        return ""
    return (
        f"Diverged: {'; '.join(named)}. No update of the last round could be used. If the server "
        "has an earlier model, the number is that model's. ✗1: one seed has no number and is not "
        "in the mean."
    )


def explain_marks(num_seeds: int) -> str:
    """Return the legend of the marks, and what this number of seeds can show."""
    if num_seeds < 2:
        return (
            f"{MARKS['best']} best of one seed. One seed cannot separate a difference from chance."
        )
    reach = interval_half_width(num_seeds)
    wide = ", so few differences are clear" if reach > 1 else ""
    return (
        f"{MARKS['best']} best mean; {MARKS['within']} not clearly behind: 0 is in the 95 % "
        f"interval of the difference, paired by seed. With {num_seeds} seeds the interval reaches "
        f"{reach:.1f} deviations of the difference each way{wide}."
    )


def explain_prior(predictors: Iterable[str]) -> str:
    """Return the meaning of a prior if one of the predictors has one."""
    if all(PredictorKind.of(each).prior == "none" for each in predictors):
        return ""
    return (
        "prior: the client's own label distribution is added to the scores; estimated: this "
        "distribution is estimated from its unlabeled test samples."
    )


def describe_mean(
    accuracies: Mapping[str, float | None] | None,
    clients: Collection[str],
    spread: Mapping[str, Any] | None = None,
) -> str:
    """Return over which clients the primary metric is the mean; `clients` are all of the run.

    `spread` is over the evaluated clients if not all are listed.
    """
    if spread is not None:
        count, total = spread["clients"], len(clients)
        if count >= total:
            return "mean over clients"
        return f"mean over {count:,} of {total:,} clients (the others were not evaluated)"
    found = accuracies or {}
    left_out = [name for name in sorted({*clients, *found}) if found.get(name) is None]
    if not left_out:
        return "mean over clients"
    total = len({*clients, *found})
    names = enumerate_names(left_out)
    return f"mean over {total - len(left_out):,} of {total:,} clients (not evaluated: {names})"


def describe_server_model(
    predictors: Mapping[Any, Mapping[Any, float | None]], judged: Mapping[Any, str]
) -> list[str]:
    """Return the accuracy of the server's model if the primary metric is of personalized models.

    `judged` is the primary predictor on each test set.
    """
    if PredictorKind.of(judged["local_test"]).model != "personal":
        return []
    stay = (
        "The primary metric is of the personalized models, which stay with the clients: there, "
        "mpfedcl predict DIR/clients/NAME IMAGES uses them."
    )
    predictor = judged["global_test"]
    value = predictors.get("local_test", {}).get(predictor)
    if PredictorKind.of(predictor).model != "global" or value is None:
        return [stay, "The server has no model of its own."]
    return [
        f"The server's model reaches {percent(value)} % on the same test sets "
        f"({PREDICTOR_TITLES[predictor]}).",
        stay,
    ]


def fairness_sentence(summary: Mapping[str, Any]) -> str:
    """Return the spread of accuracy over clients; nothing for one client, or if it is unknown."""
    found = summary.get("fairness")
    if not found or found["clients"] < 2:
        return ""
    return (
        f"spread over clients: std {found['std']:.1f} (ddof 1), "
        f"worst client {found['worst']:.1f} %, worst tenth {found['worst_decile']:.1f} %, "
        f"Jain's index {found['jain']:.3f}"
    )


def metric_sentence(summary: Mapping[str, Any]) -> str:
    """Return the primary metric of a run on both test sets; nothing if it is accuracy."""
    metric, tables = summary.get("metric", "accuracy"), summary.get("metrics")
    if metric == "accuracy" or not tables:
        return ""
    local, union = (metric_value(metric, tables[test].get(metric)) for test in TEST_TITLES)
    return (
        f"{metric_title(metric)}: {local} over the samples of all local test sets, {union} on the "
        "global test set"
    )


def imbalance_sentence(confusion: Mapping[str, Any]) -> str:
    """Return the worst class if accuracy hides it because another class dominates the test samples.

    `confusion` is the content of confusion.json. Nothing unless the largest class has three times
    the samples of the smallest, and the recall of a class is less than half of the accuracy.
    """
    tables = list(confusion["clients"].values())
    if not tables:
        return ""
    total = numpy.sum(tables, axis=0)
    silent = numpy.sum(list(confusion["unanswered"].values()) or [[0] * len(total)], axis=0)
    tested, right = total.sum(axis=1) + silent, total.diagonal()
    present = tested.nonzero()[0]
    if not len(present) or tested.max() < 3 * tested[present].min():
        return ""
    recall = right[present] / tested[present]
    worst, largest = present[recall.argmin()], tested.argmax()
    if recall.min() >= right.sum() / tested.sum() / 2:
        return ""
    names = [printable_name(confusion["classes"][place]) for place in (worst, largest)]
    return (
        f"Class {names[0]}: recall {100 * recall.min():.1f} % ({right[worst]:,} of "
        f"{tested[worst]:,}); accuracy is dominated by class {names[1]}, "
        f"{100 * tested[largest] / tested.sum():.0f} % of the test samples."
    )


def calibration_sentence(summary: Mapping[str, Any]) -> str:
    """Return the expected calibration error of a run; nothing if it predicts no probabilities."""
    found = summary.get("calibration_error") or {}
    errors = [
        f"{value:.1f} % on the {TEST_TITLES[test]}"
        for test, value in found.items()
        if value is not None
    ]
    return f"expected calibration error: {', '.join(errors)}" if errors else ""
