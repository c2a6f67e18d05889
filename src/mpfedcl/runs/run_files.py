"""The JSON files of a run directory beside its records, written and read by these declarations."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from mpfedcl.core.files import FORMAT
from mpfedcl.core.json_files import FileContent, Json
from mpfedcl.data.tables import TableColumns
from mpfedcl.methods import TESTS, PredictorName, Test
from mpfedcl.rounds.metrics import AccuracySpread, Fairness

_Count = Annotated[int, Field(ge=0, lt=2**63)]


class AnyTable(FileContent):
    """A file of which nothing is known but that it holds a table."""


class Summary(FileContent):
    """summary.json: a finished run in short."""

    format: int = FORMAT
    method: str = ""
    method_name: str = ""
    """What the method calls itself; a report, which runs nobody's code, cannot ask it."""
    dataset: str = ""
    seed: int = 0
    rounds: int = 0
    predictor: PredictorName
    """The reading that the method is judged by on the clients' local test sets."""
    predictor_global: PredictorName | None = None
    """The same on all clients' tests together."""
    accuracy: float | None = None
    """The headline: that predictor on the clients' local test sets in the last round, in %."""
    accuracy_global: float | None = None
    """The same of `predictor_global`."""
    accuracy_per_client: dict[str, float | None] | None = None
    accuracy_spread: AccuracySpread | None = None
    """Of all clients that were read, where not all are listed; else it is not in the file."""
    fairness: Fairness | None = None
    """How these are spread over clients; None in runs of older versions."""
    calibration_error: dict[Test, float | None] = Field(
        default_factory=lambda: dict.fromkeys(TESTS)
    )
    """Expected calibration error of the two predictors above in the last round, in %, over all
    clients' test samples together; None where the predictor is no classifier."""
    predictors: dict[Test, dict[PredictorName, float | None]] = Field(default_factory=dict)
    loss: float | None = None
    bytes: dict[str, int] = Field(default_factory=dict)
    """Of all rounds, up and down."""
    seconds: dict[str, float] = Field(default_factory=dict)
    """Of all rounds, by phase."""
    parameters_sent: int = 0
    prototype_floats_sent: int = 0
    """Of the last round, by the client that sent most."""
    rejected: int = 0
    """Updates that were rejected, in all rounds."""
    privacy: dict[str, Any] | None = None
    """The budget (unit, epsilon, delta) and what the run has spent of it; None without one."""
    versions: dict[str, str]
    threads: int | None = None

    def to_json(self) -> Json:
        """Return plain values, as the file has them."""
        return self.model_dump(
            mode="json", exclude={"accuracy_spread"} if self.accuracy_spread is None else None
        )


class ClientSamples(FileContent):
    """What a client holds: training samples by class, and the number of test samples."""

    train: list[_Count]
    test: _Count


class ClientLists(FileContent):
    """The same of many clients, in lists of one length."""

    names: list[str]
    train: list[list[_Count]]
    test: list[_Count]
    input_means: list[float] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        lists = (
            self.train,
            self.test,
            self.names if self.input_means is None else self.input_means,
        )
        if {len(each) for each in lists} != {len(set(self.names))}:
            raise ValueError("its lists do not have one entry for each of different names")
        return self

    def by_client(self) -> dict[str, ClientSamples]:
        """Return what each client holds."""
        parts = zip(self.names, self.train, self.test, strict=True)
        return {n: ClientSamples.model_construct(train=a, test=b) for n, a, b in parts}


class Partition(FileContent):
    """partition.json: who holds what."""

    classes: list[str]
    clients: dict[str, ClientSamples] = Field(default_factory=dict)
    """In the file of many clients there is a table in its place."""
    table: ClientLists | None = None
    input_shape: list[int] | None = None
    """Of one sample, as the model or its encoder takes it."""
    input_means: dict[str, float] = Field(default_factory=dict)
    """By client, to notice data that have changed."""
    encoder: str | None = None
    """What tells the encoder from others."""
    image_shape: list[int] | None = None
    """Of one image, where model or encoder is made for images of their own size and color."""
    columns: TableColumns | None = None
    """Of a table: what turns its rows into the model's inputs."""
    network: bool = False
    """Whether clients were on machines of their own, with data of their own."""
    public: list[_Count] | None = None
    """Training samples of each class that the server has in place of a client."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.table is not None:
            # Past what makes it read-only: from here on there is one form.
            object.__setattr__(self, "clients", self.table.by_client())
        elif "clients" not in self.model_fields_set:
            raise ValueError("it has no clients")
        if any(len(each.train) != len(self.classes) for each in self.clients.values()):
            raise ValueError("a client does not have one number per class")
        return self


class Confusion(FileContent):
    """confusion.json: [C][C] counts per client, rows = truth; `unanswered` by true class."""

    format: int = FORMAT
    round: int
    predictor: PredictorName
    classes: list[str]
    clients: dict[str, list[list[int]]]
    unanswered: dict[str, list[int]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Self:
        size = len(self.classes)
        rows = [row for counts in self.clients.values() for row in counts]
        heights = {len(counts) for counts in self.clients.values()}
        if not heights <= {size} or any(len(row) != size for row in rows):
            raise ValueError("a client's counts are not one row and one column per class")
        if any(len(each) != size for each in self.unanswered.values()):
            raise ValueError("a client's unanswered images are not one number per class")
        return self


class NetworkRun(FileContent):
    """federation.json: what clients over a network must have in common."""

    run: str
    """By which clients know the run."""
    input_size: Annotated[int, Field(ge=1, lt=2**31)]
    encoder: str
    samples: Literal["images", "vectors"] = "images"
    image_shape: list[_Count] = Field(default_factory=list)


SCHEMAS: Mapping[str, type[FileContent]] = MappingProxyType(
    {
        "summary.json": Summary,
        "partition.json": Partition,
        "confusion.json": Confusion,
        "federation.json": NetworkRun,
    }
)
"""What must be in the files of a run, by their names."""
