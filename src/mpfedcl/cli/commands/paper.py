"""`mpfedcl paper`: list, show and run the paper's tables and figures."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mpfedcl.api import RUNNER
from mpfedcl.cli.arguments.experiments import PaperList, PaperRun, PaperShow
from mpfedcl.cli.commands.parallel_jobs import refuse_torchrun
from mpfedcl.cli.progress import progress_bar, stderr_console, stdout_console, stop_after_round
from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import write_atomically
from mpfedcl.report.paper_tables import build_tables, table_notes
from mpfedcl.report.tables import TextTable
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.studies.jobs import JobOptions, Jobs, count_jobs
from mpfedcl.studies.paper import ITEM_IDS, PaperItem, find_items
from mpfedcl.studies.paper.datasets import PaperDatasets
from mpfedcl.studies.paper.item import TRACKS, Track
from mpfedcl.studies.paper.items import select_tracks
from mpfedcl.studies.paper.paper_runs import TUNING_SEEDS, PaperRuns


def paper_list_command(arguments: PaperList) -> int:
    """List the tables and figures, and which are done."""
    items = find_items(ITEM_IDS, PaperDatasets(arguments.root))
    listed = {
        item.id: {
            "title": item.title,
            "experiments": len(item.experiments()),
            "done": _describe_state(_read_result(arguments.out, item)),
        }
        for item in items
    }
    if arguments.json:
        print(json.dumps(listed, indent=2))
        return 0
    rows = [
        [name, str(each["title"]), str(each["experiments"]), str(each["done"])]
        for name, each in listed.items()
    ]
    TextTable("tables and figures of the paper", ["id", "what", "experiments", "done"], rows).show(
        stdout_console()
    )
    _report_missing(PaperDatasets(arguments.root))
    return 0


def paper_show_command(arguments: PaperShow) -> int:
    """Show what an item consists of, and its result where there is one."""
    if arguments.id == "all":
        raise InvalidInput(f"id is 'all'; it must be one of {', '.join(ITEM_IDS)}.")
    (item,) = find_items([arguments.id], PaperDatasets(arguments.root))
    result = _read_result(arguments.out, item)
    if arguments.json:
        print(json.dumps(result, indent=2))
        return 0
    console = stdout_console()
    console.print(item.title, style="bold")
    console.print(item.about)
    if result is None:
        count = len(item.experiments())
        console.print(f"\nnot run yet: {count} experiments per seed; mpfedcl paper run {item.id}")
        quick = arguments.out / "quick"
        if (quick / "tables" / item.id).is_dir():
            console.print(f"a quick one: mpfedcl paper show {item.id} --out {quick}")
        console.print()
        _published_table(item).show(console)
        return 0
    _show(result)
    return 0


def paper_run_command(arguments: PaperRun) -> int:
    """Run what is missing of some items, then write and print them."""
    seeds = arguments.seeds or ((0,) if arguments.quick else (0, 1, 2))
    if len(set(seeds)) < len(seeds):
        raise InvalidInput(f"seeds is {list(seeds)}; it must name each once.")
    if "tuned" in arguments.tracks and set(TUNING_SEEDS) & set(seeds):
        raise InvalidInput(
            f"seeds is {list(seeds)}; with the tuned track it must be without "
            f"{', '.join(map(str, TUNING_SEEDS))}, the seeds that settings are chosen with."
        )
    refuse_torchrun("paper run")
    count_jobs(arguments.jobs)
    datasets = PaperDatasets(arguments.root)
    whole = {item.id: item for item in find_items(arguments.ids, datasets)}
    chosen = [select_tracks(item, arguments.tracks) for item in whole.values()]
    items = [item for item in chosen if item.cells or item.curves or item.pictures]
    folder = arguments.out / "quick" if arguments.quick else arguments.out
    for item in items:
        _refuse_to_shrink(folder, item, seeds)
    runs = PaperRuns(folder, items, seeds, arguments.root, arguments.quick)
    runs.claim_folder()
    _report_missing(datasets)
    for each in whole.keys() - {item.id for item in items}:
        stderr_console().print(f"{each} has nothing to run with these data and tracks.")
    if not _run_all(runs, arguments.jobs):
        stderr_console().print("Stopped. The same command continues where it stopped.")
        return 130
    from mpfedcl.report.paper_figures import draw_item

    for item in items:
        # What another command has run of it is not left out.
        tracks = [
            track
            for track in TRACKS
            if track in arguments.tracks or runs.has_track(whole[item.id], track)
        ]
        result = runs.write_result(select_tracks(whole[item.id], tracks))
        drawn = draw_item(runs, item, result)
        place = folder / "tables" / item.id
        parts = [f"{table.title}\n\n{table.markdown()}" for table in build_tables(result)]
        text = "\n".join([*parts, *table_notes(result)]) + "\n"
        write_atomically(place / "table.md", text.encode())
        if not arguments.json:
            _show(result)
            written = [each.name for each in drawn]
            stdout_console().print(
                f"{place}: result.json, table.md{''.join(f', {n}' for n in written)}\n"
            )
    if arguments.json:
        print(json.dumps({item.id: _read_result(folder, item) for item in items}, indent=2))
    return 0


def _run_all(runs: PaperRuns, jobs: Jobs) -> bool:
    """Run both tracks; tell whether everything is complete."""
    console = stderr_console()
    with stop_after_round(console) as stop, progress_bar(console, "rounds") as bar:

        def show_progress(title: str, total: int, count_done: Callable[[], int]) -> JobOptions:
            task = bar.add_task(title, total=total, note="")
            return JobOptions(RUNNER, jobs, stop, lambda: bar.update(task, completed=count_done()))

        def run_track(track: Track, title: str) -> bool:
            planned = runs.planned_runs(track)
            options = show_progress(
                f"{len(planned)} {title}",
                sum(each.experiment.rounds for each in planned),
                lambda: runs.rounds_done(planned),
            )
            options.on_wait()
            return runs.run(planned, options)

        if not run_track("paper", "runs"):
            return False
        if not runs.tuned_experiments():
            return True
        searches = runs.searches()
        options = show_progress(
            f"tuning, {len(searches)} searches",
            sum(each.most_rounds for each in searches),
            lambda: sum(each.rounds_done() for each in searches),
        )
        return runs.tune(searches, options) and run_track("tuned", "tuned runs")


def _show(result: dict[str, Any]) -> None:
    console = stdout_console()
    for table in build_tables(result):
        table.show(console)
    for note in table_notes(result):
        console.print(note)


def _published_table(item: PaperItem) -> TextTable:
    """Return the numbers that the paper prints for an item."""
    rows = [
        [
            ", ".join(part for part in (cell.panel, item.rows[cell.row]) if part),
            item.columns[cell.column],
            f"{cell.published.mean:,g}"
            + (f"({cell.published.deviation:g})" if cell.published.deviation is not None else ""),
        ]
        for cell in item.cells
        if cell.published is not None and cell.track == TRACKS[0]
    ]
    return TextTable("what the paper prints", ["row", "column", "paper"], rows)


def _read_result(folder: Path, item: PaperItem) -> dict[str, Any] | None:
    directory = RunDirectory(folder / "tables" / item.id)
    result = directory.read_json("result.json")
    is_sound = isinstance(result, dict) and result.get("format") == 1 and "cells" in result
    if (directory.path / "result.json").exists() and not is_sound:
        raise InvalidInput(
            f"{directory.path / 'result.json'} is not a result of format 1; it must be removed, or "
            "made again."
        )
    return result


def _describe_state(result: dict[str, Any] | None) -> str:
    """Say what there is of an item."""
    if result is None:
        return "no"
    tracks = dict.fromkeys(cell["track"] for cell in result["cells"])
    seeds = f"{len(result['seeds'])} seeds" if len(result["seeds"]) > 1 else "1 seed"
    return ", ".join([seeds, *tracks])


def _refuse_to_shrink(folder: Path, item: PaperItem, seeds: Sequence[int]) -> None:
    """Do not write a result over fewer seeds in the place of one over more."""
    before = _read_result(folder, item)
    if before is not None and set(before["seeds"]) - set(seeds):
        raise InvalidInput(
            f"seeds is {list(seeds)}; {folder / 'tables' / item.id} holds a result over "
            f"{before['seeds']}: it must name those too, or --out another folder."
        )


def _report_missing(datasets: PaperDatasets) -> None:
    for sentence in datasets.missing:
        stderr_console().print(sentence)
