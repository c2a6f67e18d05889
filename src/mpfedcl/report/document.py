"""The content of a report, gathered from folders into sections of groups, tables and commands."""

from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from mpfedcl.core.errors import enumerate_names
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
from mpfedcl.report.run import RunRecords, describe_run_prototypes, describe_settings
from mpfedcl.report.tuning import describe_tuning

_MOST_DETAILED = 12
"""Runs that a comparison shows in detail: one per method."""

OnRun = Callable[[str], None]
"""Called with the name of each run before it is read."""


def build_document(folders: Sequence[ResultFolder], on_run: OnRun = lambda _: None) -> Json:
    """Return the document: a section per folder, and one of all runs if there are several."""
    # Each run is read once, however many sections show it.
    runs: dict[Path, RunRecords] = {}
    for path in (path for folder in folders for path in folder.runs):
        if path.resolve() not in runs:
            on_run(path.name)
            runs[path.resolve()] = RunRecords.read(path)
    sections = [
        _describe_folder(folder, [runs[path.resolve()] for path in folder.runs])
        for folder in folders
    ]
    num_folders = sum(bool(folder.runs) for folder in folders)
    if num_folders > 1:
        about = (
            f"{len(runs)} runs from {num_folders} folders; runs that differ only in their seed are "
            "one group. Each folder has its own section below."
        )
        together = {"kind": "together", "title": "All runs together", "about": [about]}
        sections.insert(0, compare_runs(list(runs.values())) | together)
    first = sections[0]["title"]
    return {
        "title": first if len(sections) == 1 else f"{len(folders)} results of mpfedcl",
        "version": version("mpfedcl"),
        "sections": sections,
    }


def compare_runs(runs: Sequence[RunRecords]) -> Json:
    """Return groups, tables, differences and clients of runs as a section."""
    groups = _describe_groups(runs)
    obstacles = find_ranking_obstacles(groups)
    return {
        "kind": "comparison",
        "about": _describe_setup(runs),
        "groups": groups,
        "tables": comparison_tables(groups, obstacles),
        **describe_comparison(groups, is_paired=not obstacles),
    }


def _describe_folder(folder: ResultFolder, runs: Sequence[RunRecords]) -> Json:
    if folder.kind == "tuning":
        return describe_tuning(find_tuning_files(folder.path)) | {"folder": str(folder.path)}
    if folder.kind == "run":
        section: Json = {
            "kind": "run",
            "title": f"{runs[0].method_name} on {runs[0].data[0]}",
            "about": _describe_setup(runs),
            "groups": _describe_groups(runs),
            "tables": [run_predictors_table(runs[0])],
        }
    else:
        section = compare_runs(runs)
        datasets = ", ".join(dict.fromkeys(each.data[0] for each in runs))
        section["title"] = f"{len(section['groups'])} methods on {datasets}"
        if folder.left_out:
            names = enumerate_names(folder.left_out)
            section["about"].append(f"Left out, because no round is done yet: {names}.")
        if not any(each.is_network for each in runs):
            section["command"] = compare_command([each.experiment for each in runs])
    # Of each method the first seed.
    firsts = [group["runs"][0] for group in section["groups"][:_MOST_DETAILED]]
    details = [
        each.described | {"map": describe_run_prototypes(each), "settings": describe_settings(each)}
        for each in firsts
    ]
    return section | {"folder": str(folder.path), "details": details}


def _describe_groups(runs: Sequence[RunRecords]) -> list[Json]:
    """Return groups of runs that differ only in their seed."""
    alike: dict[tuple[str, int], list[RunRecords]] = {}
    for run in runs:
        settings, copy = _without_seed(run.experiment), 0
        # The same seed twice is the same run twice, not a second measurement.
        while any(
            other.experiment.seed == run.experiment.seed
            for other in alike.get((settings, copy), ())
        ):
            copy += 1
        alike.setdefault((settings, copy), []).append(run)
    names = _name_groups([members[0] for members in alike.values()])
    seen = Counter[str]()
    groups = []
    for name, members in zip(names, alike.values(), strict=True):
        method = members[0].method_name
        groups.append(describe_seed_group(name, members, style_of(method, seen[method])))
        seen[method] += 1
    return groups


def _describe_setup(runs: Sequence[RunRecords]) -> list[str]:
    splits = ((each.method_name, _describe_split(each)) for each in runs)
    # A run that has only begun may not say how many clients it has.
    populations = [
        (each.method_name, f"{each.num_clients:,} clients") for each in runs if each.num_clients
    ]
    seeds = sorted({each.experiment.seed for each in runs})
    words = [
        describe_by_method(splits),
        describe_by_method(populations or [("", "0 clients")]),
        *_describe_effort(runs),
        f"seed{'s' if len(seeds) > 1 else ''} {', '.join(str(seed) for seed in seeds)}",
    ]
    about = ["; ".join(words) + "."]
    unfinished = [
        f"{each.name} (round {each.rounds[-1].round} of {each.experiment.rounds})"
        for each in runs
        if each.summary is None
    ]
    if unfinished:
        about.append(
            f"Not finished: {enumerate_names(unfinished)}. Values are of the rounds so far."
        )
    budgets = {describe_budget(told): None for each in runs if (told := each.privacy)}
    about += [f"Differential privacy: {each}." for each in budgets]
    damaged = sum(each.damaged for each in runs)
    if damaged:
        about.append(f"{damaged} damaged lines of rounds.jsonl are left out.")
    return about


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
