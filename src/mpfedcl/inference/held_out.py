"""What calibration.json says of one model: thresholds of distances, and limits of sets."""

import math
from dataclasses import dataclass
from typing import Any

from mpfedcl.core.errors import InvalidInput
from mpfedcl.inference.calibration import COVERAGES, FALSE_ALARM_RATES, FILE
from mpfedcl.runs.directory import RunDirectory


@dataclass(frozen=True)
class Threshold:
    """The distance beyond which an image is unknown, and where the number comes from."""

    distance: float
    false_alarms: float
    """The share of held-out images that are flagged by mistake."""
    images: int
    """The held-out images it was measured on."""


class HeldOutMeasurements:
    """What the end of a run has measured of one model on held-out images."""

    def __init__(self, directory: RunDirectory, client: str | None) -> None:
        self._file = directory.path / FILE
        content = directory.read_json(FILE) or {}
        self.has_metric = content.get("metric") == "covariance"
        """Whether distances were measured in the method's own metric."""
        try:
            of_clients = content.get("clients", {})
            self._found: dict[str, Any] = (
                content.get("averaged") if client is None else of_clients.get(client)
            ) or {}
            self.images = int(self._found.get("images", 0))
        except (TypeError, ValueError, AttributeError):
            raise self._damaged() from None

    @property
    def sharpness(self) -> float:
        """The factor of a model's scores by which its probabilities fit held-out images."""
        try:
            value = float(self._found.get("sharpness", 1.0))
        except (TypeError, ValueError):
            raise self._damaged() from None
        return value if 0 < value < math.inf else 1.0

    def threshold(self, rate: float) -> tuple[Threshold | None, str | None]:
        """Return the threshold of a false-alarm rate, or why there is none."""
        if rate not in FALSE_ALARM_RATES:
            allowed = ", ".join(f"{each:g}" for each in FALSE_ALARM_RATES)
            raise InvalidInput(f"false_alarms is {rate:g}; it must be one of {allowed}.")
        if "thresholds" not in self._found:
            return None, (
                "No image is flagged as unknown: the run has recorded no distances of held-out "
                "images for this model (calibration.json); --held-out FOLDER measures them."
            )
        if (distance := self._number("thresholds", rate)) is None:
            return None, (
                f"No image is flagged as unknown: {self.images} held-out images are too few for a "
                f"false-alarm rate of {rate:g}."
            )
        return Threshold(distance, rate, self.images), None

    def set_limit(self, coverage: float) -> tuple[float | None, str | None]:
        """Return how surprising a class of a set may be, or why there are no sets."""
        if coverage not in COVERAGES:
            allowed = ", ".join(f"{each:g}" for each in COVERAGES)
            raise InvalidInput(f"coverage is {coverage:g}; it must be one of {allowed}.")
        if "sets" not in self._found:
            return None, (
                "There are no sets of classes: the run has recorded no probabilities of held-out "
                "images for this model (calibration.json); --held-out FOLDER measures them."
            )
        if (limit := self._number("sets", coverage)) is None:
            return None, (
                f"There are no sets of classes: {self.images} held-out images are too few for a "
                f"coverage of {coverage:g}."
            )
        return limit, None

    def _number(self, kind: str, share: float) -> float | None:
        try:
            value = self._found[kind].get(f"{share:g}")
            return None if value is None else float(value)
        except (TypeError, ValueError, AttributeError):
            raise self._damaged() from None

    def _damaged(self) -> InvalidInput:
        return InvalidInput(f"{self._file} must be the file that the run wrote.")
