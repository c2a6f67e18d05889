"""Membership inference: was this image among the training images of a client, or of all clients?

The attacker has the image and its label, knows the encoder and the settings, and has other digits
for calibration. It observes one of these:

- a client's update, as the server does without secure aggregation;
- the sum of all clients (`--secure-aggregation`), as the server does then;
- the result of a round, as every client does: the global model, or noisy sums under a budget.

The attacks:

- Weights: how much better does the model that came back know the image than the model that was
  sent, and than the other clients' models, or one that the attacker has trained on its own
  digits?
- Prototypes: how near is the nearest prototype of the class, against those of other clients?
- Sums: the likelihood ratio of a class's sum with the image in it and without it, noise included.
- Second moments (`fedgauss`): does the image's feature vector, less its class mean, lie in the
  span of the client's matrix? With fewer images than dimensions that holds for members alone.

Measured is the share of members that are found where one non-member in a thousand is accused (TPR
at 0.1 % FPR). Guessing finds 0.1 %. The membership_scores module has the scores.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from curious_server import draw_holdings, has_mnist, load_digits, observe
from membership_scores import (
    Score,
    outside_digits,
    weigh_averaged,
    weigh_prototypes,
    weigh_released,
    weigh_spans,
    weigh_sums,
    weigh_totals,
    weigh_weights,
)
from outcome import Outcome

FPR = 0.001
CLIENTS = 5
OTHERS = 1500
"""Non-members of a federation; each is asked about for each of its clients."""


@dataclass
class Scores:
    """How sure the attacker is of members and of non-members."""

    members: list[Tensor] = field(default_factory=list)
    others: list[Tensor] = field(default_factory=list)

    def found(self, fpr: float = FPR) -> float:
        """Return the share of members above all but `fpr` of the others."""
        others = torch.cat(self.others).sort(descending=True).values
        threshold = others[int(fpr * len(others))]
        return float((torch.cat(self.members) > threshold).double().mean())

    def __str__(self) -> str:
        return f"{100 * self.found():.1f} %"


@dataclass(frozen=True)
class Case:
    """A line of the table: what is attacked, under which settings, and what may be found."""

    name: str
    score: Score
    method: str
    size: int
    """Images of each client."""
    least: float = 0.0
    """The documents say that it leaks: at least so much is found, ..."""
    most: float = 1.0
    """... or that it does not: at most so much."""
    settings: dict[str, Any] = field(default_factory=dict)
    always: bool = True
    """Whether the digits inside the package are enough."""

    def expected(self) -> str:
        """Say it in words."""
        if self.least > 0:
            return f"at least {100 * self.least:g} %"
        return f"at most {100 * self.most:g} %"


TRAINED = {"rounds": 5}
TWICE = {"rounds": 2}
FLOOR = {"prototypes__min_cluster_size": 5}
SECURE = {"secure_aggregation": True}
BUDGET = {"privacy__epsilon": 3.0}
LOCAL = BUDGET | {"privacy__model": "local"}
MOMENTS = BUDGET | {"privacy__moments": True}
GOAL = 0.002
"""With a budget, what may be found where 0.1 % of the others are accused."""
CHANCE = 0.01
"""The same of few thousand members, where ten more or less are chance."""

CASES = [
    Case("weights, 20 images", weigh_weights, "fedavg", 20, 0.01, settings=TRAINED),
    Case("weights, 100 images", weigh_weights, "fedavg", 100, most=0.03, settings=TRAINED),
    Case("global model, 5 x 20", weigh_averaged, "fedavg", 20, most=0.03, settings=TRAINED),
    Case(
        "global model, budget 3",
        weigh_averaged,
        "fedavg",
        20,
        most=CHANCE,
        settings=TRAINED | BUDGET,
    ),
    Case("prototypes, 20 images", weigh_prototypes, "mp-fedcl", 20, 0.3, settings=TWICE),
    Case(
        "... of 5 images or more",
        weigh_prototypes,
        "mp-fedcl",
        20,
        most=0.05,
        settings=TWICE | FLOOR,
    ),
    Case("prototypes, 100 images", weigh_prototypes, "mp-fedcl", 100, 0.02, settings=TWICE),
    Case(
        "... of 5 images or more",
        weigh_prototypes,
        "mp-fedcl",
        100,
        most=0.05,
        settings=TWICE | FLOOR,
    ),
    Case("class sums, 20 images", weigh_sums, "fedncm", 20, 0.5),
    Case("... of 5 images or more", weigh_sums, "fedncm", 20, 0.02, settings=FLOOR),
    Case("class sums, 200 images", weigh_sums, "fedncm", 200, 0.02),
    Case("secure aggregation, 5 x 20 images", weigh_totals, "fedncm", 20, 0.02, settings=SECURE),
    Case(
        "secure aggregation, 5 x 200 images",
        weigh_totals,
        "fedncm",
        200,
        most=0.05,
        settings=SECURE,
    ),
    Case("noise at each client, budget 3", weigh_sums, "fedncm", 100, most=CHANCE, settings=LOCAL),
    Case("noisy total, budget 3", weigh_released, "fedncm", 100, most=CHANCE, settings=BUDGET),
    Case("noisy moments, budget 3", weigh_released, "fedgauss", 100, most=CHANCE, settings=MOMENTS),
    Case("second moments, 200 images", weigh_spans, "fedgauss", 200, 0.99),
    Case("... of 5 images or more", weigh_spans, "fedgauss", 200, 0.99, settings=FLOOR),
    Case("second moments, 900 images", weigh_spans, "fedgauss", 900, 0.5, always=False),
    Case("second moments, 2,000 images", weigh_spans, "fedgauss", 2000, most=0.01, always=False),
]


def attack(*, full: bool) -> list[Outcome]:
    """Try every case, on several federations each."""
    outcomes = []
    for case in CASES:
        if not (case.always or (full and has_mnist())):
            continue
        # So few are found under a budget that it takes many to count them.
        many = 40 if "privacy__epsilon" in case.settings else 10
        share = measure(case, range(many if full else 3), full=full).found()
        most = min(case.most, GOAL) if full and many == 40 else case.most
        outcomes.append(
            Outcome(
                f"member found by {case.name}",
                case.expected(),
                f"{100 * share:.1f} %",
                case.least <= share <= most,
            )
        )
    return outcomes


def measure(case: Case, seeds: Iterable[int], *, full: bool) -> Scores:
    """Return the scores of members and of non-members over several federations."""
    digits = load_digits(case.method, full=full)
    scores = Scores()
    for seed in seeds:
        settings = {"seed": seed, **case.settings}
        holdings, others = draw_holdings(CLIENTS, case.size, outside_digits(digits), seed)
        others = others[:OTHERS]
        seen = list(observe(digits, holdings, **settings))
        found = case.score(digits.replace(**settings), seen, torch.cat([*holdings, others]))
        # One row for each client, or one for all of them.
        size = CLIENTS * case.size // len(found)
        for number, row in enumerate(found):
            scores.members.append(row[number * size :][:size])
            scores.others.append(row[-len(others) :])
    return scores
