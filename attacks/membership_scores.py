"""Membership scores: the attacker's confidence that an image was a member, by observation."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from curious_server import Digits, SeenRound, draw_holdings, observe
from mpfedcl.core.tensors import Tensors
from mpfedcl.gaussian import own_statistics, within_from_moment
from mpfedcl.methods import OneShot
from mpfedcl.methods.messages import Update

Score = Callable[[Digits, list[SeenRound], Tensor], Tensor]
"""(digits, what was seen, images) -> [views, images]: a view is a client, or all of them."""


def outside_digits(digits: Digits) -> int:
    """Return the first of the digits that no client holds: the attacker has these to learn from."""
    return len(digits.labels) * 2 // 3


# Models


def weigh_weights(digits: Digits, seen: list[SeenRound], images: Tensor) -> Tensor:
    """Add up how much more a client's model has learnt of an image than those of the others."""
    found = torch.zeros(len(seen[0].updates), len(images))
    for each in seen:
        before = _losses(digits, each.broadcast.params, images)
        models = map(_averaged, each.updates.values())
        found += before - torch.stack([_losses(digits, model, images) for model in models])
    return found - (found.sum(0) - found) / (len(found) - 1)


def weigh_averaged(digits: Digits, seen: list[SeenRound], images: Tensor) -> Tensor:
    """Compare the last global model with one that was trained on the attacker's own digits."""
    held, _ = draw_holdings(5, 20, len(digits.labels) - outside_digits(digits), seed=0)
    own = [rows + outside_digits(digits) for rows in held]
    *_, last = observe(digits, own, privacy__epsilon=None)
    reference = _losses(digits, last.following, images)
    return (reference - _losses(digits, seen[-1].following, images)).unsqueeze(0)


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


# Sums


def weigh_sums(digits: Digits, seen: list[SeenRound], images: Tensor) -> Tensor:
    """Weigh each client's sums."""
    return _weigh(digits, (each.summed for each in seen[0].updates.values()), images)


def weigh_totals(digits: Digits, seen: list[SeenRound], images: Tensor) -> Tensor:
    """Weigh the sums of all clients, which is all that the server sees."""
    return _weigh(digits, (each.summed for each in seen[0].totals), images)


def weigh_released(digits: Digits, seen: list[SeenRound], images: Tensor) -> Tensor:
    """Weigh what leaves the server under a budget: the noisy sums of all clients."""
    return _weigh(digits, [seen[0].released], images)


def weigh_spans(digits: Digits, seen: list[SeenRound], images: Tensor) -> Tensor:
    """Tell how much of an image's feature vector lies outside the span of a client's matrix."""
    features, labels = (
        _method(digits).features(digits.inputs[images]).double(),
        digits.labels[images],
    )
    found = []
    for update in seen[0].updates.values():
        own = own_statistics(update.summed)
        counts, sums = own["counts"], own["sums"]
        values, vectors = torch.linalg.eigh(within_from_moment(own["moment"], counts, sums))
        span = vectors[:, values > values.max() * 1e-5]
        centered = features - (sums / counts.clamp(min=1).unsqueeze(1))[labels]
        outside = centered.norm(dim=1).square() - (centered @ span).norm(dim=1).square()
        held = counts[labels] > 0.5
        found.append(torch.where(held, -outside.clamp(min=1e-12).log(), -torch.inf))
    return torch.stack(found)


def _weigh(digits: Digits, views: Iterable[Mapping[str, Tensor]], images: Tensor) -> Tensor:
    """Return the log-likelihood ratio of a class's sum with and without an image in it.

    The sum of n features has the mean n mu and the covariance n S, plus the noise's; with the image
    x in it, x + (n - 1) mu and (n - 1) S. All of it along the eigenvectors of S.
    """
    method = _method(digits)
    usual, values, vectors = _usual(digits, method)
    noise = 0.0 if method.private_sums is None else method.private_sums.sigma**2
    labels = digits.labels[images]
    features = method.features(digits.inputs[images]).double() @ vectors
    found = []
    for sums in views:
        counts = sums["counts"].double().clamp(min=1)
        rest = sums["sums"].double() @ vectors - counts.unsqueeze(1) * usual
        without = (rest.square() / (counts.unsqueeze(1) * values + noise)).sum(1)[labels]
        fewer = (counts - 1).clamp(min=0.5).unsqueeze(1)[labels]
        left = rest[labels] - features + usual[labels]
        within = (left.square() / (fewer * values + noise)).sum(1)
        # Without the determinants: features are not quite Gaussian, and these favor small classes.
        held = sums["counts"][labels] > 0.5
        found.append(torch.where(held, (without - within) / 2, -torch.inf))
    return torch.stack(found)


def _usual(digits: Digits, method: OneShot) -> tuple[Tensor, Tensor, Tensor]:
    """Return class means along the eigenvectors of the scatter around them, and these."""
    rows = slice(outside_digits(digits), None)
    features, labels = method.features(digits.inputs[rows]).double(), digits.labels[rows]
    means = torch.stack([features[labels == label].mean(0) for label in range(method.num_classes)])
    values, vectors = torch.linalg.eigh((features - means[labels]).T.cov())
    # Few digits leave directions in which nothing was seen to vary.
    return means @ vectors, values.clamp(min=0) + values.mean() * 0.1, vectors


def _method(digits: Digits) -> OneShot:
    method = digits.method
    assert isinstance(method, OneShot)
    return method


@torch.no_grad()
def _losses(digits: Digits, params: Tensors, images: Tensor) -> Tensor:
    _, logits = digits.model.apply(params, digits.inputs[images])
    return cross_entropy(logits, digits.labels[images], reduction="none")


def _averaged(update: Update) -> Tensors:
    assert isinstance(update.averaged, dict)
    return update.averaged


def _nearest(update: Update, embeddings: Tensor, labels: Tensor) -> Tensor:
    """Return the distance to the nearest prototype of the class."""
    if not len(update.prototypes.labels):
        return torch.full((len(embeddings),), torch.inf)
    distances = torch.cdist(embeddings, update.prototypes.vectors)
    same = labels.unsqueeze(1) == update.prototypes.labels
    return distances.masked_fill(~same, torch.inf).min(1).values
