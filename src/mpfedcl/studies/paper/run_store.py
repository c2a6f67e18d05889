"""Runs that tables share: one folder per run, found by its settings.

A run of 130 rounds is a run of 60 rounds that was resumed: the learning rate does not depend on the
number of rounds. So tables that ask for different lengths share one run, each up to its round.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mpfedcl.experiment import RESULT_NEUTRAL_SETTINGS, Experiment
from mpfedcl.methods import find_method
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.studies.paper.item import FinishedRun

NEUTRAL_FOR_SHARED_ROUNDS = {
    **RESULT_NEUTRAL_SETTINGS,
    "rounds": 1,
    "dataset__root": None,
    "device": "cpu",
}
"""Settings that make no difference to the rounds that two runs have in common, given that the data
are the same (`PaperRuns` sees to that)."""


@dataclass(frozen=True)
class RunStore:
    """A folder of runs."""

    path: Path

    def folder(self, experiment: Experiment) -> Path:
        """Return where the run of a resolved experiment is, or will be."""
        plain = experiment.replace(**NEUTRAL_FOR_SHARED_ROUNDS)
        # What is not the default: a setting added later changes no name.
        changed = plain.model_dump(mode="json", exclude_defaults=True)
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
        return FinishedRun(records, find_method(experiment.method).reading)


def resolve_with_seed(experiment: Experiment, seed: int) -> Experiment:
    """Return an experiment with its seed and with what was left open filled in."""
    return experiment.replace(seed=seed).resolved(find_method(experiment.method).defaults)
