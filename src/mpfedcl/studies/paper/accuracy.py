"""The tables that compare methods: what is sent, label skew, feature skew."""

from collections.abc import Mapping

from mpfedcl.studies.paper import measures, published
from mpfedcl.studies.paper.item import TRACKS, Cell, Item, Published
from mpfedcl.studies.paper.protocol import (
    METHODS,
    OFTEN,
    ROUNDS,
    SELDOM,
    experiment,
    number,
    rounds_of,
)
from mpfedcl.studies.paper.sets import Sets

_SHARED = ("digit5", "office10")
"""Sets whose runs the tables of efficiency read too, and more often."""


def sent(sets: Sets) -> Item:
    """Return what a client sends, by data set."""
    cells = []
    for name, ours in sets.all.items():
        base = experiment(ours, "mp-fedcl", 1, partition__kind="iid")
        known = published.SENT[name] if name == ours else None
        for place, measure in enumerate((measures.PARAMETERS, measures.PROTOTYPES)):
            paper = None if known is None else Published(known[place])
            cells.append(Cell(ours, ("parameters", "prototypes")[place], base, measure, "", paper))
    return Item(
        "sent",
        "Parameters and prototypes sent",
        "What a client sends in a round when it holds all classes (an IID deal).",
        sets.titles,
        {"parameters": "parameters", "prototypes": "prototype floats"},
        tuple(cells),
        notes=("Under label skew a client holds fewer classes and sends fewer prototypes.",),
    )


def label_skew(sets: Sets) -> Item:
    """Return the table of all methods under Dir(0.05)."""
    rounds = {"local": ROUNDS, "fedavg": 110, "fedprox": 100, "fedproto": 100}
    cells = []
    for track in TRACKS:
        for method in METHODS:
            for name, ours in sets.all.items():
                length = ROUNDS if track == "tuned" else rounds.get(method, ROUNDS)
                base = experiment(ours, method, length)
                is_known = name == ours and track == "paper"
                numbers = published.LABEL_SKEW.get(method, {}) if is_known else {}
                for measure in (measures.OWN, measures.UNION):
                    paper = number(numbers, name) if measure is measures.OWN else None
                    cells.append(Cell(method, ours, base, measure, "", paper, track))
    return Item(
        "label",
        "Label skew, Dir(0.05)",
        "Seven methods on four data sets whose classes are spread unevenly over the clients. "
        "Paper track: FedAvg 110 rounds, FedProx and FedProto 100, the others 60.",
        METHODS,
        sets.titles,
        tuple(cells),
        compares_tests=True,
        notes=(
            "MNIST's own test is everybody's, so own and union are the same there; on the other "
            "sets a client's own test holds its own classes only.",
            "Tuned track: 60 rounds for all; the paper prints no such numbers, its are shown for "
            "reference in the paper track alone.",
        ),
    )


def feature_skew(sets: Sets) -> Item:
    """Return the tables of all methods with a domain a client."""
    cells = []
    columns = {"average": "average", "union": "union test"}
    for name, ours in sets.by_domain.items():
        domains = sets.domains(ours)
        columns |= {domain: domain for domain in domains}
        for track in TRACKS:
            for method in METHODS:
                others = ROUNDS if track == "tuned" else 130
                length = ROUNDS if method == "local" else rounds_of(method, others)
                base = experiment(
                    ours,
                    method,
                    length,
                    partition__kind="feature",
                    evaluate_every=OFTEN if ours in _SHARED else SELDOM,
                )
                known: Mapping[str, published.Number] = {}
                if name == "digit5" and track == "paper":
                    known = published.FEATURE_SKEW_DIGITS.get(method, {})
                for domain in domains:
                    measure = measures.accuracy_of_client(domain)
                    paper = number(known, domain)
                    cells.append(
                        Cell(method, domain, base, measure, sets.title(ours), paper, track)
                    )
                for column, measure in (
                    ("average", measures.OWN),
                    ("union", measures.UNION_BESIDE),
                ):
                    shown = Cell(
                        method,
                        column,
                        base,
                        measure,
                        sets.title(ours),
                        number(known, column),
                        track,
                    )
                    cells.append(shown)
    return Item(
        "feature",
        "Feature skew, a domain a client",
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
