"""The record of a round: one line of rounds.jsonl, written and read by this declaration."""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from mpfedcl.core.json_files import FileContent, Json, load_json
from mpfedcl.methods import PredictorName, Test
from mpfedcl.rounds.listed_clients import AccuracySpread

_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Number = Annotated[float, Field(allow_inf_nan=False)]
_Percent = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]


LAST_ROUND_ONLY = ("calibration_error", "calibration_bins")
"""What is measured in a run's last round alone."""


class Attendance(FileContent):
    """Who took part in a round."""

    answered: list[str]
    missing: list[str]
    rejected: dict[str, str]


class ArrivalRecord(FileContent):
    """What came in the time of a record, with asynchronous methods."""

    version: _Count
    """How often the server's model has been changed so far."""
    by_client: dict[str, _Count]
    """Answers that were accepted, by client."""
    staleness: dict[Literal["mean", "largest"], _Seconds]
    """Of these: how often the model had changed since its client was sent it."""
    left_out: list[str] = Field(default_factory=list)
    """Clients whose answer was given no weight."""
    under_way: _Count = 0
    """Clients that were sent the model and are not back yet."""


CalibrationBin = Annotated[list[_Number], Field(min_length=3, max_length=3)]
"""Test images, those of them that were right, and the mean probability of the class predicted."""


class RoundRecord(FileContent):
    """What is written down of a round."""

    round: Annotated[int, Field(ge=1, le=10**9)]
    loss: _Number | None
    accuracy: dict[Test, dict[PredictorName, _Percent | None]] | None
    accuracy_per_client: dict[str, _Percent | None] | None
    """Of all clients; where there are more than 1,000, of those that took part and were read."""
    loss_per_client: dict[str, _Number | None] | None = None
    """Of the clients that were accepted."""
    seconds: dict[str, _Seconds]
    bytes: dict[str, _Count]
    clients: Attendance
    sent: dict[str, _Count] = Field(default_factory=dict)
    """The largest upload of one client: parameters, and floats of prototypes."""
    unchanged: bool = False
    """True where no client was accepted, so that the state stayed as it was."""
    withheld: list[str] = Field(default_factory=list)
    """Clients that have answered and had nothing to send."""
    processed: dict[str, list[str]] = Field(default_factory=dict)
    """Whose updates each processor has changed."""
    remarks: dict[str, Any] = Field(default_factory=dict)
    """What else the method and the engine say of the round."""
    calibration_error: dict[Test, _Percent | None] | None = None
    """Expected calibration error in %, of the predictors that are judged; of the last round."""
    calibration_bins: dict[Test, list[CalibrationBin]] | None = None
    """What it is made of: bins that hold images, by rising probability."""
    privacy: dict[str, Any] | None = None
    """The budget and what is spent of it after this round, where there is one."""
    accuracy_spread: AccuracySpread | None = None
    """Of all clients that were read, where not all are listed."""
    virtual_seconds: _Seconds | None = None
    """What the virtual clock shows at the end, where there is one."""
    elapsed_seconds: _Seconds | None = None
    """Asynchronous methods over a network: real seconds that the run has taken so far."""
    arrivals: ArrivalRecord | None = None
    """Asynchronous methods: a record is of as many answers as a round has clients."""

    def has_diverged(self, predictor: PredictorName) -> bool:
        """Tell of a last round whether the run ended in numbers that are none.

        Then no update of it was accepted, or the reading has no finite accuracy.
        """
        if self.unchanged and self.clients.rejected:
            return True
        return self.accuracy is not None and self.accuracy["local_test"].get(predictor) is None

    def to_json(self) -> Json:
        """Return plain values; without what was measured of other rounds alone, or not at all."""
        clocks = ("virtual_seconds", "elapsed_seconds")
        told = ("accuracy_spread", "privacy", "arrivals")
        measured = (*LAST_ROUND_ONLY, *told, *clocks)
        return self.model_dump(
            mode="json", exclude={name for name in measured if getattr(self, name) is None}
        )


def parse_record(line: bytes) -> Json | None:
    """Return a line of rounds.jsonl as plain values, or None where it is no record of a round."""
    try:
        values = load_json(line)
        RoundRecord.model_validate(values, strict=True)
    except (ValueError, ValidationError):
        return None
    found: Json = values
    return found
