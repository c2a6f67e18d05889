"""Run what tables need, and write them: nothing twice, and nothing lost when it is stopped.

A run of 130 rounds is a run of 60 rounds that was resumed: the learning rate does not depend on the
number of rounds. So tables that ask for different lengths share one run, each up to its round.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import write_atomically
from mpfedcl.experiment import RESULT_NEUTRAL_SETTINGS, Experiment
from mpfedcl.experiment.data_folder import find_data_folder
from mpfedcl.experiment.settings import DatasetSettings
from mpfedcl.methods import find_method
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.studies.jobs import JobOptions, PlannedRun, run_planned
from mpfedcl.studies.paper.item import FinishedRun, PaperItem, Track
from mpfedcl.studies.paper.results import collect_result
from mpfedcl.studies.tuning import BUDGET, Search, load_tuning, run_searches

_QUICK_ROUNDS = 3
_QUICK_BUDGET = 2
TUNING_SEEDS = (100, 101, 102)
"""Other draws of the data than those that are reported.

One draw of a small set holds out a hundred images, too few to tell settings apart.
"""
_TUNED = ("label", "feature")
"""Items that have both tracks."""
_NEUTRAL_FOR_SHARED_ROUNDS = {
    **RESULT_NEUTRAL_SETTINGS,
    "rounds": 1,
    "evaluate_predictors": "judged",
    "dataset__root": None,
    "device": "cpu",
}
"""Settings that make no difference to the rounds that two runs have in common, given that the data
are the same (`claim_folder` sees to that)."""


@dataclass(frozen=True)
class RunStore:
    """A folder of runs."""

    path: Path

    def folder(self, experiment: Experiment) -> Path:
        """Return where the run of a resolved experiment is, or will be."""
        # What later settings were before they were there changes no name either.
        as_before: dict[str, None] = {}
        plain = experiment.replace(**_NEUTRAL_FOR_SHARED_ROUNDS, **as_before)
        # What is not the default: a setting added later changes no name.
        given = plain.model_dump(mode="json", exclude_defaults=True)
        changed = {name: value for name, value in given.items() if value != {}}
        text = json.dumps(changed, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        named = f"{plain.method}-{plain.dataset.name}-{plain.partition.kind}-seed{plain.seed}"
        return self.path / f"{named}-{digest}"

    def longest_runs(self, experiments: Iterable[Experiment]) -> list[tuple[Experiment, Path]]:
        """Return each run once, as long as the longest that asks for it."""
        found: dict[Path, Experiment] = {}
        for experiment in experiments:
            place = self.folder(experiment)
            if place not in found or found[place].rounds < experiment.rounds:
                found[place] = experiment
        return [(experiment, place) for place, experiment in found.items()]

    def is_run_finished(self, experiment: Experiment) -> bool:
        """Tell whether a run has got as far as an experiment asks."""
        return self.find_finished_run(experiment) is not None

    def find_finished_run(self, experiment: Experiment) -> FinishedRun | None:
        """Return a run up to the experiment's last round; None where it is not there yet."""
        records = RunDirectory(self.folder(experiment)).read_records()
        records = [record for record in records if record["round"] <= experiment.rounds]
        # A damaged line is left out in reading; cells count on a record per round.
        if [record["round"] for record in records] != list(range(1, experiment.rounds + 1)):
            return None
        if not records[-1]["accuracy"]:
            return None
        # As in the paper, on every test: not as a method is judged elsewhere.
        return FinishedRun(records, find_method(experiment.method).predictor)


def resolve_with_seed(experiment: Experiment, seed: int) -> Experiment:
    """Return an experiment with its seed and with what was left open filled in."""
    return experiment.replace(seed=seed).resolved(find_method(experiment.method).defaults)


@dataclass(frozen=True)
class PaperRuns:
    """The runs of some items in a folder."""

    folder: Path
    items: Sequence[PaperItem]
    seeds: Sequence[int]
    root: Path | None = None
    quick: bool = False
    _finished_runs: dict[tuple[Path, int], FinishedRun] = field(default_factory=dict)
    _complete_paths: set[Path] = field(default_factory=set)

    @cached_property
    def store(self) -> RunStore:
        """Where the runs are."""
        return RunStore(self.folder / "runs")

    def planned_runs(self, track: Track) -> list[PlannedRun]:
        """Return the runs of a track, each once; those of the tuned track once they are tuned."""
        wanted = [
            self._with_seed(track, experiment, seed)
            for item in self.items
            for its_track, experiment in item.experiments()
            if its_track == track
            # Pictures show one run.
            for seed in (self.seeds if item.cells or item.curves else self.seeds[:1])
        ]
        return [
            PlannedRun(experiment, path) for experiment, path in self.store.longest_runs(wanted)
        ]

    def tuned_experiments(self) -> list[Experiment]:
        """Return the experiments that are to be tuned, each once."""
        found = [
            base for item in self.items for track, base in item.experiments() if track == "tuned"
        ]
        return list({base.to_toml(): base for base in found}.values())

    def tuning_folder(self, base: Experiment) -> Path:
        """Return where the search for one experiment is."""
        run = self.store.folder(resolve_with_seed(self._shorten_if_quick(base), 0))
        return self.folder / "tuning" / run.name

    def searches(self) -> list[Search]:
        """Return the searches that are not complete, one an experiment to be tuned."""
        found = []
        for base in map(self._shorten_if_quick, self.tuned_experiments()):
            search = Search.prepare(
                base.replace(dataset__root=self.root),
                base.method,
                self.tuning_folder(base),
                _QUICK_BUDGET if self.quick else BUDGET,
                TUNING_SEEDS[:1] if self.quick else TUNING_SEEDS,
                # As the tables are read: everywhere as in the paper.
                predictor=find_method(base.method).predictor,
            )
            if load_tuning(search.path) is None:
                found.append(search)
            else:
                # Weights that a kill has left behind after the result was written.
                search.delete_weights()
        return found

    def tune(self, searches: Sequence[Search], options: JobOptions) -> bool:
        """Run or resume searches; tell whether all are complete now."""
        if not run_searches(searches, options):
            return False
        for search in searches:
            search.write_result()
        return True

    def run(self, planned: Sequence[PlannedRun], options: JobOptions) -> bool:
        """Run what is missing; tell whether everything is there now."""
        todo = [each for each in planned if not self.store.is_run_finished(each.experiment)]
        self._refuse_other_settings(planned)
        if not run_planned(todo, options):
            return False
        for each in todo:
            if not self.store.is_run_finished(each.experiment):
                raise InvalidInput(
                    f"{each.path} is complete but its records are damaged; it must be removed, and "
                    "the same command run again."
                )
        return True

    def rounds_done(self, planned: Iterable[PlannedRun]) -> int:
        """Return how many rounds of some runs are on record."""
        total = 0
        for each in planned:
            # A thousand runs are looked at twice a second: those that are complete only once.
            if each.path not in self._complete_paths:
                done = min(RunDirectory(each.path).count_records(), each.experiment.rounds)
                if done < each.experiment.rounds:
                    total += done
                    continue
                self._complete_paths.add(each.path)
            total += each.experiment.rounds
        return total

    def has_track(self, item: PaperItem, track: Track) -> bool:
        """Tell whether all runs of an item's track are there."""
        of_item = replace(self, items=[item])
        if track == "tuned" and any(
            load_tuning(self.tuning_folder(base)) is None for base in of_item.tuned_experiments()
        ):
            return False
        return all(
            self.store.is_run_finished(each.experiment) for each in of_item.planned_runs(track)
        )

    def claim_folder(self) -> None:
        """Refuse to mix results of different data in one folder."""
        data = str(find_data_folder(DatasetSettings(root=self.root))[0].resolve())
        path = self.folder / "data.json"
        if path.is_file():
            known = json.loads(path.read_bytes()).get("folder")
            if known != data:
                raise InvalidInput(
                    f"out is {str(self.folder)!r}; its runs are on the data in {known}, not in "
                    f"{data}: give another folder, or that data."
                )
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"folder": data}).encode())

    def _refuse_other_settings(self, planned: Iterable[PlannedRun]) -> None:
        """Refuse runs made by other settings, such as defaults that have changed since."""
        for each in planned:
            directory = RunDirectory(each.path)
            if not directory.holds_run():
                continue
            if directory.read_experiment().replace(
                **_NEUTRAL_FOR_SHARED_ROUNDS
            ) != each.experiment.replace(**_NEUTRAL_FOR_SHARED_ROUNDS):
                raise InvalidInput(
                    f"{each.path} holds a run with other settings; it must be removed, or another "
                    "folder given by --out."
                )

    def write_result(self, item: PaperItem) -> dict[str, Any]:
        """Write an item's result.json from its finished runs, and return it."""
        result = collect_result(item, self.seeds, self.finished_run, self._command(item))
        result["chosen"] = self._chosen_settings(item)
        result["quick"] = self.quick
        result["seconds"] = round(self._seconds(item), 1)
        place = self.folder / "tables" / item.id
        place.mkdir(parents=True, exist_ok=True)
        text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        write_atomically(place / "result.json", text.encode())
        return result

    def _chosen_settings(self, item: PaperItem) -> list[dict[str, Any]]:
        """Return the settings that each method of the tuned track was given, set by set."""
        # A search serves many cells.
        cells = {each.experiment.to_toml(): each for each in item.cells if each.track == "tuned"}
        return [
            {
                "row": cell.row,
                "set": cell.panel or item.columns[cell.column],
                "changes": tuning.changes,
                "score": tuning.score,
                "default_score": tuning.default_score,
                "standard_error": tuning.standard_error,
            }
            for cell in cells.values()
            if (tuning := load_tuning(self.tuning_folder(cell.experiment))) is not None
        ]

    def finished_run(self, track: Track, experiment: Experiment, seed: int) -> FinishedRun:
        """Return a run that must be there."""
        complete = self._with_seed(track, experiment, seed)
        key = (self.store.folder(complete), complete.rounds)
        if key not in self._finished_runs:
            run = self.store.find_finished_run(complete)
            assert run is not None
            self._finished_runs[key] = run
        return self._finished_runs[key]

    def _with_seed(self, track: Track, experiment: Experiment, seed: int) -> Experiment:
        experiment = self._shorten_if_quick(experiment)
        if track == "tuned":
            tuning = load_tuning(self.tuning_folder(experiment))
            assert tuning is not None
            experiment = experiment.replace(**tuning.search_space)
        return self.prepared_experiment(experiment, seed)

    def prepared_experiment(self, experiment: Experiment, seed: int) -> Experiment:
        """Return an experiment as it is run here with a seed."""
        experiment = self._shorten_if_quick(experiment)
        return resolve_with_seed(experiment.replace(dataset__root=self.root), seed)

    def _command(self, item: PaperItem) -> str:
        """Return the words that make an item as it is here."""
        usual = (0,) if self.quick else (0, 1, 2)
        seeds = "" if tuple(self.seeds) == usual else f" --seeds {' '.join(map(str, self.seeds))}"
        tracks = {track for track, _ in item.experiments()}
        both = {"paper", "tuned"}
        chosen = "" if item.id not in _TUNED or tracks == both else f" --tracks {min(tracks)}"
        return f"mpfedcl paper run {item.id}{' --quick' if self.quick else ''}{seeds}{chosen}"

    def _shorten_if_quick(self, experiment: Experiment) -> Experiment:
        if not self.quick:
            return experiment
        return experiment.replace(rounds=min(_QUICK_ROUNDS, experiment.rounds))

    def _seconds(self, item: PaperItem) -> float:
        """Return the computing time of the runs and searches that an item rests on."""
        of_item = replace(self, items=[item])
        searches = [load_tuning(self.tuning_folder(base)) for base in of_item.tuned_experiments()]
        total = sum(each.seconds for each in searches if each is not None)
        for track in ("paper", "tuned"):
            for each in of_item.planned_runs(track):
                run = self.store.find_finished_run(each.experiment)
                assert run is not None
                total += sum(sum(record["seconds"].values()) for record in run.records)
        return total
