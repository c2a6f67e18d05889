"""Runs that ended well and are still of no use: nothing was learned, or training diverged."""

from pathlib import Path
from statistics import fmean
from typing import Any

from mpfedcl.runs.directory import RunDirectory

_DIVERGED = ("finite", "the model changed by")
"""Parts of the reasons for which updates are rejected after a step that was too large."""
_ROUNDING = 1e-3


def describe_failure(path: Path) -> str | None:
    """Return a sentence about a finished run that learned nothing or diverged; otherwise None."""
    directory = RunDirectory(path)
    summary = directory.read_summary()
    if summary is None:
        return None
    # Records may take gigabytes, and are read only if there is something to find.
    records = directory.read_records() if summary["rejected"] else []
    rejected = [reason for line in records for reason in line["clients"]["rejected"].values()]
    reasons = [each for each in rejected if any(words in each for words in _DIVERGED)]
    experiment = directory.read_experiment()
    rate = f"--train.lr (now {experiment.train.lr:g})"
    advice = f" Try more rounds or another {rate}." if summary["loss"] is not None else ""
    if reasons:
        advice = f" Lower {rate}."
    confusion = directory.read_json("confusion.json")
    accuracy, guess = summary["accuracy"], _guess(confusion)
    # Accuracy is given up on purpose for more recall of rare classes.
    is_weighed = experiment.train.class_weights != "none" or experiment.metric != "accuracy"
    if is_weighed and confusion is not None and not reasons and _tells_apart(confusion):
        return None
    if guess is not None and (accuracy is None or accuracy <= guess + _ROUNDING):
        found = "no finite outputs" if accuracy is None else f"accuracy {accuracy:.1f} %"
        return (
            f"The run learned nothing: {found}, always the most frequent class gives {guess:.1f} "
            f"%.{advice}"
        )
    if reasons:
        return f"Training diverged: {len(reasons)} updates were rejected ({reasons[0]}).{advice}"
    return None


def _tells_apart(confusion: dict[str, Any]) -> bool:
    """Return whether the mean recall of classes is above that of always the same class."""
    recalls = []
    for label, rows in enumerate(zip(*confusion["clients"].values(), strict=True)):
        if total := sum(map(sum, rows)):
            recalls.append(sum(row[label] for row in rows) / total)
    return bool(recalls) and fmean(recalls) > 1 / len(recalls) + _ROUNDING


def _guess(confusion: dict[str, Any] | None) -> float | None:
    """Return the clients' mean accuracy in % if the most frequent class were always predicted.

    None: the test sets are not known, or have one class only.
    """
    if confusion is None:
        return None
    silent = confusion.get("unanswered", {})
    counts = []
    for name, rows in confusion["clients"].items():
        unanswered = silent.get(name, [0] * len(rows))
        counts.append([sum(row) + more for row, more in zip(rows, unanswered, strict=True)])
    counts = [each for each in counts if sum(each)]
    totals = [sum(column) for column in zip(*counts, strict=True)]
    if sum(map(bool, totals)) < 2:
        # There is nothing to tell apart.
        return None
    best = totals.index(max(totals))
    return 100 * fmean(each[best] / sum(each) for each in counts)
