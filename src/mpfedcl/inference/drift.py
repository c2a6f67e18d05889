"""Drift: are new images farther from the pool than chance would have it?

One image beyond a threshold says little; many do. Of n new images that are exchangeable with the m
held-out ones, the number beyond the k-th smallest held-out distance is beta-binomial with
(n, m + 1 - k, k), whatever the distances' distribution: the threshold was measured too, and where m
is small, a plain binomial would cry wolf.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from mpfedcl.core.json_files import FileContent
from mpfedcl.inference.held_out import Threshold
from mpfedcl.inference.prediction import Prediction

LOG = "predictions.jsonl"
_FALSE_ALARMS = 0.01
"""Of the statement about a whole batch."""
_LATEST = 5


@dataclass(frozen=True)
class Drift:
    """How many of some images are far from the pool, and how many would be by chance."""

    images: int
    flagged: int
    at_most: int
    """By chance there are more in 1 of 100 batches, or fewer."""
    false_alarms: float
    """The share of held-out images that are as far."""

    @property
    def is_drift(self) -> bool:
        """Whether there are more than chance would have."""
        return self.flagged > self.at_most

    def describe(self, noun: str) -> str:
        """Say it in one sentence."""
        return (
            f"{self.flagged:,} of {self.images:,} {noun}s are farther from the pool than all but "
            f"{100 * self.false_alarms:g} % of held-out {noun}s were; by chance at most "
            f"{self.at_most:,} would be."
        )


class LoggedPredictions(FileContent):
    """A line of predictions.jsonl: counts alone, no names of images."""

    time: str = Field(max_length=40)
    client: str | None = Field(default=None, max_length=200)
    images: int = Field(ge=0)
    flagged: int = Field(ge=0)
    expected: float = Field(ge=0, allow_inf_nan=False)
    """Number of images times the false-alarm rate."""
    at_most: int = Field(ge=0)
    drift: bool


def judge_drift(predictions: Sequence[Prediction], threshold: Threshold) -> Drift:
    """Count the images beyond a threshold, and say how many chance would have."""
    flagged = sum(bool(each.unknown) for each in predictions)
    limit = most_by_chance(len(predictions), threshold.images, threshold.false_alarms)
    return Drift(len(predictions), flagged, limit, threshold.false_alarms)


def most_by_chance(num_new: int, num_held_out: int, rate: float) -> int:
    """Return the smallest number that more than happens in at most 1 of 100 batches by chance.

    Example:
        >>> most_by_chance(100, 2000, 0.05), most_by_chance(100, 19, 0.05)
        (11, 23)
    """
    if not num_new:
        return 0
    # Imported where needed: not scipy.stats, which takes a second.
    import numpy
    from scipy.special import betaln, gammaln

    place = math.ceil((num_held_out + 1) * (1 - rate) - 1e-9)
    beyond, within = num_held_out + 1 - place, place
    counts = numpy.arange(num_new + 1)
    ways = gammaln(num_new + 1) - gammaln(counts + 1) - gammaln(num_new - counts + 1)
    chances = numpy.exp(
        ways + betaln(counts + beyond, num_new - counts + within) - betaln(beyond, within)
    )
    # P(more than j), summed from the small end.
    more = numpy.append(numpy.cumsum(chances[::-1])[::-1][1:], 0.0)
    return int(numpy.argmax(more <= _FALSE_ALARMS))


def log_drift(path: Path, drift: Drift, client: str | None) -> None:
    """Add a line to the log of a run's predictions."""
    line = LoggedPredictions(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        client=client,
        images=drift.images,
        flagged=drift.flagged,
        expected=round(drift.images * drift.false_alarms, 6),
        at_most=drift.at_most,
        drift=drift.is_drift,
    )
    with (path / LOG).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line.to_json(), allow_nan=False) + "\n")


def parse_log(content: bytes) -> list[dict[str, Any]]:
    """Return the latest lines of a log, the newest first; what cannot be read is left out."""
    found: list[dict[str, Any]] = []
    for line in reversed(content.splitlines()):
        try:
            found.append(LoggedPredictions.model_validate_json(line).to_json())
        except ValidationError:
            continue
        if len(found) == _LATEST:
            break
    return found
