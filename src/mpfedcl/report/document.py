"""The content of a report, gathered from folders into one plain JSON document."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from mpfedcl.core.json_files import Json
from mpfedcl.experiment import CHOSEN_BY_A_RUN, RESULT_NEUTRAL_SETTINGS, Experiment
from mpfedcl.experiment.wording import describe_budget, describe_by_method, describe_data
from mpfedcl.report.comparison import (
    comparison_tables,
    describe_comparison,
    describe_seed_group,
    find_ranking_obstacles,
    run_predictors_table,
)
from mpfedcl.report.figures import style_of
from mpfedcl.report.reproduction import compare_command
from mpfedcl.report.result_folders import ResultFolder, find_tuning_files
from mpfedcl.report.run import (
    RunRecords,
    describe_run,
    describe_run_prototypes,
    describe_settings,
)
from mpfedcl.report.tuning import describe_tuning

FORMAT = 1
_MOST_POINTS = 400
_POINTS_IN_TOTAL = 5000
"""Points of a curve times curves of a kind, so that a page stays small."""

OnRun = Callable[[str], None]
"""Called with the name of each run before it is read."""


def build_document(folders: Sequence[ResultFolder], on_run: OnRun = lambda _: None) -> Json:
    """Return the document: runs and groups of runs, and sections that point to them."""
    builder = _DocumentBuilder(on_run)
    for folder in folders:
        builder.read(folder)
    return builder.document(folders)


def compare_runs(runs: Sequence[tuple[RunRecords, Json]]) -> Json:
    """Return groups, tables and differences of runs, each given with its `describe_run`."""
    builder = _DocumentBuilder(lambda _: None)
    for records, content in runs:
        builder.add(records, content)
    return builder.comparison()


@dataclass
class _DocumentBuilder:
    """Collects runs. Each run is read once, however many sections show it."""

    on_run: OnRun
    records: list[RunRecords] = field(default_factory=list)
    runs: list[Json] = field(default_factory=list)
    groups: list[Json] = field(default_factory=list)
    _places: dict[Path, int] = field(default_factory=dict)
    _members: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    def read(self, folder: ResultFolder) -> None:
        """Read the runs of a folder; in a comparison only first seeds have a prototype map."""
        seen: set[str] = set()
        for path in folder.runs:
            if path.resolve() in self._places:
                continue
            self.on_run(path.name)
            records = RunRecords.read(path)
            alike = _without_seed(records.experiment)
            self._places[path.resolve()] = len(self.records)
            more = {
                "map": describe_run_prototypes(records, with_map=alike not in seen),
                "settings": describe_settings(records),
            }
            self.add(records, describe_run(records) | more)
            seen.add(alike)

    def add(self, records: RunRecords, content: Json) -> None:
        """Add a run and its description."""
        self.records.append(records)
        self.runs.append(content)

    def document(self, folders: Sequence[ResultFolder]) -> Json:
        """Return the document of all runs."""
        sections = [self._section(folder) for folder in folders]
        with_runs = [folder for folder in folders if folder.runs]
        if len(with_runs) > 1:
            sections.insert(0, self._combined_section(with_runs))
        self._describe_groups()
        for section in sections:
            self._add_tables(section)
        first = sections[0]["title"]
        return {
            "format": FORMAT,
            "title": first if len(sections) == 1 else f"{len(folders)} results of mpfedcl",
            "version": version("mpfedcl"),
            "runs": self.runs,
            "groups": self.groups,
            "sections": sections,
        }

    def comparison(self) -> Json:
        """Return groups, tables, differences and clients of all runs that were added."""
        places = range(len(self.records))
        section: Json = {"kind": "together", "groups": self._group_by_settings(places)}
        self._describe_groups()
        self._add_tables(section)
        return {**section, "groups": self.groups, "about": self._describe_setup(places)}

    def _describe_groups(self) -> None:
        most = min(_MOST_POINTS, max(60, _POINTS_IN_TOTAL // max(1, len(self._members))))
        seen = Counter[str]()
        for name, places in self._members:
            runs = [self.records[place] for place in places]
            method = runs[0].method_name
            style = style_of(method, seen[method])
            seen[method] += 1
            self.groups.append(describe_seed_group(name, runs, places, most, style))

    def _section(self, folder: ResultFolder) -> Json:
        if folder.kind == "tuning":
            return describe_tuning(find_tuning_files(folder.path)) | {"folder": str(folder.path)}
        places = [self._places[path.resolve()] for path in folder.runs]
        experiments = [self.records[place].experiment for place in places]
        section: Json = {
            "kind": folder.kind,
            "folder": str(folder.path),
            "groups": self._group_by_settings(places),
            "detail": True,
        }
        if folder.kind == "run":
            data = _name_data(self.records[places[0]])
            title = f"{self.records[places[0]].method_name} on {data}"
            return section | {"title": title, "about": self._describe_setup(places)}
        datasets = list(dict.fromkeys(_name_data(self.records[place]) for place in places))
        about = self._describe_setup(places)
        if waiting := folder.left_out:
            names = ", ".join(waiting[:5])
            more = f" and {len(waiting) - 5} others" if len(waiting) > 5 else ""
            about.append(f"Left out, because no round is done yet: {names}{more}.")
        return section | {
            "title": f"{len(section['groups'])} methods on {', '.join(datasets)}",
            "about": about,
            "command": None
            if any(self.records[place].is_network for place in places)
            else compare_command(experiments),
        }

    def _combined_section(self, folders: Sequence[ResultFolder]) -> Json:
        places = list(
            dict.fromkeys(self._places[path.resolve()] for each in folders for path in each.runs)
        )
        return {
            "kind": "together",
            "title": "All runs together",
            "about": [
                f"{len(places)} runs from {len(folders)} folders; runs that differ only in their "
                "seed are one group. Each folder has its own section below."
            ],
            "groups": self._group_by_settings(places),
            "detail": False,
        }

    def _group_by_settings(self, places: Sequence[int]) -> list[int]:
        """Return the places of the groups of runs that differ only in their seed."""
        alike: dict[tuple[str, int], list[int]] = {}
        for place in places:
            experiment, copy = self.records[place].experiment, 0
            settings = _without_seed(experiment)
            # The same seed twice is the same run twice, not a second measurement.
            while any(
                self.records[other].experiment.seed == experiment.seed
                for other in alike.get((settings, copy), ())
            ):
                copy += 1
            alike.setdefault((settings, copy), []).append(place)
        names = _name_groups([self.records[each[0]] for each in alike.values()])
        found = []
        for name, members in zip(names, alike.values(), strict=True):
            entry = (name, tuple(members))
            if entry not in self._members:
                self._members.append(entry)
            found.append(self._members.index(entry))
        return found

    def _add_tables(self, section: Json) -> None:
        """Add tables, differences and clients; the groups must be complete."""
        if section["kind"] == "tuning":
            return
        groups = [self.groups[place] for place in section["groups"]]
        if section["kind"] == "run":
            section["tables"] = [run_predictors_table(self.records[groups[0]["runs"][0]])]
            return
        obstacles = find_ranking_obstacles(groups, self.records)
        section["tables"] = comparison_tables(groups, self.records, self.runs, obstacles)
        section |= describe_comparison(groups, self.runs, is_paired=not obstacles)

    def _describe_setup(self, places: Sequence[int]) -> list[str]:
        records = [self.records[place] for place in places]
        splits = ((each.method_name, _describe_split(each)) for each in records)
        # A run that has only begun may not say how many clients it has.
        populations = [
            (self.records[place].method_name, f"{count:,} clients")
            for place in places
            if (count := self.runs[place]["population"])
        ]
        seeds = sorted({each.experiment.seed for each in records})
        words = [
            describe_by_method(splits),
            describe_by_method(populations or [("", "0 clients")]),
            *_describe_effort(records),
            f"seed{'s' if len(seeds) > 1 else ''} {', '.join(str(seed) for seed in seeds)}",
        ]
        about = ["; ".join(words) + "."]
        unfinished = [each for each in records if each.summary is None]
        if unfinished:
            done = ", ".join(
                f"{each.name} (round {each.rounds[-1].round} of {each.experiment.rounds})"
                for each in unfinished[:5]
            )
            more = " and others" if len(unfinished) > 5 else ""
            about.append(f"Not finished: {done}{more}. Values are of the rounds so far.")
        budgets = {describe_budget(told): None for each in records if (told := each.privacy)}
        about += [f"Differential privacy: {each}." for each in budgets]
        damaged = sum(each.damaged for each in records)
        if damaged:
            about.append(f"{damaged} damaged lines of rounds.jsonl are left out.")
        return about


def _name_data(records: RunRecords) -> str:
    return describe_data(records.experiment, {"network": records.is_network})[0]


def _describe_split(records: RunRecords) -> str:
    """Return the data set and how its samples are split between clients."""
    place = {"network": records.is_network}
    return ", ".join(describe_data(records.experiment, place, with_seed=False))


def _describe_effort(records: Sequence[RunRecords]) -> list[str]:
    """Return rounds and learning rates of the methods that train."""
    trained = [each for each in records if not each.is_one_shot]
    if not trained:
        return ["one-shot"]
    rounds = ((each.method_name, f"{each.experiment.rounds} rounds") for each in trained)
    rates = ((each.method_name, f"{each.experiment.train.lr:g}") for each in trained)
    return [describe_by_method(rounds), f"learning rate {describe_by_method(rates)}"]


def _without_seed(experiment: Experiment) -> str:
    """Return the settings that runs of one group share."""
    # Engine, workers and trackers do not change the result.
    changes = {**CHOSEN_BY_A_RUN, **RESULT_NEUTRAL_SETTINGS, "seed": 0}
    return experiment.replace(**changes).to_toml()


def _name_groups(records: Sequence[RunRecords]) -> list[str]:
    """Return names of groups: the method, and the folder if methods repeat."""
    methods = [each.method_name for each in records]
    if len(set(methods)) == len(methods):
        return methods
    folders = [
        each.path.resolve().parent.name
        if len(records) > 1 and _is_of_comparison(each)
        else each.name
        for each in records
    ]
    names = [f"{method} ({folder})" for method, folder in zip(methods, folders, strict=True)]
    if len(set(names)) == len(names):
        return names
    return [f"{method} ({each.path})" for method, each in zip(methods, records, strict=True)]


def _is_of_comparison(records: RunRecords) -> bool:
    """Return whether a folder belongs to a comparison and is named by method and seed."""
    return records.name.endswith(f"-seed{records.experiment.seed}") and (
        (records.path.resolve().parent / "comparison.json").is_file()
    )
