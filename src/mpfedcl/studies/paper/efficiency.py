"""The tables of communication efficiency: the same runs, seen in four ways."""

from typing import Any

from mpfedcl.experiment import Experiment
from mpfedcl.studies.paper import measures, published
from mpfedcl.studies.paper.datasets import PaperDatasets
from mpfedcl.studies.paper.item import Cell, Curves, PaperItem
from mpfedcl.studies.paper.protocol import (
    FREQUENT_EVALUATION,
    METHODS,
    ROUNDS,
    find_published,
    method_rounds,
    method_titles,
    paper_experiment,
)

_COMPARED = ("fedavg", "fedproto", "dp-fedcl", "sp-fedcl", "mp-fedcl")
_AT_ROUNDS = (5, 10, 20, 30, 60)
_LEVELS = {"digit5": (30, 40, 50, 60), "office10": (40, 50, 60, 70)}
_SKEWS = {"label": "label skew, Dir(0.5)", "feature": "feature skew"}
_STEPS = f"Runs are evaluated every {FREQUENT_EVALUATION} rounds, so results come in such steps."


def _skewed(dataset: str, method: str, skew: str) -> Experiment:
    """Return the runs of the efficiency tables."""
    rounds = ROUNDS if method == "local" else method_rounds(method, 130)
    changes: dict[str, Any] = (
        {"partition__alpha": 0.5} if skew == "label" else {"partition__kind": "feature"}
    )
    return paper_experiment(dataset, method, rounds, evaluate_every=FREQUENT_EVALUATION, **changes)


def final_accuracy_table(datasets: PaperDatasets) -> PaperItem:
    """Return accuracy after the rounds that each method gets."""
    rows = ("local", *_COMPARED)
    cells = []
    for dataset in datasets.select("digit5", "office10"):
        for method in rows:
            for skew in _SKEWS:
                known = published.EFFICIENCY[dataset].get(method, {})
                for measure in (measures.OWN_TEST, measures.UNION_TEST):
                    paper = find_published(known, skew) if measure is measures.OWN_TEST else None
                    base = _skewed(dataset, method, skew)
                    cells.append(Cell(method, skew, base, measure, datasets.title(dataset), paper))
    return PaperItem(
        "efficiency",
        "Communication efficiency: accuracy after the rounds used",
        "Label skew Dir(0.5) and feature skew; FedAvg and FedProto 130 rounds, the FedCL family "
        "60, Local 60 epochs without any communication.",
        method_titles(rows),
        _SKEWS,
        tuple(cells),
    )


def accuracy_at_rounds_figure(datasets: PaperDatasets) -> PaperItem:
    """Return accuracy on the way there."""
    cells = [
        Cell(
            method,
            str(count),
            _skewed(dataset, method, skew),
            measures.accuracy_after(count),
            f"{datasets.title(dataset)}, {title}",
        )
        for dataset in datasets.select("digit5", "office10")
        for skew, title in _SKEWS.items()
        for method in _COMPARED
        for count in _AT_ROUNDS
    ]
    return PaperItem(
        "rounds",
        "Communication efficiency: accuracy at given rounds",
        "The same runs after different numbers of rounds.",
        method_titles(_COMPARED),
        {str(count): str(count) for count in _AT_ROUNDS},
        tuple(cells),
        axis="rounds",
    )


def rounds_to_accuracy_table(datasets: PaperDatasets) -> PaperItem:
    """Return when an accuracy is reached, and what it took."""
    cells = [
        Cell(
            method,
            f"{level}",
            _skewed(dataset, method, skew),
            make(level),
            f"{datasets.title(dataset)}, {title}",
        )
        for dataset in datasets.select("digit5", "office10")
        for skew, title in _SKEWS.items()
        for make in (measures.rounds_to_accuracy, measures.megabytes_to_accuracy)
        for method in _COMPARED
        for level in _LEVELS[dataset]
    ]
    levels = sorted(
        {level for dataset in datasets.select("digit5", "office10") for level in _LEVELS[dataset]}
    )
    return PaperItem(
        "reach",
        "Communication efficiency: rounds and megabytes to reach an accuracy",
        "The same runs: when an accuracy on the clients' local test sets is first reached, and what all "
        "clients together have sent and received by then.",
        method_titles(_COMPARED),
        {f"{level}": f"{level} %" for level in levels},
        tuple(cells),
        notes=(_STEPS, "A dash: the run of at least one seed never reached it."),
    )


def equal_time_table(datasets: PaperDatasets) -> PaperItem:
    """Return accuracy at the same training time."""
    cells = []
    for dataset in datasets.select("digit5", "office10"):
        for method in _COMPARED:
            for skew in _SKEWS:
                known = published.EQUAL_TIME[dataset].get(method, {})
                cells.append(
                    Cell(
                        method,
                        skew,
                        _skewed(dataset, method, skew),
                        measures.EQUAL_TIME,
                        datasets.title(dataset),
                        find_published(known, skew),
                        compared_with=_skewed(dataset, "mp-fedcl", skew),
                    )
                )
    return PaperItem(
        "time",
        "Communication efficiency: the same training time",
        "Every method is evaluated when it has trained as long as MP-FedCL takes for its 60 "
        "rounds with the same seed, evaluation and checkpoints left out.",
        method_titles(_COMPARED),
        _SKEWS,
        tuple(cells),
        notes=(
            "Times depend on the machine and on what else ran on it; a method that finishes early "
            "is evaluated at its end.",
            _STEPS,
        ),
    )


def accuracy_curves_figure(datasets: PaperDatasets) -> PaperItem:
    """Return the curves of accuracy per round."""
    rows = ("fedavg", "fedproto", "sp-fedcl", "mp-fedcl")
    figures = []
    for dataset in datasets.select("digit5"):
        runs = {
            METHODS[method]: paper_experiment(
                dataset,
                method,
                method_rounds(method, 100),
                partition__alpha=1.0,
                evaluate_every=FREQUENT_EVALUATION,
            )
            for method in rows
        }
        figures.append(Curves(f"{datasets.title(dataset)}, label skew Dir(1.0)", runs))
    for dataset in datasets.select("office10"):
        runs = {METHODS[method]: _skewed(dataset, method, "feature") for method in rows}
        figures.append(Curves(f"{datasets.title(dataset)}, feature skew", runs))
    return PaperItem(
        "curves",
        "Accuracy per round",
        "The clients' local test sets, mean and deviation over seeds.",
        {},
        {},
        curves=tuple(figures),
    )
