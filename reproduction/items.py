"""Every table and figure of the paper as data: experiments, cells, and the published values."""

import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mpfedcl import Experiment

PUBLISHED = tomllib.loads((Path(__file__).parent / "published.toml").read_text(encoding="utf-8"))
METHODS = {
    "local": "Local",
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "fedproto": "FedProto",
    "dp-fedcl": "DP-FedCL",
    "sp-fedcl": "SP-FedCL",
    "mp-fedcl": "MP-FedCL",
}
FAMILY = ("dp-fedcl", "sp-fedcl", "mp-fedcl")
PREDICTORS: dict[str, Any] = {
    "local": "personal_classifier",
    "fedavg": "global_classifier",
    "fedprox": "global_classifier",
    **dict.fromkeys(("fedproto", *FAMILY), "personal_prototype"),
}
"""As in the paper, on every test."""
TRACKS = {"paper": "the paper's settings", "tuned": "each method tuned on validation data"}
ROUNDS = 60
OFTEN, RARELY = 5, 20
"""Rounds between two evaluations, which take longer than training."""
DOMAINS = {
    "mnist": ("mnist",),
    "digit5": ("mnist", "mnist_m", "svhn", "synth", "usps"),
    "office10": ("amazon", "caltech", "dslr", "webcam"),
    "domainnet": ("clipart", "infograph", "painting", "quickdraw", "real", "sketch"),
    "sixdomain": ("art_painting", "cartoon", "clipart", "photo", "quickdraw", "sketch"),
}
TITLES = {
    "mnist": "MNIST",
    "mnist-sample": "MNIST sample",
    "digit5": "Digit-5",
    "office10": "Office-10",
    "domainnet": "DomainNet",
    "sixdomain": "sixdomain",
}
STAND_INS = {"mnist": "mnist-sample", "domainnet": "sixdomain"}
"""Shown under their own names, and without the paper's values."""
SKEWS = {"label": "label skew, Dir(0.5)", "feature": "feature skew"}
COMPARED = ("fedavg", "fedproto", "dp-fedcl", "sp-fedcl", "mp-fedcl")
STEPS = f"Runs are evaluated every {OFTEN} rounds, so results come in such steps."


def data_file(dataset: str, domain: str) -> Path:
    """Return where a domain of a data set is: a folder of images, or an archive."""
    folder = Path(os.environ.get("MPFEDCL_DATA", "no data folder")) / dataset / domain
    return folder if folder.is_dir() else folder.with_suffix(".npz")


class Sets:
    """The paper's data sets that are in the data folder, or what stands in for them."""

    @cached_property
    def chosen(self) -> dict[str, str]:
        """The set that each of the paper's sets is run on."""
        chosen: dict[str, str] = {}
        for name in PUBLISHED["sent"]:
            for each in (name, STAND_INS.get(name, name)):
                files = [data_file(each, domain) for domain in DOMAINS.get(each, ())]
                # With all its domains: the paper's averages are over all.
                if all(file.exists() for file in files) and (files or each == "mnist-sample"):
                    chosen.setdefault(name, each)
        return chosen

    @property
    def missing(self) -> list[str]:
        """What is said of the paper's sets that are not run themselves."""
        return [
            f"{TITLES[name]} is not in the data folder as a whole; "
            + (f"{TITLES[self.chosen[name]]} stands in." if name in self.chosen else "left out.")
            for name in PUBLISHED["sent"]
            if self.chosen.get(name) != name
        ]

    @property
    def titles(self) -> dict[str, str]:
        """Titles of the sets that are run."""
        return {each: TITLES[each] for each in self.chosen.values()}

    def select(self, *names: str) -> list[str]:
        """Return what some of the paper's sets are run on, as far as they can be."""
        return [self.chosen[name] for name in names if name in self.chosen]


@dataclass(frozen=True)
class Cell:
    """One value of a table, for each seed."""

    row: str
    column: str
    experiment: Experiment
    """Everything but the seed; in the tuned track before settings are chosen."""
    measure: tuple[str, Any] = ("last", "local_test")
    """A name of `paper.MEASURES`, and its argument."""
    panel: str = ""
    published: tuple[float, ...] | None = None
    track: str = "paper"
    compared_with: Experiment | None = None


@dataclass(frozen=True)
class Item:
    """A table or figure of the paper."""

    title: str
    about: str
    rows: Mapping[str, str]
    columns: Mapping[str, str]
    cells: tuple[Cell, ...] = ()
    axis: str = ""
    """What the columns are if they are numbers; the cells are then drawn as lines too."""
    compares_tests: bool = False
    curves: Mapping[str, Mapping[str, Experiment]] | None = None
    """Accuracy by round: figures, each with several runs."""
    pictures: Mapping[str, Mapping[str, Experiment]] | None = None
    notes: tuple[str, ...] = ()

    def experiments(self, track: str) -> list[Experiment]:
        """Return every experiment that must have run, without seeds."""
        cells = [cell for cell in self.cells if cell.track == track]
        found = [cell.experiment for cell in cells]
        found += [cell.compared_with for cell in cells if cell.compared_with is not None]
        if track == "paper":
            for several in {**(self.curves or {}), **(self.pictures or {})}.values():
                found += several.values()
        return found


TESTS = (("last", "local_test"), ("last", "global_test"))


def experiment(dataset: str, method: str, rounds: int = ROUNDS, **changes: Any) -> Experiment:
    """Return an experiment of the paper: its settings are the defaults."""
    common = {
        "evaluate_every": RARELY,
        # Tables have the paper's predictor also where a method's primary metric has another.
        "evaluate_predictors": "all",
        "personal_models": False,
    }
    changes = {**common, **changes}
    return Experiment().replace(dataset__name=dataset, method=method, rounds=rounds, **changes)


def rounds_of(method: str, others: int) -> int:
    """Return 60 for the FedCL family, and what the others get."""
    return ROUNDS if method in FAMILY else others


def skewed(dataset: str, method: str, skew: str) -> Experiment:
    """Return the runs of the efficiency tables."""
    rounds = ROUNDS if method == "local" else rounds_of(method, 130)
    kind = {"partition__alpha": 0.5} if skew == "label" else {"partition__kind": "feature"}
    return experiment(dataset, method, rounds, evaluate_every=OFTEN, **kind)


def _some(*methods: str) -> dict[str, str]:
    return {method: METHODS[method] for method in methods}


def _cells(
    datasets: Sequence[str],
    methods: Iterable[str],
    columns: Mapping[str, Any],
    make: Callable[[str, str, Any], Experiment],
    measures: Sequence[tuple[str, Any]] = TESTS,
    published: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Cell, ...]:
    """Return a cell per data set (a panel), method, column and measure.

    `make` gets the data set, the method and the value of the column; the first measure is the one
    that the paper prints.
    """
    return tuple(
        Cell(
            method,
            column,
            make(dataset, method, value),
            measure,
            TITLES[dataset],
            published.get(dataset, {}).get(method, {}).get(column) if not place else None,
        )
        for dataset in datasets
        for method in methods
        for column, value in columns.items()
        for place, measure in enumerate(measures)
    )


def _sent(sets: Sets) -> Item:
    columns = {"parameters": "parameters", "prototypes": "prototype floats"}
    cells = [
        Cell(
            dataset,
            column,
            experiment(dataset, "mp-fedcl", 1, partition__kind="iid"),
            ("sent", columns[column].replace(" ", "_")),
            published=(PUBLISHED["sent"][name][place],) if name == dataset else None,
        )
        for name, dataset in sets.chosen.items()
        for place, column in enumerate(columns)
    ]
    return Item(
        "Parameters and prototypes sent",
        "What a client sends in a round when it holds all classes (IID partition).",
        sets.titles,
        columns,
        tuple(cells),
        notes=("Under label skew a client holds fewer classes and sends fewer prototypes.",),
    )


def _label(sets: Sets) -> Item:
    rounds = dict.fromkeys(METHODS, ROUNDS) | {"fedavg": 110, "fedprox": 100, "fedproto": 100}
    cells = []
    for track, method, (name, dataset) in product(TRACKS, METHODS, sets.chosen.items()):
        base = experiment(dataset, method, ROUNDS if track == "tuned" else rounds[method])
        is_known = name == dataset and track == "paper"
        known = PUBLISHED["label_skew"].get(method, {}).get(name) if is_known else None
        cells.append(Cell(method, dataset, base, TESTS[0], "", known, track))
        cells.append(Cell(method, dataset, base, TESTS[1], track=track))
    return Item(
        "Label skew, Dir(0.05)",
        "Seven methods on four data sets whose classes are spread unevenly over the clients. "
        "Paper track: FedAvg 110 rounds, FedProx and FedProto 100, the others 60.",
        METHODS,
        sets.titles,
        tuple(cells),
        compares_tests=True,
        notes=(
            "On MNIST all clients share one test set, so the local and the global test set are the "
            "same there; on the other sets a client's local test set holds its own classes only.",
            "Tuned track: 60 rounds for all; the paper prints no such values; its values are shown "
            "in the paper track only.",
        ),
    )


def _feature(sets: Sets) -> Item:
    datasets = sets.select("digit5", "office10", "domainnet")
    cells = []
    for dataset, track, method in product(datasets, TRACKS, METHODS):
        others = ROUNDS if track == "tuned" or method == "local" else 130
        # Runs that the efficiency tables share.
        every = OFTEN if dataset in ("digit5", "office10") else RARELY
        kind = {"partition__kind": "feature", "evaluate_every": every}
        base = experiment(dataset, method, rounds_of(method, others), **kind)
        known = PUBLISHED["feature_skew_digits"].get(method, {})
        known = known if (dataset, track) == ("digit5", "paper") else {}
        shown: dict[str, tuple[str, Any]] = {each: ("client", each) for each in DOMAINS[dataset]}
        shown |= {"average": TESTS[0], "global_test": ("column", "global_test")}
        for column, measure in shown.items():
            panel, paper = TITLES[dataset], known.get(column)
            cells.append(Cell(method, column, base, measure, panel, paper, track))
    domains = {domain: domain for dataset in datasets for domain in DOMAINS[dataset]}
    return Item(
        "Feature skew, one domain per client",
        "Every client has all classes, drawn from a domain of its own and tested on it; average "
        "over the domains, and the same models on all domains' tests together (global test set). "
        "Paper track: FedAvg, FedProx and FedProto 130 rounds, the others 60.",
        METHODS,
        {"average": "average", "global_test": "global test set", **domains},
        tuple(cells),
        notes=(
            "The paper's deviation of the average is the mean of the domains' deviations; ours is "
            "the deviation of the average over seeds.",
        ),
    )


def _k(sets: Sets) -> Item:
    numbers = {str(number): number for number in (1, 2, 3, 4, 6, 8)}
    cells = [
        Cell(dataset, name, experiment(dataset, "mp-fedcl", prototypes__per_class=number), test)
        for dataset in sets.chosen.values()
        for name, number in numbers.items()
        for test in TESTS
    ]
    return Item(
        "Choosing K",
        "MP-FedCL with K prototypes per class under label skew Dir(0.05), 60 rounds.",
        sets.titles,
        {name: name for name in numbers},
        tuple(cells),
        axis="K, prototypes per class",
        notes=("The paper has a figure for K = 2, 3, 4 and picks 2, 4, 4 and 3.",),
    )


def _alpha(sets: Sets) -> Item:
    methods = _some("local", "fedavg", "fedproto", "sp-fedcl", "mp-fedcl")
    alphas = {f"{alpha:g}": alpha for alpha in (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)}

    def make(dataset: str, method: str, alpha: float) -> Experiment:
        # Runs that the efficiency tables share.
        every = OFTEN if alpha in (0.5, 1.0) else RARELY
        changes = {"partition__alpha": alpha, "evaluate_every": every}
        return experiment(dataset, method, rounds_of(method, 100), **changes)

    return Item(
        "Degrees of label skew",
        "From Dir(0.1), where clients hold few classes, to Dir(1.0); MP-FedCL and SP-FedCL 60 "
        "rounds, the others 100.",
        methods,
        {name: name for name in alphas},
        _cells(sets.select("digit5", "office10"), methods, alphas, make),
        axis="alpha",
    )


def _clients(sets: Sets) -> Item:
    methods = _some("local", "fedavg", "fedproto", "mp-fedcl")
    counts = {str(count): count for count in (5, 10, 20, 40)}

    def make(dataset: str, method: str, count: int) -> Experiment:
        rounds = rounds_of(method, 100)
        return experiment(dataset, method, rounds, partition__alpha=0.1, clients=count)

    return Item(
        "Numbers of clients",
        "The same images split by Dir(0.1) among 5 and up to 40 clients; MP-FedCL 60 rounds, the "
        "others 100.",
        methods,
        {name: name for name in counts},
        # Clients of MNIST share one test set.
        _cells(sets.select("mnist"), methods, counts, make, TESTS[:1])
        + _cells(sets.select("digit5"), methods, counts, make),
        axis="clients",
        notes=("On MNIST all clients share one test set, so it is the global test set too.",),
    )


def _efficiency(sets: Sets) -> Item:
    rows = _some("local", *COMPARED)
    datasets, known = sets.select("digit5", "office10"), PUBLISHED["efficiency"]
    columns = {skew: skew for skew in SKEWS}
    return Item(
        "Communication efficiency: accuracy after the rounds used",
        "Label skew Dir(0.5) and feature skew; FedAvg and FedProto 130 rounds, the FedCL family "
        "60, Local 60 epochs without any communication.",
        rows,
        SKEWS,
        _cells(datasets, rows, columns, skewed, TESTS, known),
    )


def _on_the_way(sets: Sets, arguments: Mapping[str, Any], *names: str) -> tuple[Cell, ...]:
    """Return cells of the efficiency runs: a panel per set and skew, a column per argument."""
    return tuple(
        Cell(
            method,
            str(argument),
            skewed(dataset, method, skew),
            (name, argument),
            f"{TITLES[dataset]}, {title}",
        )
        for dataset in sets.select("digit5", "office10")
        for skew, title in SKEWS.items()
        for name in names
        for method in COMPARED
        for argument in arguments[dataset]
    )


def _rounds(sets: Sets) -> Item:
    numbers = (5, 10, 20, 30, 60)
    return Item(
        "Communication efficiency: accuracy at given rounds",
        "The same runs after different numbers of rounds.",
        _some(*COMPARED),
        {str(number): str(number) for number in numbers},
        _on_the_way(sets, dict.fromkeys(("digit5", "office10"), numbers), "after"),
        axis="rounds",
    )


def _reach(sets: Sets) -> Item:
    levels = {"digit5": (30, 40, 50, 60), "office10": (40, 50, 60, 70)}
    used = sorted({each for name in sets.select(*levels) for each in levels[name]})
    return Item(
        "Communication efficiency: rounds and megabytes to reach an accuracy",
        "The same runs: when an accuracy on the clients' local test sets is first reached, and "
        "what all clients together have sent and received by then.",
        _some(*COMPARED),
        {f"{level}": f"{level} %" for level in used},
        _on_the_way(sets, levels, "rounds to", "megabytes to"),
        notes=(STEPS, "A dash: the run of at least one seed never reached it."),
    )


def _time(sets: Sets) -> Item:
    datasets, known = sets.select("digit5", "office10"), PUBLISHED["equal_time"]
    columns = {skew: skew for skew in SKEWS}
    cells = _cells(datasets, COMPARED, columns, skewed, [("same time", None)], known)
    return Item(
        "Communication efficiency: the same training time",
        "Every method is evaluated when it has trained as long as MP-FedCL takes for its 60 "
        "rounds with the same seed, evaluation and checkpoints left out.",
        _some(*COMPARED),
        SKEWS,
        tuple(
            replace(c, compared_with=skewed(c.experiment.dataset.name, "mp-fedcl", c.column))
            for c in cells
        ),
        notes=(
            "Times depend on the machine and on what else ran on it; a method that finishes early "
            "is evaluated at its end.",
            STEPS,
        ),
    )


def _curves(sets: Sets) -> Item:
    rows = _some("fedavg", "fedproto", "sp-fedcl", "mp-fedcl")
    changes = {"partition__alpha": 1.0, "evaluate_every": OFTEN}
    by_label = {
        title: experiment("digit5", method, rounds_of(method, 100), **changes)
        for method, title in rows.items()
    }
    by_domain = {title: skewed("office10", method, "feature") for method, title in rows.items()}
    figures = {"digit5": ("label skew Dir(1.0)", by_label), "office10": ("feature skew", by_domain)}
    about = "The clients' local test sets, mean and deviation over seeds."
    curves = {
        f"{TITLES[name]}, {figures[name][0]}": figures[name][1] for name in sets.select(*figures)
    }
    return Item("Accuracy per round", about, {}, {}, curves=curves)


def _partitions(sets: Sets) -> Item:
    by_label = {TITLES[each]: experiment(each, "local") for each in sets.chosen.values()}
    by_domain = {
        TITLES[each]: experiment(each, "local", partition__kind="feature", evaluate_every=OFTEN)
        for each in sets.select("digit5", "office10", "domainnet")
    }
    pictures = {"partitions-label": by_label, "partitions-feature": by_domain}
    return Item(
        "Data of each client",
        "Training images per client and class, first seed.",
        {},
        {},
        pictures={name: several for name, several in pictures.items() if several},
    )


def _embeddings(sets: Sets) -> Item:
    # The digits are read from the data folder, so the stand-in does not serve.
    runs = {
        METHODS[method]: experiment("mnist", method, partition__alpha=0.1, personal_models=True)
        for method in ("local", "fedavg", "mp-fedcl")
    }
    return Item(
        "Embeddings of clients",
        "Test digits embedded by the personal models of two clients after training alone and in a "
        "federation, Dir(0.1), laid out by t-SNE; colors are classes, crosses are the prototypes "
        "of the digits shown (K = 2).",
        {},
        {},
        pictures={"embeddings": runs} if "mnist" in sets.titles else {},
    )


ITEMS: dict[str, Callable[[Sets], Item]] = {
    "sent": _sent,
    "label": _label,
    "feature": _feature,
    "k": _k,
    "alpha": _alpha,
    "clients": _clients,
    "efficiency": _efficiency,
    "rounds": _rounds,
    "reach": _reach,
    "time": _time,
    "curves": _curves,
    "partitions": _partitions,
    "embeddings": _embeddings,
}
"""In the paper's order."""
