"""The files that a report reads: what must be in them, and one sentence where it is not."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mpfedcl.errors import InvalidInput
from mpfedcl.experiment import FORMAT
from mpfedcl.methods import Reading

Json = dict[str, Any]
"""Plain values, as JSON takes them."""
Test = Literal["own", "union"]
_Percent = float | None


class _FileContent(BaseModel):
    """Read-only; names that a later version may add are passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Attendance(_FileContent):
    """Who took part in a round."""

    answered: list[str]
    missing: list[str]
    rejected: dict[str, str]


class RoundRecord(_FileContent):
    """A line of rounds.jsonl."""

    round: Annotated[int, Field(ge=1, le=10**9)]
    loss: float | None
    accuracy: dict[Test, dict[Reading, _Percent]] | None
    accuracy_per_client: dict[str, _Percent] | None
    loss_per_client: dict[str, float | None] | None = None
    """Runs made before it was recorded have none."""
    seconds: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]]
    bytes: dict[str, Annotated[int, Field(ge=0, lt=2**63)]]
    clients: Attendance


class SummaryFile(_FileContent):
    """What a report takes from summary.json: the rest it finds in the rounds."""

    reading: Reading
    versions: dict[str, str]
    threads: int | None = None


class ClientImages(_FileContent):
    """One client's images: training images by class, and the number of test images."""

    train: list[int]
    test: int


class PartitionFile(_FileContent):
    """partition.json."""

    classes: list[str]
    clients: dict[str, ClientImages]
    network: bool = False
    """Whether clients were on machines of their own, with data of their own."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(len(each.train) != len(self.classes) for each in self.clients.values()):
            raise ValueError("a client does not have one number per class")
        return self


class ConfusionFile(_FileContent):
    """confusion.json: [C][C] counts per client, rows = truth; `unanswered` by true class."""

    format: int = FORMAT
    round: int
    reading: Reading
    classes: list[str]
    clients: dict[str, list[list[int]]]
    unanswered: dict[str, list[int]] = {}

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


class ComparedMethod(_FileContent):
    """A method of comparison.json, as far as a report needs it: where its runs are."""

    runs: list[str]


class ComparisonFile(_FileContent):
    """comparison.json."""

    seeds: list[int]
    methods: dict[str, ComparedMethod]


class TableHeading(_FileContent):
    """A row or a column of a paper table."""

    key: str
    title: str


class PublishedValue(_FileContent):
    """What the paper prints in a cell."""

    mean: float
    std: float | None = None


class PaperCell(_FileContent):
    """A number per seed, in one place of a paper table."""

    track: str
    row: str
    column: str
    test: str
    reading: str
    values: list[float | None]
    unit: str = "%"
    published: PublishedValue | None = None
    better: Literal["higher", "lower"] | None = None
    mark: Literal["best", "within"] | None = None
    rounds: int | None = None
    panel: str = ""


class FigureLine(_FileContent):
    """A line of a paper figure, with the deviation over seeds."""

    name: str
    x: list[float]
    mean: list[float | None]
    std: list[float | None] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if {len(self.mean), len(self.x if self.std is None else self.std)} != {len(self.x)}:
            raise ValueError("x, mean and std are not equally long")
        return self


class PaperFigure(_FileContent):
    """A figure of the paper, measured here."""

    title: str
    x: str
    y: str
    lines: list[FigureLine]


class ChosenSettings(_FileContent):
    """The settings that a method of the tuned track was given on one data set."""

    row: str
    set: str
    changes: dict[str, Any]
    score: float | None
    default_score: float | None
    standard_error: float | None


class PaperResultFile(_FileContent):
    """result.json: a table or figure of the paper, measured here."""

    format: int
    id: str
    title: str
    about: str
    command: str
    seeds: list[int]
    columns: list[TableHeading]
    rows: list[TableHeading]
    cells: list[PaperCell]
    chosen: list[ChosenSettings] = []
    figures: list[PaperFigure] = []
    notes: list[str] = []
    verdicts: list[str] = []
    seconds: float | None = None
    quick: bool = False
    """Whether it was made by a few rounds, only to see that everything runs."""


class SearchRung(_FileContent):
    """So many settings were run up to a round."""

    rounds: int
    settings: int


class SearchTrial(_FileContent):
    """One of the settings tried; its scores are by round."""

    number: int
    values: dict[str, Any]
    changes: dict[str, Any]
    scores: dict[int, float | None]
    stopped_after: int | None


class SearchRecord(_FileContent):
    """The search for one method's settings."""

    method: str
    reading: Reading
    base: dict[str, Any]
    knobs_searched: dict[str, list[Any]]
    budget: int
    seeds: list[int]
    validation: float
    tolerance: float
    rungs: list[SearchRung]
    trials: list[SearchTrial]
    chosen: int
    within: list[int]
    standard_error: float | None
    rounds_run: int

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.rungs or [trial.number for trial in self.trials] != [*range(len(self.trials))]:
            raise ValueError("rungs are missing, or trials out of order")
        if not 0 <= self.chosen < len(self.trials):
            raise ValueError("what was chosen is none of the trials")
        return self


class TuningFile(_FileContent):
    """tuning.json: the search of each method."""

    methods: Annotated[dict[str, SearchRecord], Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _take_one(cls, values: Any) -> Any:
        """Take the search of one method too, as that method's own folder has it."""
        if isinstance(values, dict) and "methods" not in values and "method" in values:
            return {"methods": {str(values["method"]): values}}
        return values


_AnyFile = TypeVar("_AnyFile", bound=_FileContent)


def read_json_file(path: Path, schema: type[_AnyFile]) -> _AnyFile:
    """Read a JSON file of a given schema."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise InvalidInput(f"{path} does not exist; a report needs it.") from None
    return parse_json(content, schema, path)


def parse_json(content: bytes, schema: type[_AnyFile], path: Path) -> _AnyFile:
    """Read the content of a JSON file; what is wrong with it is told of the path."""
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} is not valid JSON: {error}.") from None
    found = values.get("format", FORMAT) if isinstance(values, dict) else FORMAT
    if type(found) is not int or found > FORMAT:
        raise InvalidInput(
            f"{path} has format {found!r}; this mpfedcl reads formats up to {FORMAT}: a newer "
            "version wrote it."
        )
    return validate_content(values, schema, str(path))


def validate_content(values: Any, schema: type[_AnyFile], what: str) -> _AnyFile:
    """Return values in their schema; what does not fit is told in one sentence."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        place = f"{where} is wrong: " if where else ""
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidInput(f"{what} is not as mpfedcl writes it: {place}{message}.") from None
