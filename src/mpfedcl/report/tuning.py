"""The hyperparameter searches in a report: trials, scores and the chosen values."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from mpfedcl.core.json_files import Json, read_json_file
from mpfedcl.experiment.descriptions import describe_by_method, describe_partition
from mpfedcl.experiment.names import metric_sign, metric_title
from mpfedcl.report.figures import PALETTE, SOFT, Drawing, Panel, escape_math, mark_rounds
from mpfedcl.report.tables import cell
from mpfedcl.report.wording import PREDICTOR_TITLES, metric_value, name_seeds, percent
from mpfedcl.studies.tuning import Trial, TuningResult

_CHOICE = (
    "The score is the primary metric on training samples that were held out, the mean over "
    "clients and seeds; test samples were not used. Of all trials within the "
    "standard error of the best in the last round, the one with the fewest changes to the "
    "defaults was chosen, then the best. The score of the chosen trial is the best of many and "
    "therefore optimistic; only a run on test samples shows how good it is"
)


def read_searches(files: Sequence[Path]) -> list[TuningResult]:
    """Return the searches in files, one per method."""
    return [read_json_file(file, TuningResult) for file in files]


def describe_tuning(files: Sequence[Path]) -> Json:
    """Return the section of searches: a row each, then each in full."""
    found = read_searches(files)
    methods = list(dict.fromkeys(each.method for each in found))
    subject = f"{len(methods)} methods" if len(methods) > 1 else "".join(methods)
    datasets = ", ".join(dict.fromkeys(each.base.dataset.name for each in found))
    about = [describe_by_method((each.method, _describe_setting(each)) for each in found)]
    # Without a search space there is no rule.
    if rules := [(each.method, _describe_rule(each)) for each in found if not each.is_fixed]:
        about += [describe_by_method(rules), _CHOICE]
    return {
        "kind": "tuning",
        "title": f"Tuning of {subject} on {datasets}",
        "about": [f"{each}." for each in about],
        "tables": [_overview_table(found)],
        "searches": [
            {
                "title": f"{each.method}: trials",
                "table": _trials_table(each),
                "figure": scores_drawing([each]) if any(map(_known_scores, each.trials)) else None,
            }
            for each in found
        ],
    }


def _describe_setting(found: TuningResult) -> str:
    base = found.base
    return f"{base.dataset.name}, {describe_partition(base, with_seed=False)}, {base.rounds} rounds"


def _describe_rule(found: TuningResult) -> str:
    """Return how many trials ran for how long, and the settings of the choice."""
    first, *following = found.rungs
    steps = [f"{first.settings} trials ran to round {first.rounds}"]
    steps += [f"the best {rung.settings} to round {rung.rounds}" for rung in following]
    always = ", and the defaults always to the end" if following else ""
    return (
        f"{', '.join(steps)}{always}, by {100 * found.validation:g} % of each client's training "
        f"samples, {name_seeds(found.seeds)}"
    )


def _overview_table(found: Sequence[TuningResult]) -> Json:
    rows = []
    for each in found:
        name = cell(each.method, note=PREDICTOR_TITLES[each.predictor])
        chosen = "no search space" if each.is_fixed else format_settings(each.changes)
        score = cell(metric_value(each.metric, each.score), strong=True)
        numbers = [percent(each.standard_error), metric_value(each.metric, each.default_score)]
        numbers += [str(len(each.trials)), f"{each.rounds_run:,}"]
        rows.append([name, cell(chosen), score, *map(cell, numbers)])
    return {
        "caption": "Chosen hyperparameters and validation "
        f"{describe_by_method((each.method, metric_title(each.metric)) for each in found)} of the "
        "last round",
        "columns": ["method", "chosen", "score", "± error", "defaults", "trials", "rounds run"],
        "rows": rows,
        "notes": ["± error: standard error of the best score."],
    }


def _trials_table(found: TuningResult) -> Json:
    """Return all trials, the longest first, then by their last score."""
    rounds = [rung.rounds for rung in found.rungs]
    notes = [f"{found.method} has no search space; its defaults were run."]
    if found.search_space_used:
        defaults = format_settings(found.trials[0].values)
        space = "; ".join(
            f"{_flag(name)} {', '.join(map(str, values))}"
            for name, values in found.search_space_used.items()
        )
        notes = [f"Search space: {space}. Defaults: {defaults}."]
    if any(None in trial.scores.values() for trial in found.trials):
        notes.append("-: no score, because training diverged or no client could be evaluated.")

    def rank(trial: Trial) -> tuple[int, float, int]:
        last = max(trial.scores, default=0)
        score = metric_sign(found.metric) * (trial.scores.get(last) or 0.0)
        return -last, -score, trial.number

    rows = []
    for trial in sorted(found.trials, key=rank):
        outcome = "ran to the end"
        if trial.number == found.chosen:
            outcome = "chosen"
        elif trial.number in found.within:
            outcome = "within the error of the best"
        elif trial.stopped_after is not None:
            outcome = f"stopped after round {trial.stopped_after}"
        # Blank if the trial was stopped before; a dash is a missing score.
        known = trial.scores
        scores = [metric_value(found.metric, known[n]) if n in known else "" for n in rounds]
        texts = [str(trial.number), format_settings(trial.changes), *scores, outcome]
        rows.append([cell(text, strong=trial.number == found.chosen) for text in texts])
    return {
        "caption": f"Validation {metric_title(found.metric)} at each step; "
        "the longest trials first",
        "columns": ["trial", "hyperparameters", *(f"round {each}" for each in rounds), "outcome"],
        "rows": rows,
        "notes": notes,
    }


def _known_scores(trial: Trial) -> dict[int, float]:
    """Return the known scores by round."""
    return {each: score for each, score in sorted(trial.scores.items()) if score is not None}


def format_settings(values: dict[str, Any]) -> str:
    """Return hyperparameters by the names of their flags."""
    said = [f"{_flag(name)} {value}" for name, value in values.items() if value is not None]
    return ", ".join(said) or "defaults"


def _flag(name: str) -> str:
    return name.replace("__", ".").replace("_", "-")


def scores_drawing(searches: Sequence[TuningResult]) -> Drawing:
    """Return the validation accuracy of every trial per round, a panel per method."""
    panels = [Panel(partial(_draw_scores, found=each), each.method) for each in searches]
    note = "Gray: other trials. A line ends at the round after which its trial was stopped."
    return Drawing("Validation scores of hyperparameters", note, panels, (6.4, 3.6), columns=1)


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
    axes.set(xlabel="round", ylabel=f"validation {metric_title(found.metric)}")
    mark_rounds(axes)
    axes.legend(loc="best", fontsize=8)
