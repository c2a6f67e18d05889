"""The record of a round: one line of rounds.jsonl, and the clock that measures its phases."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import Field

from mpfedcl.core.json_files import FileContent, Json, load_json
from mpfedcl.methods import PredictorName, Test
from mpfedcl.rounds.metrics import AccuracySpread, MetricTables

_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Number = Annotated[float, Field(allow_inf_nan=False)]
_Percent = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]


LAST_ROUND_ONLY = ("calibration_error", "metrics")
"""Fields that only the last round of a run has."""
_OPTIONAL = (
    *LAST_ROUND_ONLY,
    *("metric", "accuracy_spread", "privacy", "arrivals", "virtual_seconds", "elapsed_seconds"),
)


class Attendance(FileContent):
    """The clients of a round by outcome."""

    answered: list[str]
    missing: list[str]
    rejected: dict[str, str]


class ArrivalRecord(FileContent):
    """The arrivals of an asynchronous method."""

    version: _Count
    """Number of changes of the server's model so far."""
    by_client: dict[str, _Count]
    """Accepted answers by client."""
    staleness: dict[Literal["mean", "largest"], _Seconds]
    """Number of changes of the model between dispatch and arrival."""
    left_out: list[str] = Field(default_factory=list)
    """Clients whose answer has no weight."""
    under_way: _Count = 0
    """Clients that were sent the model and have not answered."""


class RoundRecord(FileContent):
    """The record of a round."""

    round: Annotated[int, Field(ge=1, le=10**9)]
    loss: _Number | None
    accuracy: dict[Test, dict[PredictorName, _Percent | None]] | None
    accuracy_per_client: dict[str, _Percent | None] | None
    """Of all clients; of more than 1,000, only of the evaluated participants."""
    loss_per_client: dict[str, _Number | None] | None = None
    """Of the accepted clients."""
    seconds: dict[str, _Seconds]
    bytes: dict[str, _Count]
    clients: Attendance
    sent: dict[str, _Count] = Field(default_factory=dict)
    """The largest upload of one client: parameters, and floats of prototypes."""
    unchanged: bool = False
    """Whether no client was accepted, so that the state did not change."""
    withheld: list[str] = Field(default_factory=list)
    """Clients that answered without an update."""
    processed: dict[str, list[str]] = Field(default_factory=dict)
    """The clients whose updates each processor has changed."""
    remarks: dict[str, Any] = Field(default_factory=dict)
    """Further remarks of the method and the engine."""
    calibration_error: dict[Test, _Percent | None] | None = None
    """Expected calibration error in percent of the primary predictors; in the last round."""
    metrics: MetricTables | None = None
    """All metrics of the primary predictors; in the last round."""
    metric: dict[Test, _Number | None] | None = None
    """The value of the primary metric, if it is not accuracy."""
    privacy: dict[str, Any] | None = None
    """The privacy budget and the epsilon spent after this round, if there is one."""
    accuracy_spread: AccuracySpread | None = None
    """Over all evaluated clients, if not all are listed."""
    virtual_seconds: _Seconds | None = None
    """The time of the virtual clock at the end, if there is one."""
    elapsed_seconds: _Seconds | None = None
    """Asynchronous methods over a network: wall-clock seconds of the run so far."""
    arrivals: ArrivalRecord | None = None
    """Asynchronous methods only."""

    def has_diverged(self, predictor: PredictorName) -> bool:
        """Return whether a run with this last round has diverged.

        Then no update was accepted, or the predictor has no finite accuracy.
        """
        if self.unchanged and self.clients.rejected:
            return True
        return self.accuracy is not None and self.accuracy["local_test"].get(predictor) is None

    def to_json(self) -> Json:
        """Return plain values without the optional fields that are None."""
        absent = {name for name in _OPTIONAL if getattr(self, name) is None}
        return self.model_dump(mode="json", exclude=absent)


def parse_record(line: bytes) -> Json | None:
    """Return a line of rounds.jsonl as plain values, or None if it is not a record."""
    try:
        values: Json = load_json(line)
        RoundRecord.model_validate(values, strict=True)
    except ValueError:
        return None
    return values


_TRAINING = ("broadcast", "train", "embed", "cluster", "exchange", "aggregate")
NOT_TRAINING = ("evaluate", "checkpoint")
"""Phases that are not part of the algorithm."""
PHASES = (*_TRAINING, *NOT_TRAINING)
"""exchange: between the processes of one run, including the wait for the slowest."""


def training_seconds(phases: Mapping[str, float]) -> float:
    """Return the seconds of the phases that belong to the algorithm."""
    return sum(seconds for name, seconds in phases.items() if name not in NOT_TRAINING)


class Clock:
    """Seconds by phase; `with clock.phase("train"):` adds to one."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to a phase."""
        began = time.perf_counter()
        try:
            yield
        finally:
            passed = time.perf_counter() - began
            self._seconds[name] = self._seconds.get(name, 0.0) + passed

    def lap(self) -> dict[str, float]:
        """Return the seconds since the last lap, and reset."""
        seconds = {name: round(value, 6) for name, value in self._seconds.items()}
        self._seconds = dict.fromkeys(PHASES, 0.0)
        return seconds
