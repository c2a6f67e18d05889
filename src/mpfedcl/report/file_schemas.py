"""Schemas of the files that a report reads."""

from typing import Annotated, Any, Self

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


class SearchRung(FileContent):
    """Number of trials that ran up to a round."""

    rounds: int
    settings: int


class SearchTrial(FileContent):
    """One trial; its scores are by round."""

    number: int
    values: dict[str, Any]
    changes: dict[str, Any]
    scores: dict[int, float | None]
    stopped_after: int | None


class SearchRecord(FileContent):
    """The hyperparameter search of one method."""

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
