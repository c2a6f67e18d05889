"""The files of a run directory next to its records: their schemas, summary and statistics."""

import json
import platform
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, model_validator
from safetensors import SafetensorError, safe_open

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import FORMAT
from mpfedcl.core.json_files import FileContent, Json
from mpfedcl.core.tensors import Tensors, load_tensors, pack_tensors
from mpfedcl.data.tables import TableColumns
from mpfedcl.methods import TESTS, Method, PredictorName, Test, name_method
from mpfedcl.rounds.metrics import (
    AccuracySpread,
    ConfusionCounts,
    Fairness,
    MetricTables,
    measure_fairness,
)

POOLED = "statistics.safetensors"
STATISTICS = "statistics"
_Count = Annotated[int, Field(ge=0, lt=2**63)]


class Summary(FileContent):
    """summary.json: the results of a finished run."""

    format: int = FORMAT
    method: str = ""
    method_name: str = ""
    """The method's name for people; a report does not import the method."""
    dataset: str = ""
    seed: int = 0
    rounds: int = 0
    predictor: PredictorName
    """The primary predictor on the local test sets."""
    predictor_global: PredictorName | None = None
    """The primary predictor on the global test set."""
    accuracy: float | None = None
    """Accuracy of `predictor` in the last round, in percent, the mean over clients."""
    accuracy_global: float | None = None
    """The same for `predictor_global`."""
    accuracy_per_client: dict[str, float | None] | None = None
    accuracy_spread: AccuracySpread | None = None
    """Of all evaluated clients, if not all are listed; otherwise absent from the file."""
    fairness: Fairness | None = None
    """The spread of these accuracies over clients."""
    calibration_error: dict[Test, float | None] = Field(
        default_factory=lambda: dict.fromkeys(TESTS)
    )
    """Expected calibration error of the two predictors in the last round, in percent, over the test
    samples of all clients; None if the predictor is no classifier."""
    metric: str = "accuracy"
    """The primary metric of tables and rankings."""
    metrics: MetricTables | None = None
    """Further metrics of the two predictors in the last round: of the test samples of all clients,
    of the global test set, and of each client."""
    predictors: dict[Test, dict[PredictorName, float | None]] = Field(default_factory=dict)
    loss: float | None = None
    bytes: dict[str, int] = Field(default_factory=dict)
    """The totals of all rounds, up and down."""
    seconds: dict[str, float] = Field(default_factory=dict)
    """The totals of all rounds by phase."""
    parameters_sent: int = 0
    prototype_floats_sent: int = 0
    """The largest upload of a client in the last round."""
    rejected: int = 0
    """Rejected updates in all rounds."""
    privacy: dict[str, Any] | None = None
    """The privacy budget (unit, epsilon, delta) and the part that is spent; None without one."""
    versions: dict[str, str]
    threads: int | None = None

    def to_json(self) -> Json:
        """Return the content of the file."""
        return self.model_dump(
            mode="json", exclude={"accuracy_spread"} if self.accuracy_spread is None else None
        )


class ClientSamples(FileContent):
    """The samples of a client: training samples by class, and the number of test samples."""

    train: list[_Count]
    test: _Count
    columns: dict[str, Annotated[list[float], Field(min_length=2, max_length=2)]] | None = None
    """The client's own mean and standard deviation of each numeric column, if they are used."""


class Partition(FileContent):
    """partition.json: the data of each client."""

    classes: list[str]
    clients: dict[str, ClientSamples]
    input_shape: list[int] | None = None
    """The shape of a sample, as the model or its encoder takes it."""
    holds_tokens: bool = False
    """Whether samples are token ids."""
    input_means: dict[str, float] = Field(default_factory=dict)
    """Means by client, to detect changed data."""
    encoder: str | None = None
    """The fingerprint of the encoder."""
    model: str | None = None
    """The fingerprint of a user's own model."""
    models: dict[str, str] | None = None
    """The fingerprints by client, if clients have different models."""
    objects: str | None = None
    """The fingerprint of data from Python."""
    image_shape: list[int] | None = None
    """The shape of an image, if model or encoder depend on it."""
    columns: TableColumns | None = None
    """The columns of a table and their transformation into inputs."""
    network: bool = False
    """Whether the clients were on other machines, with their own data."""
    public: list[_Count] | None = None
    """Public training samples of the server by class."""

    @model_validator(mode="after")
    def _check(self) -> Self:
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

    @classmethod
    def of(
        cls,
        counts: Mapping[str, ConfusionCounts],
        number: int,
        predictor: PredictorName,
        classes: Sequence[str],
    ) -> Self:
        """Split counts [C][C + 1] of a round, whose last column has the unanswered images."""
        silent = {name: [row[-1] for row in rows] for name, rows in counts.items()}
        return cls(
            round=number,
            predictor=predictor,
            classes=list(classes),
            clients={name: [row[:-1] for row in rows] for name, rows in counts.items()},
            unanswered={name: each for name, each in silent.items() if any(each)},
        )

    @model_validator(mode="after")
    def _check(self) -> Self:
        size = len(self.classes)
        if any([len(row) for row in rows] != [size] * size for rows in self.clients.values()):
            raise ValueError("a client's counts are not one row and one column per class")
        if any(len(each) != size for each in self.unanswered.values()):
            raise ValueError("a client's unanswered images are not one number per class")
        return self


class NetworkRun(FileContent):
    """federation.json: the data format that all clients of a federation share."""

    run: str
    """The identifier of the run for its clients."""
    input_size: Annotated[int, Field(ge=1, lt=2**31)]
    encoder: str
    samples: Literal["images", "vectors", "tokens"] = "images"
    image_shape: list[_Count] = Field(default_factory=list)
    model: str = ""
    embedding_size: int = 0


SCHEMAS: dict[str, type[FileContent]] = {
    "summary.json": Summary,
    "partition.json": Partition,
    "confusion.json": Confusion,
    "federation.json": NetworkRun,
}
"""The schemas of a run's files by name; any other file holds an object."""


# The summary


def summarize_run(method: Method, records: list[dict[str, Any]]) -> Summary:
    """Return the summary of a finished run from its records."""
    experiment, last = method.experiment, records[-1]
    local, whole = method.predictor_on("local_test"), method.predictor_on("global_test")
    per_client, spread = last["accuracy_per_client"], last.get("accuracy_spread")
    return Summary(
        method=experiment.method,
        method_name=name_method(experiment.method, type(method)),
        dataset=experiment.dataset.name,
        seed=experiment.seed,
        rounds=last["round"],
        predictor=local,
        predictor_global=whole,
        accuracy=last["accuracy"]["local_test"][local],
        accuracy_global=last["accuracy"]["global_test"][whole],
        accuracy_per_client=per_client,
        accuracy_spread=spread,
        fairness=spread or measure_fairness((per_client or {}).values()),
        calibration_error=last.get("calibration_error") or dict.fromkeys(TESTS),
        metric=experiment.metric,
        metrics=last.get("metrics"),
        predictors=last["accuracy"],
        loss=last["loss"],
        bytes=_total(record["bytes"] for record in records),
        seconds=_total(record["seconds"] for record in records),
        parameters_sent=last["sent"]["parameters"],
        prototype_floats_sent=last["sent"]["prototype_floats"],
        rejected=sum(len(record["clients"]["rejected"]) for record in records),
        privacy=last.get("privacy"),
        versions=versions(),
        threads=torch.get_num_threads(),
    )


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    packages = ("mpfedcl", "torch", "numpy", "scikit-learn")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def _total(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    totals: Counter[str] = Counter()
    for part in parts:
        totals.update(part)
    return {name: round(value, 6) for name, value in totals.items()}


# The sufficient statistics of a one-shot run (`mpfedcl.gaussian.statistics`): one pooled file, and
# a file per client. Their metadata has the fingerprint of the encoder, because statistics of other
# features must not be added.


def pack_statistics(statistics: Tensors, encoder: str | None) -> bytes:
    """Return the content of a statistics file."""
    return pack_tensors(statistics, note=("encoder", json.dumps(encoder)))


def client_file(name: str) -> str:
    """Return the place of a client's statistics in the run directory."""
    return f"{STATISTICS}/{name}.safetensors"


def remove_statistics(path: Path) -> None:
    """Delete the statistics that a run has written before."""
    (path / POOLED).unlink(missing_ok=True)
    if (path / STATISTICS).exists():
        shutil.rmtree(path / STATISTICS)


def read_statistics(
    file: Path, *, names: Sequence[str], num_classes: int, dimension: int, encoder: str | None
) -> Tensors:
    """Read statistics; reject a file that is damaged or belongs to another federation."""
    found = load_tensors(file)
    try:
        with safe_open(file, "pt") as opened:
            theirs = json.loads((opened.metadata() or {}).get("encoder", "null"))
    except (ValueError, RecursionError, SafetensorError) as error:
        raise InvalidInput(f"{file} cannot be read as safetensors: {error}.") from None
    shapes = {
        "scatter": [],
        "sums": [num_classes, dimension],
        "moment": [dimension, dimension],
        "within": [dimension, dimension],
    }
    for name in names:
        if name not in found:
            raise InvalidInput(f"{file} has no {name}; it must be the file that the run wrote.")
        if list(found[name].shape) != (shape := shapes.get(name, [num_classes])):
            raise InvalidInput(
                f"{file} has {name} of shape {list(found[name].shape)}; in this federation it must "
                f"be {shape}."
            )
        if found[name].dtype != torch.float64 or not bool(found[name].isfinite().all()):
            raise InvalidInput(f"{file} has {name} that are not finite numbers of float64.")
    if theirs != encoder:
        raise InvalidInput(
            f"{file} has statistics of another encoder ({str(theirs)[:12]}); in this federation it "
            f"must be {str(encoder)[:12]}."
        )
    return {name: found[name] for name in names}
