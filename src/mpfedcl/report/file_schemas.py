"""The files that a report reads: what must be in them, and one sentence where it is not."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from mpfedcl.core.json_files import FileContent
from mpfedcl.methods import PredictorName


class ComparedMethod(FileContent):
    """A method of comparison.json, as far as a report needs it: where its runs are."""

    runs: list[str]


class ComparisonFile(FileContent):
    """comparison.json."""

    seeds: list[int]
    methods: dict[str, ComparedMethod]


class TableHeading(FileContent):
    """A row or a column of a paper table."""

    key: str
    title: str


class PublishedValue(FileContent):
    """What the paper prints in a cell."""

    mean: float
    std: float | None = None


class PaperCell(FileContent):
    """A number per seed, in one place of a paper table."""

    track: str
    row: str
    column: str
    test: str
    predictor: str
    values: list[float | None]
    unit: str = "%"
    published: PublishedValue | None = None
    better: Literal["higher", "lower"] | None = None
    mark: Literal["best", "within"] | None = None
    rounds: int | None = None
    panel: str = ""


class FigureLine(FileContent):
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


class PaperFigure(FileContent):
    """A figure of the paper, measured here."""

    title: str
    x: str
    y: str
    lines: list[FigureLine]


class ChosenSettings(FileContent):
    """The settings that a method of the tuned track was given on one data set."""

    row: str
    set: str
    changes: dict[str, Any]
    score: float | None
    default_score: float | None
    standard_error: float | None


class PaperResultFile(FileContent):
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
    chosen: list[ChosenSettings] = Field(default_factory=list)
    figures: list[PaperFigure] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    verdicts: list[str] = Field(default_factory=list)
    seconds: float | None = None
    quick: bool = False
    """Whether it was made by a few rounds, only to see that everything runs."""


class SearchRung(FileContent):
    """So many settings were run up to a round."""

    rounds: int
    settings: int


class SearchTrial(FileContent):
    """One of the settings tried; its scores are by round."""

    number: int
    values: dict[str, Any]
    changes: dict[str, Any]
    scores: dict[int, float | None]
    stopped_after: int | None


class SearchRecord(FileContent):
    """The search for one method's settings."""

    method: str
    predictor: PredictorName
    base: dict[str, Any]
    search_space_used: dict[str, list[Any]]
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


class TuningFile(FileContent):
    """tuning.json: the search of each method."""

    methods: Annotated[dict[str, SearchRecord], Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _take_one(cls, values: Any) -> Any:
        """Take the search of one method too, as that method's own folder has it."""
        if isinstance(values, dict) and "methods" not in values and "method" in values:
            return {"methods": {str(values["method"]): values}}
        return values
