"""`mpfedcl paper`: list, show and run the paper's tables and figures."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpfedcl.cli.arguments.experiments import PaperList, PaperRun, PaperShow
from mpfedcl.cli.commands.parallel_jobs import check_jobs, refuse_torchrun
from mpfedcl.cli.progress import gentle_interrupt, messages, progress_bar, results
from mpfedcl.errors import InvalidInput
from mpfedcl.files import write_atomically
from mpfedcl.report.tables import Grid
from mpfedcl.studies.paper import ITEM_IDS, Item, find_items
from mpfedcl.studies.paper.item import TRACKS
from mpfedcl.studies.paper.items import choose_tracks
from mpfedcl.studies.paper.results import grids, remarks
from mpfedcl.studies.paper.runner import TUNING_SEEDS, PaperRuns
from mpfedcl.studies.paper.sets import Sets


def paper_list_command(arguments: PaperList) -> int:
    """List the tables and figures, and which are done."""
    items = find_items(ITEM_IDS, Sets(arguments.root))
    listed = {
        item.id: {
            "title": item.title,
            "experiments": len(item.experiments()),
            "done": _describe(_read_result(arguments.out, item)),
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
    Grid("tables and figures of the paper", ["id", "what", "experiments", "done"], rows).show(
        results()
    )
    _say_missing(Sets(arguments.root))
    return 0


def paper_show_command(arguments: PaperShow) -> int:
    """Show what an item consists of, and its result where there is one."""
    if arguments.id == "all":
        raise InvalidInput(f"id is 'all'; it must be one of {', '.join(ITEM_IDS)}.")
    (item,) = find_items([arguments.id], Sets(arguments.root))
    result = _read_result(arguments.out, item)
    if arguments.json:
        print(json.dumps(result, indent=2))
        return 0
    console = results()
    console.print(item.title, style="bold")
    console.print(item.about)
    if result is None:
        count = len(item.experiments())
        console.print(f"\nnot run yet: {count} experiments a seed; mpfedcl paper run {item.id}")
        quick = arguments.out / "quick"
        if (quick / "tables" / item.id).is_dir():
            console.print(f"a quick one: mpfedcl paper show {item.id} --out {quick}")
        console.print()
        _published_grid(item).show(console)
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
    jobs = check_jobs(arguments.jobs)
    sets = Sets(arguments.root)
    whole = {item.id: item for item in find_items(arguments.ids, sets)}
    chosen = [choose_tracks(item, arguments.tracks) for item in whole.values()]
    items = [item for item in chosen if item.cells or item.curves or item.pictures]
    folder = arguments.out / "quick" if arguments.quick else arguments.out
    for item in items:
        _refuse_to_shrink(folder, item, seeds)
    runs = PaperRuns(folder, items, seeds, arguments.root, arguments.quick)
    runs.claim()
    _say_missing(sets)
    for each in whole.keys() - {item.id for item in items}:
        messages().print(f"{each} has nothing to run with these data and tracks.")
    if not _run_all(runs, jobs):
        messages().print("Stopped. The same command goes on where it was.")
        return 130
    from mpfedcl.report.paper_pictures import draw_item

    for item in items:
        # What another command has run of it is not left out.
        tracks = [
            track
            for track in TRACKS
            if track in arguments.tracks or runs.has_track(whole[item.id], track)
        ]
        result = runs.conclude(choose_tracks(whole[item.id], tracks))
        drawn = draw_item(runs, item, result)
        place = folder / "tables" / item.id
        write_atomically(place / "table.md", _markdown(result).encode())
        if not arguments.json:
            _show(result)
            written = [each.name for each in drawn]
            results().print(f"{place}: result.json, table.md{''.join(f', {n}' for n in written)}\n")
    if arguments.json:
        print(json.dumps({item.id: _read_result(folder, item) for item in items}, indent=2))
    return 0


def _run_all(runs: PaperRuns, jobs: int) -> bool:
    """Run both tracks; tell whether everything is complete."""
    console = messages()
    with gentle_interrupt(console) as stop, progress_bar(console) as bar:
        plans = runs.plans("paper")
        total = sum(plan.experiment.rounds for plan in plans)
        task = bar.add_task(f"{len(plans)} runs", total=total, note="")

        def advance() -> None:
            bar.update(task, completed=runs.rounds_done(plans))

        advance()
        if not runs.run(plans, jobs, stop, advance):
            return False
        advance()
        if not runs.bases():
            return True
        searches = runs.searches()
        most = sum(each.most_rounds for each in searches)
        search = bar.add_task(f"tuning, {len(searches)} searches", total=most, note="")

        def advance_search() -> None:
            bar.update(search, completed=sum(each.rounds_done() for each in searches))

        if not runs.tune(searches, jobs, stop, advance_search):
            return False
        bar.update(search, completed=most)
        tuned = runs.plans("tuned")
        last = bar.add_task(
            f"{len(tuned)} tuned runs",
            total=sum(plan.experiment.rounds for plan in tuned),
            note="",
        )
        return runs.run(
            tuned, jobs, stop, lambda: bar.update(last, completed=runs.rounds_done(tuned))
        )


def _show(result: dict[str, Any]) -> None:
    console = results()
    for grid in grids(result):
        grid.show(console)
    for remark in remarks(result):
        console.print(remark)


def _markdown(result: dict[str, Any]) -> str:
    parts = [f"{grid.title}\n\n{grid.markdown()}" for grid in grids(result)]
    return "\n".join([*parts, *remarks(result)]) + "\n"


def _published_grid(item: Item) -> Grid:
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
    return Grid("what the paper prints", ["row", "column", "paper"], rows)


def _read_result(folder: Path, item: Item) -> dict[str, Any] | None:
    path = folder / "tables" / item.id / "result.json"
    if not path.is_file():
        return None
    try:
        result: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError as error:
        raise InvalidInput(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(result, dict) or result.get("format") != 1 or "cells" not in result:
        raise InvalidInput(f"{path} is no result of format 1; it must be removed, or made anew.")
    return result


def _describe(result: dict[str, Any] | None) -> str:
    """Say what there is of an item."""
    if result is None:
        return "no"
    tracks = dict.fromkeys(cell["track"] for cell in result["cells"])
    seeds = f"{len(result['seeds'])} seeds" if len(result["seeds"]) > 1 else "1 seed"
    return ", ".join([seeds, *tracks])


def _refuse_to_shrink(folder: Path, item: Item, seeds: Sequence[int]) -> None:
    """Do not write a result over fewer seeds in the place of one over more."""
    before = _read_result(folder, item)
    if before is not None and set(before["seeds"]) - set(seeds):
        raise InvalidInput(
            f"seeds is {list(seeds)}; {folder / 'tables' / item.id} holds a result over "
            f"{before['seeds']}: it must name those too, or --out another folder."
        )


def _say_missing(sets: Sets) -> None:
    for sentence in sets.missing:
        messages().print(sentence)
