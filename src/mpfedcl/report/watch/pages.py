"""The pages that are served: the list of runs, a run and a comparison, as the report has them."""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path

from mpfedcl.core.errors import InvalidInput
from mpfedcl.report.document import compare_runs, describe_single_run
from mpfedcl.report.html import Markup, section_blocks, sentence, tag
from mpfedcl.report.run import RunRecords
from mpfedcl.report.watch.runs import (
    MOST_FOLDERS,
    MOST_OPEN,
    Version,
    WatchedRun,
    WatchedRuns,
    read_records,
)
from mpfedcl.report.wording import name_value

MOST_COMPARED = 20
_MOST_ROWS = 500
_COLUMNS = ("compare", "run", "state", "method", "rounds", "metric", "changed")


# The list


def show_list(watched: WatchedRuns, words: str = "") -> Markup:
    """Return the table of the runs that match, running ones first, then the newest."""
    runs = list(watched.runs.values())
    states = [f"{count} {state}" for state, count in Counter(each.state for each in runs).items()]
    wanted = sorted((each for each in runs if _matches(each, words)), key=_order)
    notes = []
    if watched.is_too_large:
        notes.append(
            f"There are more than {MOST_FOLDERS:,} folders; runs beyond them are not shown."
        )
    if (left := len(wanted) - _MOST_ROWS) > 0:
        notes.append(f"{left:,} more runs match; add words to find them.")
    if not wanted:
        notes.append("No run matches." if runs else "There is no run here yet: mpfedcl run.")
    about = f"Runs: {len(runs)} ({', '.join(sorted(states))})." if states else "Runs: 0."
    table = tag(
        "table",
        tag("thead", tag("tr", map(_show_heading, _COLUMNS))),
        tag("tbody", map(_show_row, wanted[:_MOST_ROWS])),
        aria_label="Runs",
    )
    return tag(
        "div",
        tag("p", about, class_="about", role="status"),
        tag("section", table, sentence(" ".join(notes)), class_="block runs", aria_label="Runs"),
        data_title="Runs",
    )


def _matches(run: WatchedRun, words: str) -> bool:
    known = (run.folder, run.name, run.state, run.seen.get("method"), run.seen.get("about"))
    text = " ".join(each for each in known if each).lower()
    return all(word in text for word in words.lower().split())


def _order(run: WatchedRun) -> tuple[bool, float, str]:
    # The order of running ones must not change with each round.
    is_running = run.state == "running"
    newest_first = 0.0 if is_running else -run.changed
    return not is_running, newest_first, f"{run.folder}/{run.name}"


def _show_heading(name: str) -> Markup:
    shown = tag("span", name, class_="unseen") if name == "compare" else name
    return tag("th", shown, scope="col", class_="number" if name == "metric" else None)


def _show_row(run: WatchedRun) -> Markup:
    seen = run.seen
    box = tag(
        "input",
        type="checkbox",
        id_=f"box-{run.id}",
        value=run.id,
        aria_label=f"Compare {run.name}",
    )
    counts = seen.get("counts", {}).items()
    trouble = run.trouble or ", ".join(f"{noun}: {count:,}" for noun, count in counts if count)
    heading = tag(
        "th",
        tag("a", run.name, href=f"#run={run.id}", id_=f"link-{run.id}"),
        tag("small", run.folder),
        tag("small", trouble, class_="trouble"),
        scope="row",
        class_="where",
    )
    method, rounds, value = None, None, "-"
    if seen:
        planned, done = str(seen["planned"]), str(seen["round"])
        method = seen["method"], tag("small", seen["about"])
        bar = tag("progress", max=planned, value=done, aria_label="rounds done")
        rounds = bar, tag("small", f"{done} of {planned}")
        value = name_value(seen["metric"], seen["value"])
    changed = datetime.fromtimestamp(run.changed).isoformat(" ", "minutes")
    return tag(
        "tr",
        tag("td", box, class_="chosen-cell"),
        heading,
        tag("td", _show_state(run), class_="state-cell"),
        tag("td", method, class_="method-cell"),
        tag("td", rounds, class_="progress-cell"),
        tag("td", value, class_="number metric-cell"),
        tag("td", changed, class_="changed-cell"),
    )


def _show_state(run: WatchedRun) -> Markup:
    """Return the state of a run as a word with a sign."""
    return tag("span", run.state, class_=f"state {run.state}")


# A run


def show_run(watched: WatchedRuns, name: str) -> Markup | None:
    """Return the page of a run: its progress and its report; None if there is no such run."""
    run = watched.runs.get(name)
    if run is None:
        return None
    seen, parts = run.seen, []
    about, said = "", run.trouble
    if seen:
        about = f" {seen['method']} on {seen['about']}"
        value = name_value(seen["metric"], seen["value"])
        said = f"Round {seen['round']} of {seen['planned']}, {value}"
    if run.trouble:
        parts.append(tag("p", run.trouble, class_="warning"))
    elif run.records.rounds:
        parts += _draw_run(run.path, run.version)
    place = "/".join(each for each in (str(watched.root), run.folder, run.name) if each)
    return tag(
        "div",
        tag("p", _show_state(run), about),
        tag("p", place, class_="folder"),
        tag("p", said),
        tag("div", parts, class_="flow"),
        data_title=run.name,
        data_round=str(seen.get("round", 0)),
        data_said=said,
    )


@lru_cache(MOST_OPEN)
def _draw_run(path: Path, version: Version) -> list[Markup]:
    """Return the blocks of the report of a run."""
    records = read_records(path, version)
    try:
        return section_blocks(describe_single_run(records))
    # A method that is not installed, for example.
    except InvalidInput as error:
        return [tag("p", str(error), class_="warning")]


# A comparison


def show_comparison(watched: WatchedRuns, ids: Sequence[str]) -> Markup:
    """Return the page of chosen runs; unknown ones are left out."""
    chosen = [watched.runs[name] for name in ids[:MOST_COMPARED] if name in watched.runs]
    links = [
        tag("li", tag("a", run.name, href=f"#run={run.id}"), f" {run.state}") for run in chosen
    ]
    sound = tuple((run.path, run.version) for run in chosen if not run.trouble)
    troubles = [sentence(f"{run.name}: {run.trouble}") for run in chosen if run.trouble]
    return tag(
        "div",
        tag("p", "Runs that differ only in their seed are one line with a band.", class_="about"),
        tag("ul", links),
        tag("div", troubles, _draw_comparison(sound), class_="flow"),
        data_title=f"{len(chosen)} runs compared",
    )


@lru_cache(MOST_OPEN)
def _draw_comparison(runs: tuple[tuple[Path, Version], ...]) -> list[Markup]:
    """Return the blocks of the report's section, below the runs that it leaves out."""
    found: list[RunRecords] = []
    troubles = []
    for path, version in runs:
        records = read_records(path, version)
        try:
            if not records.rounds:
                raise InvalidInput(f"{path.name} has no round yet.")
            # Fails for a method that is not installed, for example.
            _ = records.described
            found.append(records)
        except InvalidInput as error:
            troubles.append(sentence(str(error)))
    if not found:
        return [*troubles, sentence("None of these runs can be shown.")]
    return troubles + section_blocks(compare_runs(found))
