"""The tables of communication efficiency: the same runs, looked at in four ways."""

from typing import Any

from mpfedcl.experiment import Experiment
from mpfedcl.studies.paper import measures, published
from mpfedcl.studies.paper.item import Cell, Curves, Item
from mpfedcl.studies.paper.protocol import (
    METHODS,
    OFTEN,
    ROUNDS,
    experiment,
    number,
    only,
    rounds_of,
)
from mpfedcl.studies.paper.sets import Sets

_AT_ROUNDS = (5, 10, 20, 30, 60)
_LEVELS = {"digit5": (30, 40, 50, 60), "office10": (40, 50, 60, 70)}
_SKEWS = {"label": "label skew, Dir(0.5)", "feature": "feature skew"}
_STEPS = f"Runs are read every {OFTEN} rounds, so results come in such steps."


def _skewed(ours: str, method: str, skew: str) -> Experiment:
    """Return the runs of the efficiency tables."""
    rounds = ROUNDS if method == "local" else rounds_of(method, 130)
    changes: dict[str, Any] = (
        {"partition__alpha": 0.5} if skew == "label" else {"partition__kind": "feature"}
    )
    return experiment(ours, method, rounds, evaluate_every=OFTEN, **changes)


def after_the_rounds(sets: Sets) -> Item:
    """Return accuracy after the rounds that each method gets."""
    rows = ("local", "fedavg", "fedproto", "dp-fedcl", "sp-fedcl", "mp-fedcl")
    cells = []
    for ours in sets.pick("digit5", "office10"):
        for method in rows:
            for skew in _SKEWS:
                known = published.EFFICIENCY[ours].get(method, {})
                for measure in (measures.OWN, measures.UNION):
                    paper = number(known, skew) if measure is measures.OWN else None
                    base = _skewed(ours, method, skew)
                    cells.append(Cell(method, skew, base, measure, sets.title(ours), paper))
    return Item(
        "efficiency",
        "Communication efficiency: accuracy after the rounds used",
        "Label skew Dir(0.5) and feature skew; FedAvg and FedProto 130 rounds, the FedCL family "
        "60, Local 60 epochs without any communication.",
        only(rows),
        _SKEWS,
        tuple(cells),
    )


def at_rounds(sets: Sets) -> Item:
    """Return accuracy on the way there."""
    rows = ("fedavg", "fedproto", "dp-fedcl", "sp-fedcl", "mp-fedcl")
    cells = [
        Cell(
            method,
            str(count),
            _skewed(ours, method, skew),
            measures.accuracy_after(count),
            f"{sets.title(ours)}, {title}",
        )
        for ours in sets.pick("digit5", "office10")
        for skew, title in _SKEWS.items()
        for method in rows
        for count in _AT_ROUNDS
    ]
    return Item(
        "rounds",
        "Communication efficiency: accuracy at given rounds",
        "The same runs, read after so many rounds.",
        only(rows),
        {str(count): str(count) for count in _AT_ROUNDS},
        tuple(cells),
        axis="rounds",
    )


def to_reach(sets: Sets) -> Item:
    """Return when an accuracy is reached, and what it took."""
    rows = ("fedavg", "fedproto", "dp-fedcl", "sp-fedcl", "mp-fedcl")
    cells = [
        Cell(
            method,
            f"{level}",
            _skewed(ours, method, skew),
            make(level),
            f"{sets.title(ours)}, {title}",
        )
        for ours in sets.pick("digit5", "office10")
        for skew, title in _SKEWS.items()
        for make in (measures.rounds_to, measures.megabytes_to)
        for method in rows
        for level in _LEVELS[ours]
    ]
    levels = sorted({level for ours in sets.pick("digit5", "office10") for level in _LEVELS[ours]})
    return Item(
        "reach",
        "Communication efficiency: rounds and megabytes to reach an accuracy",
        "The same runs: when an accuracy on the clients' own tests is first read, and what all "
        "clients together have sent and received by then.",
        only(rows),
        {f"{level}": f"{level} %" for level in levels},
        tuple(cells),
        notes=(_STEPS, "A dash says that the run of some seed never got there."),
    )


def at_the_same_time(sets: Sets) -> Item:
    """Return accuracy at the same training time."""
    rows = ("fedavg", "fedproto", "dp-fedcl", "sp-fedcl", "mp-fedcl")
    cells = []
    for ours in sets.pick("digit5", "office10"):
        for method in rows:
            for skew in _SKEWS:
                known = published.SAME_TIME[ours].get(method, {})
                cells.append(
                    Cell(
                        method,
                        skew,
                        _skewed(ours, method, skew),
                        measures.SAME_TIME,
                        sets.title(ours),
                        number(known, skew),
                        against=_skewed(ours, "mp-fedcl", skew),
                    )
                )
    return Item(
        "time",
        "Communication efficiency: the same training time",
        "Every method is read when it has trained as long as MP-FedCL takes for its 60 rounds with "
        "the same seed, evaluation and checkpoints left out.",
        only(rows),
        _SKEWS,
        tuple(cells),
        notes=(
            "Times are of the machine and of what else ran on it; a method that is done before the "
            "time is up is read at its end.",
            _STEPS,
        ),
    )


def per_round(sets: Sets) -> Item:
    """Return the curves of accuracy per round."""
    rows = ("fedavg", "fedproto", "sp-fedcl", "mp-fedcl")
    figures = []
    for ours in sets.pick("digit5"):
        runs = {
            METHODS[method]: experiment(
                ours, method, rounds_of(method, 100), partition__alpha=1.0, evaluate_every=OFTEN
            )
            for method in rows
        }
        figures.append(Curves(f"{sets.title(ours)}, label skew Dir(1.0)", runs))
    for ours in sets.pick("office10"):
        runs = {METHODS[method]: _skewed(ours, method, "feature") for method in rows}
        figures.append(Curves(f"{sets.title(ours)}, feature skew", runs))
    return Item(
        "curves",
        "Accuracy per round",
        "The clients' own tests, mean and deviation over seeds.",
        {},
        {},
        curves=tuple(figures),
    )
