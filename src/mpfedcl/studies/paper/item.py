"""What a table or figure of the paper consists of: cells, each a number from one run per seed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mpfedcl.experiment import Experiment
from mpfedcl.methods import PredictorName

Track = Literal["paper", "tuned"]
TRACKS: tuple[Track, ...] = ("paper", "tuned")
"""paper: its settings for all; tuned: each method's search_space chosen on validation data."""


@dataclass(frozen=True)
class Published:
    """A number that the paper prints."""

    mean: float
    deviation: float | None = None


@dataclass(frozen=True)
class FinishedRun:
    """A run as a cell sees it: its first rounds, as many as the cell asks for."""

    records: Sequence[Mapping[str, Any]]
    predictor: PredictorName
    """The one that the method is judged by in the paper, on every test."""

    @property
    def evaluated_records(self) -> list[Mapping[str, Any]]:
        """The records of the rounds that were evaluated."""
        return [record for record in self.records if record["accuracy"]]

    def accuracy(self, record: Mapping[str, Any], test: str = "local_test") -> float | None:
        """Return the headline accuracy in a round."""
        value: float | None = record["accuracy"][test][self.predictor]
        return value


@dataclass(frozen=True)
class Measure:
    """Which number of a run a cell shows."""

    name: str
    unit: str
    compute: Callable[[FinishedRun, FinishedRun | None], float | None]
    """From the run, and the one it is compared with where the cell names one."""
    better: Literal["higher", "lower"] | None = None


@dataclass(frozen=True)
class Cell:
    """One number of a table."""

    row: str
    column: str
    experiment: Experiment
    """Everything but the seed. In the tuned track the base whose search_space are still to be chosen."""
    measure: Measure
    panel: str = ""
    """Which part of the item it belongs to; cells of one panel and measure make a table."""
    published: Published | None = None
    track: Track = "paper"
    compared_with: Experiment | None = None
    """The run that the measure compares this one with."""


@dataclass(frozen=True)
class Curves:
    """Accuracy per round of several runs in one figure."""

    title: str
    experiments: Mapping[str, Experiment]


@dataclass(frozen=True)
class PaperItem:
    """A table or figure of the paper."""

    id: str
    title: str
    about: str
    rows: Mapping[str, str]
    columns: Mapping[str, str]
    cells: tuple[Cell, ...] = ()
    axis: str = ""
    """Where columns are numbers: what they are; the cells are then drawn as lines too."""
    compares_tests: bool = False
    """Whether own and global test set are drawn against each other."""
    curves: tuple[Curves, ...] = ()
    pictures: tuple["Picture", ...] = ()
    notes: tuple[str, ...] = ()

    def experiments(self) -> list[tuple[Track, Experiment]]:
        """Return every experiment that must have run, each once, without seeds."""
        wanted: list[tuple[Track, Experiment]] = []
        for cell in self.cells:
            wanted.append((cell.track, cell.experiment))
            if cell.compared_with is not None:
                wanted.append((cell.track, cell.compared_with))
        for curves in self.curves:
            wanted += [("paper", each) for each in curves.experiments.values()]
        for picture in self.pictures:
            # Partitions are drawn without any run.
            needed = picture.experiments if picture.kind == "embeddings" else {}
            wanted += [("paper", each) for each in needed.values()]
        return list({(track, each.to_toml()): (track, each) for track, each in wanted}.values())


@dataclass(frozen=True)
class Picture:
    """A figure that shows no numbers of the tables."""

    name: str
    kind: Literal["partitions", "embeddings"]
    title: str
    experiments: Mapping[str, Experiment]
