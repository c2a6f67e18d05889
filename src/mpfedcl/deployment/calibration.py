"""How far is too far: distances of held-out images, and the thresholds they give.

An image is flagged as unknown where it is farther from every prototype than nearly all images that
were held out of training: at a false-alarm rate of 5 %, at most one in twenty images of that kind
is flagged by mistake.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mpfedcl.experiment import FORMAT
from mpfedcl.methods import Method
from mpfedcl.models import Model, Tensors
from mpfedcl.prototypes import PrototypePool

RATES = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
"""The false-alarm rates that thresholds are kept for."""
_MOST_IMAGES = 2000
_MOST_IMAGES_OF_A_CLIENT = 1000
_FEWEST_IMAGES_OF_A_CLIENT = 200
_IMAGES_OF_ALL_CLIENTS = 20_000
"""Few enough that measuring takes a fraction of what one round's readings take."""
_IMAGES_AT_ONCE = 1024


class Calibrator:
    """Measures models at the end of a run, where test images and models are at hand."""

    def __init__(
        self,
        model: Model,
        method: Method,
        pool: PrototypePool | None,
        inputs: Tensor,
        own: Mapping[str, Tensor],
    ) -> None:
        """`inputs` are all clients' test images together, `own` which of them each client has."""
        self._model = model
        self._method = method
        self._reference = method.reference(pool) if pool is not None and len(pool) else None
        self._inputs = inputs
        self._own = own
        self._averaged: dict[str, Any] | None = None
        self._clients: dict[str, dict[str, Any]] = {}

    def measure_average(self, averaged: Tensors | None) -> None:
        """Measure the averaged model on the test images of all clients."""
        if averaged is not None:
            rows = torch.arange(len(self._inputs), device=self._inputs.device)
            self._averaged = self._measure(averaged, rows, _MOST_IMAGES)

    def listen(self, personal: Iterable[tuple[str, Tensors]]) -> Iterator[tuple[str, Tensors]]:
        """Pass personal models on, and measure each on its client's own test images."""
        fair = _IMAGES_OF_ALL_CLIENTS // max(1, len(self._own))
        most = min(_MOST_IMAGES_OF_A_CLIENT, max(_FEWEST_IMAGES_OF_A_CLIENT, fair))
        for name, params in personal:
            if (found := self._measure(params, self._own[name], most)) is not None:
                self._clients[name] = found
            yield name, params

    def to_json(self, round_number: int) -> dict[str, Any] | None:
        """Return what was measured, None for a method without prototypes."""
        if self._reference is None:
            return None
        return {
            "format": FORMAT,
            "round": round_number,
            "measured": "distance to the nearest prototype, of test images",
            "averaged": self._averaged,
            "clients": dict(sorted(self._clients.items())),
        }

    @torch.no_grad()
    def _measure(self, params: Tensors, rows: Tensor, most: int) -> dict[str, Any] | None:
        if self._reference is None or not len(rows):
            return None
        if len(rows) > most:
            # Evenly, and so about as many of each client and class.
            rows = rows[torch.linspace(0, len(rows) - 1, most).round().long().to(rows.device)]
        distances = []
        for part in torch.split(rows, _IMAGES_AT_ONCE):
            embeddings, _ = self._model.apply(params, self._inputs[part])
            distances.append(self._reference.nearest(self._method.project(embeddings))[1])
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
    places = {rate: math.ceil((len(ordered) + 1) * (1 - rate) - 1e-9) for rate in RATES}
    return {f"{rate:g}": ordered[k - 1] for rate, k in places.items() if k <= len(ordered)}
