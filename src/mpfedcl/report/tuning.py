"""The hyperparameter searches in a report: trials, scores and the chosen values."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.json_files import Json, read_json_file
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.wording import describe_partition
from mpfedcl.report.figures import PALETTE, SOFT, Drawing, Panel, escape_math
from mpfedcl.report.file_schemas import SearchRecord, SearchTrial, TuningFile
from mpfedcl.report.formatting import rounded
from mpfedcl.report.reproduction import tune_command
from mpfedcl.report.tables import PREDICTOR_TITLES, percent

_MOST_LINES = 12
"""Lines of a figure that can still be told apart."""
_FLATTERED = (
    "The score of the chosen trial is the best of many and therefore optimistic; only a run on test "
    "samples shows how good it is."
)
_NO_SCORE = "-: no accuracy, because training diverged or no client could be evaluated."


@dataclass(frozen=True)
class _ReadSearch:
    """A search and its base experiment."""

    record: SearchRecord
    base: Experiment

    def score(self, number: int) -> float | None:
        """Return the score of a trial in the last round."""
        return self.record.trials[number].scores.get(self.record.rungs[-1].rounds)


def describe_tuning(files: Sequence[Path]) -> Json:
    """Return the section of searches: a row each, then each in full."""
    found = [each for file in files for each in _read(file)]
    settings = list(dict.fromkeys(_describe_setting(each) for each in found))
    # Without a search space there is no rule.
    tried = [each.record for each in found if each.record.search_space_used]
    rules = list(dict.fromkeys(map(_describe_rule, tried)))
    methods = list(dict.fromkeys(each.record.method for each in found))
    of_what = f"{len(methods)} methods" if len(methods) > 1 else "".join(methods)
    return {
        "kind": "tuning",
        "title": f"Tuning of {of_what} on "
        + ", ".join(dict.fromkeys(each.base.dataset.name for each in found)),
        # Common sentences are said once.
        "about": [f"{each}." for each in settings[:1] if len(settings) == 1]
        + [each for each in rules if len(rules) == 1],
        "tables": [_overview_table(found, with_setting=len(settings) > 1)],
        "searches": [
            {
                "title": each.record.method
                + (f" on {_describe_setting(each)}" if len(settings) > 1 else "")
                + ": trials",
                "table": _trials_table(
                    each, rule=_describe_rule(each.record) if len(rules) > 1 else None
                ),
                "figure": _figure(each),
            }
            for each in found
        ],
        "command": _command(found),
    }


def _read(path: Path) -> list[_ReadSearch]:
    """Return the searches of a file: of all methods, or of one in its own folder."""
    records = read_json_file(path, TuningFile).methods.values()
    try:
        return [_ReadSearch(record, Experiment(**record.base)) for record in records]
    except (InvalidInput, TypeError) as error:
        raise InvalidInput(f"{path} is not as mpfedcl writes it: {error}") from None


def _describe_setting(found: _ReadSearch) -> str:
    base = found.base
    return f"{base.dataset.name}, {describe_partition(base, with_seed=False)}, {base.rounds} rounds"


def _describe_rule(record: SearchRecord) -> str:
    """Return how trials were run and one was chosen."""
    first, *following = record.rungs
    steps = [f"{first.settings} trials ran to round {first.rounds}"]
    steps += [f"the best {rung.settings} to round {rung.rounds}" for rung in following]
    always = ", and the defaults always to the end" if following else ""
    seeds = ", ".join(str(seed) for seed in record.seeds)
    plural = "s" if len(record.seeds) > 1 else ""
    return (
        f"For each method {', '.join(steps)}{always}. The score is the primary metric in % on "
        f"{100 * record.validation:g} % of each client's training samples, held out; test samples "
        f"were not used. It is the mean over clients, seed{plural} {seeds}. Of all trials within "
        f"{record.tolerance:g} times the standard error of the best in the last round, the one with "
        f"the fewest changes to the defaults was chosen, then the best. {_FLATTERED}"
    )


def _overview_table(found: Sequence[_ReadSearch], *, with_setting: bool) -> Json:
    rows = []
    for each in found:
        record = each.record
        place = _describe_setting(each) if with_setting else PREDICTOR_TITLES[record.predictor]
        rows.append(
            [
                {"text": record.method, "note": place},
                {
                    "text": format_settings(record.trials[record.chosen].changes)
                    if record.search_space_used
                    else "no search space"
                },
                {"text": percent(each.score(record.chosen)), "strong": True},
                {"text": percent(record.standard_error)},
                {"text": percent(each.score(0))},
                {"text": str(len(record.trials))},
                {"text": f"{record.rounds_run:,}"},
            ]
        )
    return {
        "caption": "Chosen hyperparameters and validation accuracy in % of the last round",
        "columns": ["method", "chosen", "score", "± error", "defaults", "trials", "rounds run"],
        "rows": rows,
        "notes": ["± error: standard error of the best score."],
    }


def _trials_table(found: _ReadSearch, *, rule: str | None) -> Json:
    record = found.record
    rounds = [rung.rounds for rung in record.rungs]
    grid = "; ".join(
        f"{_flag(name)} {', '.join(str(value) for value in values)}"
        for name, values in record.search_space_used.items()
    )
    defaults = format_settings(record.trials[0].values)
    has_gaps = any(None in trial.scores.values() for trial in record.trials)
    return {
        "caption": "Validation accuracy in % at each step; the longest trials first",
        "columns": ["trial", "hyperparameters", *(f"round {each}" for each in rounds), "outcome"],
        "rows": [_trial_row(trial, record, rounds) for trial in _rank_trials(record)],
        "notes": [
            f"Search space: {grid}. Defaults: {defaults}."
            if grid
            else f"{record.method} has no search space; its defaults were run.",
            *([_NO_SCORE] if has_gaps else []),
            *([rule] if rule and grid else []),
        ],
    }


def _trial_row(trial: SearchTrial, record: SearchRecord, rounds: Sequence[int]) -> list[Json]:
    cells = [str(trial.number), format_settings(trial.changes)]
    # Blank if the trial was stopped before; a dash is a missing score.
    cells += [percent(trial.scores[each]) if each in trial.scores else "" for each in rounds]
    outcome = "ran to the end"
    if trial.number == record.chosen:
        outcome = "chosen"
    elif trial.number in record.within:
        outcome = "within the error of the best"
    elif trial.stopped_after is not None:
        outcome = f"stopped after round {trial.stopped_after}"
    is_chosen = trial.number == record.chosen
    return [{"text": text, "strong": is_chosen} for text in (*cells, outcome)]


def _rank_trials(record: SearchRecord) -> list[SearchTrial]:
    """Return the trials, the longest first, then by their last score."""

    def place(trial: SearchTrial) -> tuple[int, float, int]:
        furthest = max(trial.scores, default=0)
        score = trial.scores.get(furthest)
        return -furthest, 0.0 if score is None else -score, trial.number

    return sorted(record.trials, key=place)


def _figure(found: _ReadSearch) -> Json | None:
    """Return a line per trial, up to the round after which it was stopped."""
    record = found.record
    drawn = [trial for trial in _rank_trials(record) if _known_scores(trial)]
    if not drawn:
        return None
    kept = sorted(drawn[:_MOST_LINES], key=lambda trial: trial.number)
    return {
        "title": "Score per round",
        "description": "A line ends at the round after which its trial was stopped. Numbers as in "
        "the table." + (f" The {len(kept)} best are shown." if len(kept) < len(drawn) else ""),
        "lines": [
            {
                "name": ", ".join(
                    [
                        str(trial.number),
                        *(["defaults"] if trial.number == 0 else []),
                        *(["chosen"] if trial.number == record.chosen else []),
                    ]
                ),
                "x": list(_known_scores(trial)),
                "mean": [rounded(score) for score in _known_scores(trial).values()],
            }
            for trial in kept
        ],
    }


def _known_scores(trial: SearchTrial) -> dict[int, float]:
    """Return the known scores by round."""
    return {each: score for each, score in sorted(trial.scores.items()) if score is not None}


def format_settings(values: dict[str, Any]) -> str:
    """Return hyperparameters by the names of their flags."""
    said = [f"{_flag(name)} {value}" for name, value in values.items() if value is not None]
    return ", ".join(said) or "defaults"


def _flag(name: str) -> str:
    return name.replace("__", ".").replace("_", "-")


def _command(found: Sequence[_ReadSearch]) -> str | None:
    """Return the command that makes all the searches; None if it takes several."""
    names = {"budget", "seeds", "validation", "tolerance"}
    asked = [each.record.model_dump(include=names) for each in found]
    if any(each != asked[0] for each in asked):
        return None
    seeds = tuple(asked[0]["seeds"])
    return tune_command([each.base for each in found], asked[0] | {"seeds": seeds})


def scores_drawing(searches: Sequence[SearchRecord]) -> Drawing:
    """Return the validation accuracy of every trial per round, a panel per method."""
    panels = [Panel(partial(_draw_scores, search=each), each.method) for each in searches]
    note = "Gray: other trials. A line ends at the round after which its trial was stopped."
    return Drawing("Validation accuracy of hyperparameters", note, panels, (6.4, 3.6), columns=1)


def _draw_scores(axes: Axes, search: SearchRecord) -> None:
    for trial in search.trials:
        known = _known_scores(trial)
        style: dict[str, Any] = {"color": SOFT, "lw": 1.0, "zorder": 1, "alpha": 0.6}
        if trial.number == 0:
            style = {"color": PALETTE[1], "lw": 1.8, "zorder": 2, "label": "defaults"}
        if trial.number == search.chosen:
            told = f"chosen: {format_settings(trial.changes)}"
            style = {"color": PALETTE[0], "lw": 2.2, "zorder": 3, "label": escape_math(told, 80)}
        axes.plot(list(known), list(known.values()), marker="o", ms=4, **style)
    axes.set(xlabel="round", ylabel="validation accuracy (%)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.legend(loc="best", fontsize=8)
