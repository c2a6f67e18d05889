"""All that a report shows, gathered from folders into one plain JSON document."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from mpfedcl.cli.commands.run import describe_partition
from mpfedcl.experiment import INDIFFERENT, Experiment
from mpfedcl.report.group_content import (
    describe_group,
    find_obstacles,
    group_tables,
    run_table,
)
from mpfedcl.report.paper_content import describe_paper
from mpfedcl.report.reproduction import compare_command
from mpfedcl.report.run_content import (
    Json,
    RunRecords,
    describe_run,
    describe_run_map,
    describe_settings,
)
from mpfedcl.report.sources import Source, find_searches
from mpfedcl.report.tuning_content import describe_tuning

FORMAT = 1
_MOST_POINTS = 400
_POINTS_IN_ALL = 5000
"""Points of a curve times curves of a kind: what a page can hold without growing heavy."""

Advance = Callable[[str], None]
"""Told the name of each run before it is read."""


def gather_document(sources: Sequence[Source], advance: Advance = lambda _: None) -> Json:
    """Return the document: runs and groups of runs, and sections that point to them."""
    gathering = _Gathering(advance)
    for source in sources:
        gathering.read(source)
    return gathering.document(sources)


def compare_runs(runs: Sequence[tuple[RunRecords, Json]]) -> Json:
    """Return groups and tables of runs, each given with what `describe_run` says of it."""
    gathering = _Gathering(lambda _: None)
    for records, content in runs:
        gathering.add(records, content)
    return gathering.together()


@dataclass
class _Gathering:
    """What is read so far. Each run is read once, however many sections show it."""

    advance: Advance
    records: list[RunRecords] = field(default_factory=list)
    runs: list[Json] = field(default_factory=list)
    groups: list[Json] = field(default_factory=list)
    _places: dict[Path, int] = field(default_factory=dict)
    _members: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    def read(self, source: Source) -> None:
        """Read the runs of a source; in a comparison only first seeds get a map."""
        seen: set[str] = set()
        for path in source.runs:
            if path.resolve() in self._places:
                continue
            self.advance(path.name)
            records = RunRecords.read(path)
            alike = _without_seed(records.experiment)
            self._places[path.resolve()] = len(self.records)
            more = {
                "map": describe_run_map(records, with_map=alike not in seen),
                "settings": describe_settings(records),
            }
            self.add(records, describe_run(records) | more)
            seen.add(alike)

    def add(self, records: RunRecords, content: Json) -> None:
        """Take a run that is read, and what is said of it."""
        self.records.append(records)
        self.runs.append(content)

    def document(self, sources: Sequence[Source]) -> Json:
        """Return the document of all that was read."""
        sections = [self._section(source) for source in sources]
        plain = [source for source in sources if source.runs]
        if len(plain) > 1:
            sections.insert(0, self._together(plain))
        self._describe_groups()
        for section in sections:
            self._fill(section)
        first = sections[0]["title"]
        return {
            "format": FORMAT,
            "title": first if len(sections) == 1 else f"{len(sources)} results of mpfedcl",
            "version": version("mpfedcl"),
            "runs": self.runs,
            "groups": self.groups,
            "sections": sections,
        }

    def together(self) -> Json:
        """Return groups and tables of all runs that were added."""
        section = {"kind": "together", "groups": self._group(range(len(self.records)))}
        self._describe_groups()
        self._fill(section)
        return {"groups": self.groups, "tables": section["tables"]}

    def _describe_groups(self) -> None:
        most = min(_MOST_POINTS, max(60, _POINTS_IN_ALL // max(1, len(self._members))))
        self.groups = [
            describe_group(name, [self.records[place] for place in places], places, most)
            for name, places in self._members
        ]

    def _section(self, source: Source) -> Json:
        if source.kind == "paper":
            return describe_paper(source.path) | {"folder": str(source.path)}
        if source.kind == "tuning":
            return describe_tuning(find_searches(source.path)) | {"folder": str(source.path)}
        places = [self._places[path.resolve()] for path in source.runs]
        experiments = [self.records[place].experiment for place in places]
        section: Json = {
            "kind": source.kind,
            "folder": str(source.path),
            "groups": self._group(places),
            "detail": True,
        }
        if source.kind == "run":
            title = f"{experiments[0].method} on {experiments[0].dataset.name}"
            return section | {"title": title, "about": self._about(places)}
        datasets = list(dict.fromkeys(each.dataset.name for each in experiments))
        return section | {
            "title": f"{len(section['groups'])} methods on {', '.join(datasets)}",
            "about": [*self._about(places), *_say_left_out(source)],
            "command": compare_command(experiments),
        }

    def _together(self, sources: Sequence[Source]) -> Json:
        places = list(
            dict.fromkeys(self._places[path.resolve()] for each in sources for path in each.runs)
        )
        return {
            "kind": "together",
            "title": "All runs together",
            "about": [
                f"{len(places)} runs from {len(sources)} folders; those that differ in their seed "
                "alone are one line. Each folder has a section of its own below."
            ],
            "groups": self._group(places),
            "detail": False,
        }

    def _group(self, places: Sequence[int]) -> list[int]:
        """Return the groups of runs that differ in their seed alone, each known by its place."""
        alike: dict[tuple[str, int], list[int]] = {}
        for place in places:
            experiment, copy = self.records[place].experiment, 0
            settings = _without_seed(experiment)
            # The same seed twice is the same run twice, and no second measurement.
            while experiment.seed in self._seeds(alike.get((settings, copy), ())):
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

    def _seeds(self, places: Sequence[int]) -> set[int]:
        return {self.records[place].experiment.seed for place in places}

    def _fill(self, section: Json) -> None:
        """Add the tables, for which the groups must be complete."""
        if section["kind"] in ("paper", "tuning"):
            return
        groups = [self.groups[place] for place in section["groups"]]
        if section["kind"] == "run":
            section["tables"] = [run_table(self.records[groups[0]["runs"][0]])]
            return
        obstacles = find_obstacles(groups, self.records)
        section["tables"] = group_tables(groups, self.records, self.runs, obstacles)

    def _about(self, places: Sequence[int]) -> list[str]:
        records = [self.records[place] for place in places]
        first, content = records[0].experiment, self.runs[places[0]]
        seeds = sorted({each.experiment.seed for each in records})
        words = [
            f"{first.dataset.name}, {describe_partition(first, with_seed=False)}",
            f"{len(content['clients'])} clients",
            f"{first.rounds} rounds",
            f"learning rate {first.train.lr:g}",
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
            about.append(f"Not finished: {done}{more}. The numbers are of the rounds so far.")
        damaged = sum(each.damaged for each in records)
        if damaged:
            about.append(f"{damaged} damaged lines of the records are left out.")
        return about


def _without_seed(experiment: Experiment) -> str:
    """Return what runs must have in common to be measurements of the same thing."""
    # Where clients are run, and who looks on, makes no difference to the result.
    return experiment.replace(seed=0, **INDIFFERENT).to_toml()


def _say_left_out(source: Source) -> list[str]:
    if not source.left_out:
        return []
    names = ", ".join(source.left_out[:5])
    more = f" and {len(source.left_out) - 5} others" if len(source.left_out) > 5 else ""
    return [f"Left out, because no round is done yet: {names}{more}."]


def _name_groups(records: Sequence[RunRecords]) -> list[str]:
    """Name groups by method, and by folder too where methods repeat."""
    methods = [each.experiment.method for each in records]
    if len(set(methods)) == len(methods):
        return methods
    folders = [
        each.path.resolve().parent.name if len(records) > 1 and _is_seeded(each) else each.name
        for each in records
    ]
    names = [f"{method} ({folder})" for method, folder in zip(methods, folders, strict=True)]
    if len(set(names)) == len(names):
        return names
    return [f"{method} ({each.path})" for method, each in zip(methods, records, strict=True)]


def _is_seeded(records: RunRecords) -> bool:
    """Tell whether a folder is one of a comparison's, whose own name says only method and seed."""
    return records.name.endswith(f"-seed{records.experiment.seed}") and (
        (records.path.resolve().parent / "comparison.json").is_file()
    )
