"""The hyperparameter searches in a report: trials, scores and the chosen values."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from mpfedcl.core.json_files import Json, read_json_file
from mpfedcl.experiment.wording import describe_partition
from mpfedcl.report.figures import PALETTE, SOFT, Drawing, Panel, escape_math, mark_rounds
from mpfedcl.report.reproduction import tune_command
from mpfedcl.report.tables import cell
from mpfedcl.report.wording import PREDICTOR_TITLES, percent
from mpfedcl.studies.tuning import Trial, TuningFile, TuningResult

_OPTIMISTIC = (
    "The score of the chosen trial is the best of many and therefore optimistic; only a run on "
    "test samples shows how good it is."
)
_NO_SCORE = "-: no accuracy, because training diverged or no client could be evaluated."


def read_searches(files: Sequence[Path]) -> list[TuningResult]:
    """Return the searches in files of several methods or of one."""
    return [each for file in files for each in read_json_file(file, TuningFile).methods.values()]


def describe_tuning(files: Sequence[Path]) -> Json:
    """Return the section of searches: a row each, then each in full."""
    found = read_searches(files)
    settings = list(dict.fromkeys(map(_describe_setting, found)))
    # Without a search space there is no rule.
    rules = list(dict.fromkeys(_describe_rule(each) for each in found if not each.is_fixed))
    methods = list(dict.fromkeys(each.method for each in found))
    subject = f"{len(methods)} methods" if len(methods) > 1 else "".join(methods)
    datasets = ", ".join(dict.fromkeys(each.base.dataset.name for each in found))
    return {
        "kind": "tuning",
        "title": f"Tuning of {subject} on {datasets}",
        # Common sentences are said once.
        "about": [f"{each}." for each in settings if len(settings) == 1]
        + [each for each in rules if len(rules) == 1],
        "tables": [_overview_table(found, with_setting=len(settings) > 1)],
        "searches": [
            {
                "title": each.method
                + (f" on {_describe_setting(each)}" if len(settings) > 1 else "")
                + ": trials",
                "table": _trials_table(each, with_rule=len(rules) > 1),
                "figure": scores_drawing([each])
                if any(_known_scores(trial) for trial in each.trials)
                else None,
            }
            for each in found
        ],
        "command": _command(found),
    }


def _describe_setting(found: TuningResult) -> str:
    base = found.base
    return f"{base.dataset.name}, {describe_partition(base, with_seed=False)}, {base.rounds} rounds"


def _describe_rule(found: TuningResult) -> str:
    """Return how trials were run and one was chosen."""
    first, *following = found.rungs
    steps = [f"{first.settings} trials ran to round {first.rounds}"]
    steps += [f"the best {rung.settings} to round {rung.rounds}" for rung in following]
    always = ", and the defaults always to the end" if following else ""
    seeds = ", ".join(str(seed) for seed in found.seeds)
    plural = "s" if len(found.seeds) > 1 else ""
    return (
        f"For each method {', '.join(steps)}{always}. The score is the primary metric in % on "
        f"{100 * found.validation:g} % of each client's training samples, held out; test samples "
        f"were not used. It is the mean over clients, seed{plural} {seeds}. Of all trials within "
        f"{found.tolerance:g} times the standard error of the best in the last round, the one with "
        f"the fewest changes to the defaults was chosen, then the best. {_OPTIMISTIC}"
    )


def _overview_table(found: Sequence[TuningResult], *, with_setting: bool) -> Json:
    rows = []
    for each in found:
        note = _describe_setting(each) if with_setting else PREDICTOR_TITLES[each.predictor]
        chosen = "no search space" if each.is_fixed else format_settings(each.changes)
        numbers = [percent(each.standard_error), percent(each.default_score)]
        numbers += [str(len(each.trials)), f"{each.rounds_run:,}"]
        rows.append([
            cell(each.method, note=note),
            cell(chosen),
            cell(percent(each.score), strong=True),
            *map(cell, numbers),
        ])  # fmt: skip
    return {
        "caption": "Chosen hyperparameters and validation accuracy in % of the last round",
        "columns": ["method", "chosen", "score", "± error", "defaults", "trials", "rounds run"],
        "rows": rows,
        "notes": ["± error: standard error of the best score."],
    }


def _trials_table(found: TuningResult, *, with_rule: bool) -> Json:
    rounds = [rung.rounds for rung in found.rungs]
    grid = "; ".join(
        f"{_flag(name)} {', '.join(map(str, values))}"
        for name, values in found.search_space_used.items()
    )
    notes = [f"{found.method} has no search space; its defaults were run."]
    if grid:
        defaults = format_settings(found.trials[0].values)
        notes = [f"Search space: {grid}. Defaults: {defaults}."]
    if any(None in trial.scores.values() for trial in found.trials):
        notes.append(_NO_SCORE)
    if with_rule and grid:
        notes.append(_describe_rule(found))
    return {
        "caption": "Validation accuracy in % at each step; the longest trials first",
        "columns": ["trial", "hyperparameters", *(f"round {each}" for each in rounds), "outcome"],
        "rows": [_trial_row(trial, found, rounds) for trial in sorted(found.trials, key=_rank)],
        "notes": notes,
    }


def _trial_row(trial: Trial, found: TuningResult, rounds: Sequence[int]) -> list[Json]:
    outcome = "ran to the end"
    if trial.number == found.chosen:
        outcome = "chosen"
    elif trial.number in found.within:
        outcome = "within the error of the best"
    elif trial.stopped_after is not None:
        outcome = f"stopped after round {trial.stopped_after}"
    # Blank if the trial was stopped before; a dash is a missing score.
    scores = [percent(trial.scores[each]) if each in trial.scores else "" for each in rounds]
    texts = [str(trial.number), format_settings(trial.changes), *scores, outcome]
    return [cell(text, strong=trial.number == found.chosen) for text in texts]


def _rank(trial: Trial) -> tuple[int, float, int]:
    """Sort the longest trials first, then by their last score."""
    last = max(trial.scores, default=0)
    return -last, -(trial.scores.get(last) or 0.0), trial.number


def _known_scores(trial: Trial) -> dict[int, float]:
    """Return the known scores by round."""
    return {each: score for each, score in sorted(trial.scores.items()) if score is not None}


def format_settings(values: dict[str, Any]) -> str:
    """Return hyperparameters by the names of their flags."""
    said = [f"{_flag(name)} {value}" for name, value in values.items() if value is not None]
    return ", ".join(said) or "defaults"


def _flag(name: str) -> str:
    return name.replace("__", ".").replace("_", "-")


def _command(found: Sequence[TuningResult]) -> str | None:
    """Return the command that makes all the searches; None if it takes several."""
    names = {"budget", "seeds", "validation", "tolerance"}
    asked = [each.model_dump(include=names) for each in found]
    if any(each != asked[0] for each in asked):
        return None
    seeds = tuple(asked[0]["seeds"])
    return tune_command([each.base for each in found], asked[0] | {"seeds": seeds})


def scores_drawing(searches: Sequence[TuningResult]) -> Drawing:
    """Return the validation accuracy of every trial per round, a panel per method."""
    panels = [Panel(partial(_draw_scores, found=each), each.method) for each in searches]
    note = "Gray: other trials. A line ends at the round after which its trial was stopped."
    return Drawing("Validation accuracy of hyperparameters", note, panels, (6.4, 3.6), columns=1)


def _draw_scores(axes: Axes, found: TuningResult) -> None:
    for trial in found.trials:
        known = _known_scores(trial)
        style: dict[str, Any] = {"color": SOFT, "lw": 1.0, "zorder": 1, "alpha": 0.6}
        if trial.number == 0:
            style = {"color": PALETTE[1], "lw": 1.8, "zorder": 2, "label": "defaults"}
        if trial.number == found.chosen:
            label = f"chosen: {format_settings(trial.changes)}"
            style = {"color": PALETTE[0], "lw": 2.2, "zorder": 3, "label": escape_math(label, 80)}
        axes.plot(list(known), list(known.values()), marker="o", ms=4, **style)
    axes.set(xlabel="round", ylabel="validation accuracy (%)")
    mark_rounds(axes)
    axes.legend(loc="best", fontsize=8)
