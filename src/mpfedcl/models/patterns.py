"""Parts of a model by patterns of parameter names: which are trained, and which are constants."""

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.models.base import Model

_MOST_NAMES = 6


def find_matches(field: str, patterns: Sequence[str], names: Collection[str]) -> frozenset[str]:
    """Return the names that match a pattern, such as head.*; each pattern must match one at least.

    `field` is the setting, for messages. As in `fnmatch`, * is any text, dots included.
    """
    listed = list(names)
    if len(listed) > _MOST_NAMES:
        # The last layers are those that most patterns name.
        listed[_MOST_NAMES // 2 : -_MOST_NAMES // 2] = ["..."]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            inner = f"*.{pattern}"
            question = any(fnmatchcase(name, inner) for name in names)
            raise InvalidInput(
                f"{field} is {pattern!r}, which matches no parameter; it must match some of "
                f"{', '.join(listed)}{f': did you mean {inner!r}?' if question else '.'}"
            )
    return frozenset(n for n in names if any(fnmatchcase(n, pattern) for pattern in patterns))


class PartOfModel(Model):
    """A model of which some parameters are trained; the others are constants.

    Args:
        model: The whole model.
        patterns: Patterns of the names of trained parameters (`model.train`).
        initial: The initial parameters of the whole model, the same on every machine.
    """

    def __init__(self, model: Model, patterns: Sequence[str], initial: Tensors) -> None:
        self._model = model
        self._trained = find_matches("model.train", patterns, initial)
        self._constants = {n: v for n, v in initial.items() if n not in self._trained}
        self.embedding_size = model.embedding_size
        self.classifier, self.normalization = model.classifier, model.normalization

    def init(self, generator: torch.Generator, dtype: torch.dtype) -> Tensors:
        """Return the trained part of the model's initial parameters."""
        drawn = self._model.init(generator, dtype)
        return {name: value for name, value in drawn.items() if name in self._trained}

    def apply(self, params: Tensors, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings and logits."""
        return self._model.apply({**self._constants_on(inputs.device), **params}, inputs)

    def apply_many(self, params: Tensors, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings and logits of models with stacked parameters."""
        count = len(next(iter(params.values())))
        constants = self._constants_on(inputs.device).items()
        stacked = {name: value.expand(count, *value.shape) for name, value in constants}
        return self._model.apply_many({**stacked, **params}, inputs)

    def _constants_on(self, device: torch.device) -> Tensors:
        return {name: value.to(device) for name, value in self._constants.items()}
