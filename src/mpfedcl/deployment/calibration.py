"""How far is too far: distances of held-out images, and the thresholds they give.

An image is flagged as unknown where it is farther from every prototype than nearly all images that
were held out of training: at a false-alarm rate of 5 %, at most one in twenty images of that kind
is flagged by mistake.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mpfedcl.experiment import FORMAT
from mpfedcl.prototypes import PrototypePool
from mpfedcl.runs.observer import FinalModels
from mpfedcl.tensors import Tensors

FALSE_ALARM_RATES = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
"""The false-alarm rates that thresholds are kept for."""
_MOST_IMAGES = 2000
_MOST_IMAGES_OF_A_CLIENT = 1000
_FEWEST_IMAGES_OF_A_CLIENT = 200
_IMAGES_OF_ALL_CLIENTS = 20_000
"""Few enough that measuring takes a fraction of what one round's readings take."""
_IMAGES_AT_ONCE = 1024


def calibrate(models: FinalModels) -> Iterator[tuple[str, Tensors]]:
    """Pass the personal models of a finished run on; measure all, and write calibration.json.

    Nothing is written for a method without prototypes. It is an observer's `on_models`.
    """
    pool = models.pool
    reference = models.method.reference(pool) if pool is not None and len(pool) else None
    if reference is None:
        yield from models.personal
        return
    averaged = None
    if models.averaged is not None:
        rows = torch.arange(len(models.test_inputs), device=models.test_inputs.device)
        averaged = _measure(models, reference, models.averaged, rows, _MOST_IMAGES)
    fair = _IMAGES_OF_ALL_CLIENTS // max(1, len(models.own_tests))
    most = min(_MOST_IMAGES_OF_A_CLIENT, max(_FEWEST_IMAGES_OF_A_CLIENT, fair))
    clients = {}
    for name, params in models.personal:
        own = models.own_tests[name]
        if (found := _measure(models, reference, params, own, most)) is not None:
            clients[name] = found
        yield name, params
    content = {
        "format": FORMAT,
        "round": models.round,
        "measured": "distance to the nearest prototype, of test images",
        "averaged": averaged,
        "clients": dict(sorted(clients.items())),
    }
    models.directory.write_json("calibration.json", content)


@torch.no_grad()
def _measure(
    models: FinalModels, reference: PrototypePool, params: Tensors, rows: Tensor, most: int
) -> dict[str, Any] | None:
    """Measure how far test images are from the prototypes, as a model embeds them."""
    if not len(rows):
        return None
    if len(rows) > most:
        # Evenly, and so about as many of each client and class.
        rows = rows[torch.linspace(0, len(rows) - 1, most).round().long().to(rows.device)]
    distances = []
    for part in torch.split(rows, _IMAGES_AT_ONCE):
        embeddings, _ = models.model.apply(params, models.test_inputs[part])
        distances.append(reference.nearest(models.method.project(embeddings))[1])
    joined = torch.cat(distances).double()
    if not bool(joined.isfinite().all()):
        return None
    return {"images": len(joined), "thresholds": find_thresholds(joined)}


def find_thresholds(distances: Tensor) -> dict[str, float]:
    """Return for each false-alarm rate α the ⌈(n + 1)(1 - α)⌉-th smallest of n distances.

    A new image that is exchangeable with these is farther with probability at most α, whatever
    their distribution. Rates for which there are too few images are left out.
    """
    ordered = distances.sort().values.tolist()
    places = {rate: math.ceil((len(ordered) + 1) * (1 - rate) - 1e-9) for rate in FALSE_ALARM_RATES}
    return {f"{rate:g}": ordered[k - 1] for rate, k in places.items() if k <= len(ordered)}
