"""The tables that compare methods: what is sent, label skew, feature skew."""

from collections.abc import Mapping

from mpfedcl.studies.paper import measures, published
from mpfedcl.studies.paper.datasets import PaperDatasets
from mpfedcl.studies.paper.item import TRACKS, Cell, PaperItem, Published
from mpfedcl.studies.paper.protocol import (
    FREQUENT_EVALUATION,
    METHODS,
    RARE_EVALUATION,
    ROUNDS,
    find_published,
    method_rounds,
    paper_experiment,
)

_SHARED = ("digit5", "office10")
"""Data sets whose runs the tables of efficiency read too, and more often."""


def sent_table(datasets: PaperDatasets) -> PaperItem:
    """Return what a client sends, by data set."""
    cells = []
    for name, dataset in datasets.chosen.items():
        base = paper_experiment(dataset, "mp-fedcl", 1, partition__kind="iid")
        known = published.SENT[name] if name == dataset else None
        for place, measure in enumerate((measures.PARAMETERS_SENT, measures.PROTOTYPE_FLOATS_SENT)):
            paper = None if known is None else Published(known[place])
            cells.append(
                Cell(dataset, ("parameters", "prototypes")[place], base, measure, "", paper)
            )
    return PaperItem(
        "sent",
        "Parameters and prototypes sent",
        "What a client sends in a round when it holds all classes (IID partition).",
        datasets.titles,
        {"parameters": "parameters", "prototypes": "prototype floats"},
        tuple(cells),
        notes=("Under label skew a client holds fewer classes and sends fewer prototypes.",),
    )


def label_skew_table(datasets: PaperDatasets) -> PaperItem:
    """Return the table of all methods under Dir(0.05)."""
    rounds = {"local": ROUNDS, "fedavg": 110, "fedprox": 100, "fedproto": 100}
    cells = []
    for track in TRACKS:
        for method in METHODS:
            for name, dataset in datasets.chosen.items():
                length = ROUNDS if track == "tuned" else rounds.get(method, ROUNDS)
                base = paper_experiment(dataset, method, length)
                is_known = name == dataset and track == "paper"
                numbers = published.LABEL_SKEW.get(method, {}) if is_known else {}
                for measure in (measures.OWN_TEST, measures.UNION_TEST):
                    paper = find_published(numbers, name) if measure is measures.OWN_TEST else None
                    cells.append(Cell(method, dataset, base, measure, "", paper, track))
    return PaperItem(
        "label",
        "Label skew, Dir(0.05)",
        "Seven methods on four data sets whose classes are spread unevenly over the clients. "
        "Paper track: FedAvg 110 rounds, FedProx and FedProto 100, the others 60.",
        METHODS,
        datasets.titles,
        tuple(cells),
        compares_tests=True,
        notes=(
            "MNIST's local test set is everybody's, so own and union are the same there; on the other "
            "sets a client's local test set holds its own classes only.",
            "Tuned track: 60 rounds for all; the paper prints no such numbers; its numbers are "
            "shown only in the paper track.",
        ),
    )


def feature_skew_table(datasets: PaperDatasets) -> PaperItem:
    """Return the tables of all methods with one domain per client."""
    cells = []
    columns = {"average": "average", "global_test": "global test set"}
    for name, dataset in datasets.by_domain.items():
        domains = datasets.domains(dataset)
        columns |= {domain: domain for domain in domains}
        for track in TRACKS:
            for method in METHODS:
                others = ROUNDS if track == "tuned" else 130
                length = ROUNDS if method == "local" else method_rounds(method, others)
                base = paper_experiment(
                    dataset,
                    method,
                    length,
                    partition__kind="feature",
                    evaluate_every=FREQUENT_EVALUATION if dataset in _SHARED else RARE_EVALUATION,
                )
                known: Mapping[str, published.MeanAndDeviation] = {}
                if name == "digit5" and track == "paper":
                    known = published.FEATURE_SKEW_DIGITS.get(method, {})
                shown = {domain: measures.accuracy_of_client(domain) for domain in domains}
                shown |= {"average": measures.OWN_TEST, "global_test": measures.UNION_TEST_COLUMN}
                for column, measure in shown.items():
                    paper, panel = find_published(known, column), datasets.title(dataset)
                    cells.append(Cell(method, column, base, measure, panel, paper, track))
    return PaperItem(
        "feature",
        "Feature skew, one domain per client",
        "Every client has all classes, drawn from a domain of its own and tested on it; average "
        "over the domains, and the same models on all domains' tests together (union). Paper "
        "track: FedAvg, FedProx and FedProto 130 rounds, the others 60.",
        METHODS,
        columns,
        tuple(cells),
        notes=(
            "The paper's deviation of the average is the mean of the domains' deviations; ours is "
            "the deviation of the average over seeds.",
        ),
    )
