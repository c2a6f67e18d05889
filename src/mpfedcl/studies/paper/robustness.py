"""The figures over an axis: K, degrees of skew, numbers of clients."""

from mpfedcl.studies.paper import measures
from mpfedcl.studies.paper.datasets import PaperDatasets
from mpfedcl.studies.paper.item import Cell, PaperItem
from mpfedcl.studies.paper.protocol import (
    FREQUENT_EVALUATION,
    RARE_EVALUATION,
    method_rounds,
    method_titles,
    paper_experiment,
)

_FEW = ("local", "fedavg", "fedproto", "sp-fedcl", "mp-fedcl")
_ALPHAS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
_SHARED = (0.5, 1.0)
"""Runs that the tables of efficiency read too, and more often."""
_COUNTS = (5, 10, 20, 40)
_MANY = (1, 2, 3, 4, 6, 8)


def prototypes_per_class_figure(datasets: PaperDatasets) -> PaperItem:
    """Return MP-FedCL with one to eight prototypes per class."""
    cells = [
        Cell(
            dataset,
            str(count),
            paper_experiment(dataset, "mp-fedcl", prototypes__per_class=count),
            measure,
        )
        for dataset in datasets.chosen.values()
        for count in _MANY
        for measure in (measures.OWN_TEST, measures.UNION_TEST)
    ]
    return PaperItem(
        "k",
        "Choosing K",
        "MP-FedCL with K prototypes per class under label skew Dir(0.05), 60 rounds.",
        datasets.titles,
        {str(count): str(count) for count in _MANY},
        tuple(cells),
        axis="K, prototypes per class",
        notes=("The paper has a figure for K = 2, 3, 4 and picks 2, 4, 4 and 3.",),
    )


def label_skew_figure(datasets: PaperDatasets) -> PaperItem:
    """Return five methods from Dir(0.1) to Dir(1.0)."""
    cells = [
        Cell(
            method,
            f"{alpha:g}",
            paper_experiment(
                dataset,
                method,
                method_rounds(method, 100),
                partition__alpha=alpha,
                evaluate_every=FREQUENT_EVALUATION if alpha in _SHARED else RARE_EVALUATION,
            ),
            measure,
            datasets.title(dataset),
        )
        for dataset in datasets.select("digit5", "office10")
        for method in _FEW
        for alpha in _ALPHAS
        for measure in (measures.OWN_TEST, measures.UNION_TEST)
    ]
    return PaperItem(
        "alpha",
        "Degrees of label skew",
        "From Dir(0.1), where clients hold few classes, to Dir(1.0); MP-FedCL and SP-FedCL 60 "
        "rounds, the others 100.",
        method_titles(_FEW),
        {f"{alpha:g}": f"{alpha:g}" for alpha in _ALPHAS},
        tuple(cells),
        axis="alpha",
    )


def client_count_figure(datasets: PaperDatasets) -> PaperItem:
    """Return four methods with 5 to 40 clients."""
    methods = method_titles(("local", "fedavg", "fedproto", "mp-fedcl"))
    cells = [
        Cell(
            method,
            str(count),
            paper_experiment(
                dataset, method, method_rounds(method, 100), partition__alpha=0.1, clients=count
            ),
            measure,
            datasets.title(dataset),
        )
        for dataset in datasets.select("mnist", "digit5")
        for method in methods
        for count in _COUNTS
        # MNIST has one test for all: the global test set would show the same once more.
        for measure in (measures.OWN_TEST, measures.UNION_TEST)[
            : 1 if dataset == datasets.chosen["mnist"] else 2
        ]
    ]
    return PaperItem(
        "clients",
        "Numbers of clients",
        "The same images split by Dir(0.1) among 5 and up to 40 clients; MP-FedCL 60 rounds, the "
        "others 100.",
        methods,
        {str(count): str(count) for count in _COUNTS},
        tuple(cells),
        axis="clients",
        notes=("MNIST's local test set is everybody's, so it is the global test set too.",),
    )
