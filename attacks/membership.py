"""Membership inference: was this image among a client's training images?

The attacker is the server, or whoever reads its traffic. It has the image with its label and what a
client sent; it knows the encoder and the settings, and has other digits to learn what is usual.

- Weights: how much better does the client's model know the image than the model it was sent, and
  than the models of the other clients of the round? Added up over the rounds.
- Prototypes: how near is the nearest prototype of the class, against those of other clients?
- Means (one exchange, `fedncm`): the likelihood ratio of the class's sum with and without the image.
- Second moments (`fedgauss`): does the image's feature vector, less its class mean, lie in the span
  of the client's matrix? With fewer images than dimensions it does exactly for members only.

Measured is the share of members that are found where one non-member in a thousand is accused (TPR at
0.1 % FPR). Guessing finds 0.1 %.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from curious_server import Digits, SeenRound, draw_holdings, load_digits, observe
from outcome import Outcome
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from mpfedcl.gaussian import own_statistics, unit_features, within_from_moment
from mpfedcl.messages import Update

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


Score = Callable[[Digits, list[SeenRound], Tensor], Tensor]
"""(digits, what was seen, images) -> [clients, images] how sure it is that the client holds it."""


@torch.no_grad()
def weigh_weights(digits: Digits, seen: list[SeenRound], images: Tensor) -> Tensor:
    """Add up how much more a client's model has learnt of an image than those of the others."""
    found = torch.zeros(len(seen[0].updates), len(images))
    for each in seen:
        before = _losses(digits, each.broadcast.params, images)
        models = map(_averaged, each.updates.values())
        found += before - torch.stack([_losses(digits, model, images) for model in models])
    return found - _mean_of_others(found)


@torch.no_grad()
def weigh_prototypes(digits: Digits, seen: list[SeenRound], images: Tensor) -> Tensor:
    """Compare an embedding's distance to a client's prototypes with that to the others'."""
    best = torch.full((len(seen[0].updates), len(images)), -torch.inf)
    for each in seen:
        for number, update in enumerate(each.updates.values()):
            embeddings, _ = digits.model.apply(_averaged(update), digits.inputs[images])
            near = torch.stack(
                [
                    _nearest(other, normalize(embeddings, dim=1), digits.labels[images])
                    for other in each.updates.values()
                ]
            )
            own, others = near[number], torch.cat([near[:number], near[number + 1 :]])
            # A client without a prototype of the class says nothing about it.
            sure = (others.min(0).values.clamp(max=2) / own.clamp(min=1e-6)).log()
            sure = torch.where(own.isfinite(), sure, -torch.inf)
            best[number] = torch.maximum(best[number], sure)
    return best


def weigh_means(digits: Digits, seen: list[SeenRound], images: Tensor) -> Tensor:
    """Return the log-likelihood ratio of a class mean with and without an image in it."""
    usual, metric = _usual(digits)
    labels = digits.labels[images]
    centred = (unit_features(digits.inputs[images]).double() - usual[labels]) @ metric
    found = []
    for update in seen[0].updates.values():
        counts = update.summed["counts"].double().clamp(min=1)
        means = update.summed["sums"].double() / counts.unsqueeze(1)
        shift, count = ((means - usual) @ metric)[labels], counts[labels]
        # The mean of n is N(0, 1/n); with the image x in it N(x/n, (n - 1)/n²).
        spread = (count - 1).clamp(min=0.5) / count.square()
        without = count * shift.square().sum(1)
        within = (shift - centred / count.unsqueeze(1)).square().sum(1) / spread
        held = update.summed["counts"][labels] > 0.5
        found.append(torch.where(held, (without - within) / 2, -torch.inf))
    return torch.stack(found)


def weigh_spans(digits: Digits, seen: list[SeenRound], images: Tensor) -> Tensor:
    """Tell how much of an image's feature vector lies outside the span of a client's matrix."""
    features, labels = unit_features(digits.inputs[images]).double(), digits.labels[images]
    found = []
    for update in seen[0].updates.values():
        own = own_statistics(update.summed)
        counts, sums = own["counts"], own["sums"]
        values, vectors = torch.linalg.eigh(within_from_moment(own["moment"], counts, sums))
        span = vectors[:, values > values.max() * 1e-5]
        centred = features - (sums / counts.clamp(min=1).unsqueeze(1))[labels]
        outside = centred.norm(dim=1).square() - (centred @ span).norm(dim=1).square()
        held = counts[labels] > 0.5
        found.append(torch.where(held, -outside.clamp(min=1e-12).log(), -torch.inf))
    return torch.stack(found)


@dataclass(frozen=True)
class Case:
    """A line of the table: what is attacked, under which settings, and what may be found."""

    name: str
    score: Score
    method: str
    size: int
    """Images of each client."""
    least: float
    """The documents say that it leaks: at least so much is found, ..."""
    most: float
    """... or that it does not: at most so much."""
    settings: dict[str, Any] = field(default_factory=dict)

    def expected(self) -> str:
        """Say it in words."""
        if self.least > 0:
            return f"at least {100 * self.least:g} % found"
        return f"at most {100 * self.most:g} % found"


TRAINED = {"rounds": 2}
FLOOR = {"prototypes__min_cluster_size": 5}
CASES = [
    Case("weights, 20 images a client", weigh_weights, "fedavg", 20, 0.002, 1, {"rounds": 5}),
    Case("weights, 100 images a client", weigh_weights, "fedavg", 100, 0, 1, {"rounds": 5}),
    Case("prototypes, 20 images a client", weigh_prototypes, "mp-fedcl", 20, 0.3, 1, TRAINED),
    Case(
        "... of at least 5 images each", weigh_prototypes, "mp-fedcl", 20, 0, 0.05, TRAINED | FLOOR
    ),
    Case("prototypes, 100 images a client", weigh_prototypes, "mp-fedcl", 100, 0, 1, TRAINED),
    Case(
        "... of at least 5 images each", weigh_prototypes, "mp-fedcl", 100, 0, 0.05, TRAINED | FLOOR
    ),
    Case("class means, 20 images a client", weigh_means, "fedncm", 20, 0.5, 1),
    Case("... of at least 5 images each", weigh_means, "fedncm", 20, 0, 1, FLOOR),
    Case("class means, 200 images a client", weigh_means, "fedncm", 200, 0, 1),
    Case("second moments, 200 images", weigh_spans, "fedgauss", 200, 0.99, 1),
    Case("... of at least 5 images each", weigh_spans, "fedgauss", 200, 0.99, 1, FLOOR),
]


def attack(*, full: bool) -> list[Outcome]:
    """Try every case, on several federations each."""
    outcomes = []
    for case in CASES:
        scores = measure(case, range(20 if full else 4), full=full)
        share = scores.found()
        outcomes.append(
            Outcome(
                f"who is a member, by {case.name}",
                case.expected(),
                f"{scores}",
                case.least <= share <= case.most,
            )
        )
    return outcomes


def measure(case: Case, seeds: Iterable[int], *, full: bool) -> Scores:
    """Return the scores of members and of non-members over several federations."""
    digits = load_digits(case.method, full=full)
    scores = Scores()
    for seed in seeds:
        holdings, others = draw_holdings(CLIENTS, case.size, _pool(digits), seed)
        others = others[:OTHERS]
        seen = list(observe(digits, holdings, seed=seed, **case.settings))
        found = case.score(digits, seen, torch.cat([*holdings, others]))
        for number, row in enumerate(found):
            scores.members.append(row[number * case.size :][: case.size])
            scores.others.append(row[-len(others) :])
    return scores


def _pool(digits: Digits) -> int:
    """Digits that clients may hold; the attacker has the rest to learn what is usual."""
    return len(digits.labels) * 2 // 3


def _usual(digits: Digits) -> tuple[Tensor, Tensor]:
    """Return the means of each class and what whitens the scatter around them, from other digits."""
    rows = slice(_pool(digits), None)
    features = unit_features(digits.inputs[rows]).double()
    labels = digits.labels[rows]
    means = torch.stack([features[labels == label].mean(0) for label in labels.unique()])
    scatter = (features - means[labels]).T.cov()
    values, vectors = torch.linalg.eigh(scatter)
    floor = values.mean() * 0.1
    return means, vectors / (values + floor).sqrt()


def _losses(digits: Digits, params: dict[str, Tensor], images: Tensor) -> Tensor:
    _, logits = digits.model.apply(params, digits.inputs[images])
    return cross_entropy(logits, digits.labels[images], reduction="none")


def _averaged(update: Update) -> dict[str, Tensor]:
    assert isinstance(update.averaged, dict)
    return update.averaged


def _nearest(update: Update, embeddings: Tensor, labels: Tensor) -> Tensor:
    """Return the distance to the nearest prototype of the class."""
    if not len(update.prototypes.labels):
        return torch.full((len(embeddings),), torch.inf)
    distances = torch.cdist(embeddings, update.prototypes.vectors)
    same = labels.unsqueeze(1) == update.prototypes.labels
    return distances.masked_fill(~same, torch.inf).min(1).values


def _mean_of_others(rows: Tensor) -> Tensor:
    """Return, for each row, the mean of the others."""
    return (rows.sum(0) - rows) / (len(rows) - 1)
