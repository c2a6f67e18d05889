"""How far is too far, and how sure is sure: what held-out images say of a finished run's models.

An image is flagged as unknown where it is farther from every prototype than nearly all images that
were held out of training: at a false-alarm rate of 5 %, at most one in twenty images of that kind
is flagged by mistake. A set of classes is large enough where nearly all held-out images had their
true class in it: split conformal prediction.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mpfedcl.core.files import FORMAT, write_atomically
from mpfedcl.core.tensors import Tensors, pack_tensors
from mpfedcl.inference.prediction_rule import (
    ComparisonSpace,
    ReadingRule,
    find_comparison_space,
)
from mpfedcl.methods import prototype_rule
from mpfedcl.rounds.label_prior import log_prior
from mpfedcl.runs.observer import FinalModels

FILE = "calibration.json"
METRIC_FILE = "metric.safetensors"
FALSE_ALARM_RATES = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
"""The false-alarm rates that thresholds are kept for."""
COVERAGES = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.975, 0.98, 0.99, 0.995)
"""The probabilities of holding the truth that sets of classes are kept for."""
_MOST_IMAGES = 2000
_MOST_IMAGES_OF_A_CLIENT = 1000
_FEWEST_IMAGES_OF_A_CLIENT = 200
_IMAGES_OF_ALL_CLIENTS = 20_000
"""Few enough that measuring takes a fraction of what one round's predictors take."""
_IMAGES_AT_ONCE = 1024
_FEWEST_TO_SHARPEN = 50
"""Images below which a factor of the scores would be guessed."""
_WIDEST = 4.0
"""The log of the largest factor, and of the smallest with a minus."""


def calibrate(models: FinalModels) -> Iterator[tuple[str, Tensors]]:
    """Pass the personal models of a finished run on; measure all, and write calibration.json.

    Where the method has a metric of its own, it goes into metric.safetensors. It is an observer's
    `on_models`.
    """
    space = find_comparison_space(models.method, models.pool, models.fitted)
    if space is not None and space.has_metric:
        kept = {name: models.fitted[name] for name in ("covariance", "fit")}
        write_atomically(models.directory.path / METRIC_FILE, pack_tensors(kept))
    rules = {
        test: ReadingRule.of(models.method.predictor_on(test), has_prototypes=space is not None)
        for test in ("local_test", "global_test")
    }
    averaged = None
    if models.averaged is not None:
        rows = torch.arange(len(models.test_inputs), device=models.test_inputs.device)
        averaged = _measure(
            models, space, rules["global_test"], models.averaged, _choose(rows, _MOST_IMAGES)
        )
    fair = _IMAGES_OF_ALL_CLIENTS // max(1, len(models.local_tests))
    most = min(_MOST_IMAGES_OF_A_CLIENT, max(_FEWEST_IMAGES_OF_A_CLIENT, fair))
    clients = {}
    for name, params in models.personal:
        rows, prior = _choose(models.local_tests[name], most), None
        if rules["local_test"].with_prior:
            prior = log_prior(torch.tensor(models.label_counts[name]))
        seen = None if space is None else space.seen_by(models.method, name)
        if (found := _measure(models, seen, rules["local_test"], params, rows, prior)) is not None:
            clients[name] = found
        yield name, params
    content = {
        "format": FORMAT,
        "round": models.round,
        "measured": "of test images: distance to the nearest prototype; 1 - probability of truth",
        "metric": "covariance" if space is not None and space.has_metric else None,
        "averaged": averaged,
        "clients": dict(sorted(clients.items())),
    }
    models.directory.write_json(FILE, content)


def _choose(rows: Tensor, most: int) -> Tensor:
    """Return some test images, evenly, and so about as many of each client and class."""
    if len(rows) <= most:
        return rows
    return rows[
        torch.linspace(0, len(rows) - 1, most, dtype=torch.float64).round().long().to(rows.device)
    ]


@torch.no_grad()
def _measure(
    models: FinalModels,
    space: ComparisonSpace | None,
    rule: ReadingRule,
    params: Tensors,
    rows: Tensor,
    prior: Tensor | None = None,
) -> dict[str, Any] | None:
    """Measure test images as a model sees them: how far, and how unlikely their true class."""
    if not len(rows):
        return None
    distances, said, truths = [], [], []
    for part in torch.split(rows, _IMAGES_AT_ONCE):
        embeddings, logits = models.model.apply(params, models.test_inputs[part])
        if space is not None:
            points = space.project(prototype_rule(models.method).project(embeddings))
            distances.append(space.prototypes.nearest(points)[1])
        if not rule.by_prototype:
            said.append(logits.double() + (0 if prior is None else prior.to(logits.device)))
            truths.append(models.test_labels[part])
    return describe_held_out(
        torch.cat(distances) if distances else None,
        torch.cat(said) if said else None,
        torch.cat(truths) if truths else models.test_labels[rows],
    )


def describe_held_out(
    distances: Tensor | None, scores: Tensor | None, truth: Tensor
) -> dict[str, Any] | None:
    """Return what calibration.json keeps of a model: thresholds [n], and limits of sets [n, C]."""
    found: dict[str, Any] = {"images": len(truth)}
    if distances is not None and bool((joined := distances.double()).isfinite().all()):
        found["thresholds"] = find_thresholds(joined)
    if scores is not None and bool(scores.isfinite().all()):
        likely = torch.softmax(scores, dim=1).gather(1, truth.unsqueeze(1)).squeeze(1)
        found["sets"] = find_set_limits(1 - likely)
        if len(truth) >= _FEWEST_TO_SHARPEN:
            found["sharpness"] = find_sharpness(scores, truth)
    return found if len(found) > 1 else None


def find_sharpness(scores: Tensor, truth: Tensor) -> float:
    """Return the factor of all scores that makes the truth of held-out images most likely.

    Labels stay as they are; probabilities are neither too bold nor too shy (temperature scaling,
    Guo et al., 2017). The likelihood is concave in the factor: its slope is brought to 0 by halves.
    """
    low, high = -_WIDEST, _WIDEST
    for _ in range(40):
        middle = (low + high) / 2
        shares = torch.softmax(math.exp(middle) * scores, dim=1)
        expected = (shares * scores).sum(1)
        slope = float((scores.gather(1, truth.unsqueeze(1)).squeeze(1) - expected).mean())
        low, high = (middle, high) if slope > 0 else (low, middle)
    return float(f"{math.exp(middle):.5g}")


def find_thresholds(distances: Tensor) -> dict[str, float]:
    """Return for each false-alarm rate α the ⌈(n + 1)(1 - α)⌉-th smallest of n distances.

    A new image that is exchangeable with these is farther with probability at most α, whatever
    their distribution. Rates for which there are too few images are left out.
    """
    return _find_quantiles(distances, {rate: 1 - rate for rate in FALSE_ALARM_RATES})


def find_set_limits(surprises: Tensor) -> dict[str, float]:
    """Return for each coverage the ⌈(n + 1) coverage⌉-th smallest of n values 1 - p(truth).

    The classes of a new image that are no more surprising hold its truth with at least that
    probability, if it is exchangeable with these. Coverages that take more images are left out.
    """
    return _find_quantiles(surprises, {coverage: coverage for coverage in COVERAGES})


def _find_quantiles(values: Tensor, shares: Mapping[float, float]) -> dict[str, float]:
    ordered = values.sort().values.tolist()
    places = {name: math.ceil((len(ordered) + 1) * s - 1e-9) for name, s in shares.items()}
    return {f"{name:g}": ordered[k - 1] for name, k in places.items() if k <= len(ordered)}
