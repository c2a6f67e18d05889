"""The figures over an axis: K, degrees of skew, numbers of clients."""

from mpfedcl.studies.paper import measures
from mpfedcl.studies.paper.item import Cell, Item
from mpfedcl.studies.paper.protocol import OFTEN, SELDOM, experiment, only, rounds_of
from mpfedcl.studies.paper.sets import Sets

_FEW = ("local", "fedavg", "fedproto", "sp-fedcl", "mp-fedcl")
_ALPHAS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
_SHARED = (0.5, 1.0)
"""Runs that the tables of efficiency read too, and more often."""
_COUNTS = (5, 10, 20, 40)
_MANY = (1, 2, 3, 4, 6, 8)


def choose_k(sets: Sets) -> Item:
    """Return MP-FedCL with one to eight prototypes a class."""
    cells = [
        Cell(
            ours,
            str(count),
            experiment(ours, "mp-fedcl", prototypes__per_class=count),
            measure,
        )
        for ours in sets.all.values()
        for count in _MANY
        for measure in (measures.OWN, measures.UNION)
    ]
    return Item(
        "k",
        "Choosing K",
        "MP-FedCL with K prototypes a class under label skew Dir(0.05), 60 rounds.",
        sets.titles,
        {str(count): str(count) for count in _MANY},
        tuple(cells),
        axis="K, prototypes a class",
        notes=("The paper has a figure for K = 2, 3, 4 and picks 2, 4, 4 and 3.",),
    )


def degrees_of_skew(sets: Sets) -> Item:
    """Return five methods from Dir(0.1) to Dir(1.0)."""
    cells = [
        Cell(
            method,
            f"{alpha:g}",
            experiment(
                ours,
                method,
                rounds_of(method, 100),
                partition__alpha=alpha,
                evaluate_every=OFTEN if alpha in _SHARED else SELDOM,
            ),
            measure,
            sets.title(ours),
        )
        for ours in sets.pick("digit5", "office10")
        for method in _FEW
        for alpha in _ALPHAS
        for measure in (measures.OWN, measures.UNION)
    ]
    return Item(
        "alpha",
        "Degrees of label skew",
        "From Dir(0.1), where clients hold few classes, to Dir(1.0); MP-FedCL and SP-FedCL 60 "
        "rounds, the others 100.",
        only(_FEW),
        {f"{alpha:g}": f"{alpha:g}" for alpha in _ALPHAS},
        tuple(cells),
        axis="alpha",
    )


def numbers_of_clients(sets: Sets) -> Item:
    """Return four methods with 5 to 40 clients."""
    methods = only(("local", "fedavg", "fedproto", "mp-fedcl"))
    cells = [
        Cell(
            method,
            str(count),
            experiment(ours, method, rounds_of(method, 100), partition__alpha=0.1, clients=count),
            measure,
            sets.title(ours),
        )
        for ours in sets.pick("mnist", "digit5")
        for method in methods
        for count in _COUNTS
        # MNIST has one test for all: the union test would show the same once more.
        for measure in (measures.OWN, measures.UNION)[: 1 if ours == sets.all["mnist"] else 2]
    ]
    return Item(
        "clients",
        "Numbers of clients",
        "The same images dealt out by Dir(0.1) to 5 and up to 40 clients; MP-FedCL 60 rounds, the "
        "others 100.",
        methods,
        {str(count): str(count) for count in _COUNTS},
        tuple(cells),
        axis="clients",
        notes=("MNIST's own test is everybody's, so it is the union test too.",),
    )
