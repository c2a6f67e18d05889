"""A user's own `torch.nn.Module` as a model."""

import ast
import copy
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mpfedcl.core.errors import InvalidInput, explain, explain_user_code
from mpfedcl.core.tensors import Tensors
from mpfedcl.models.base import Apply, Model, apply_in_pieces
from mpfedcl.models.patterns import find_matches

Factory = Callable[..., nn.Module]
"""Returns a module, given those of num_classes and input_shape that it has as parameters."""

_TRIAL_SIZE = 2
_NORMALIZATIONS = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)


class ModuleModel(Model):
    """A module as a pure function of its parameters and running statistics.

    The embedding is the input of the linear layer that is called last, or the output of the
    submodule named `embedding`. Frozen parameters (`requires_grad_(False)`) are constants, equal at
    all clients. So are integer buffers, such as the batch counter of batch normalization.

    Args:
        name: The setting `model.name`, for messages.
        factory: Makes the module.
        shape: Of a sample: [height, width] or [height, width, 3] if it is an image, which the
            module gets as [channels, height, width]; any other array as it is.
        num_classes: C.
        is_image: Whether samples are images.
        takes_integers: Whether samples are integers, such as token ids.
        embedding: Name of a submodule, or None.
        train: Patterns of the parameters and running statistics that are trained; the others are
            constants, with layers that normalize by constant statistics in evaluation mode. Without
            patterns, the factory freezes parameters.
        seed: Of torch's random numbers while the factory runs.
        dtype: Of floating-point tensors.
    """

    def __init__(
        self,
        name: str,
        factory: Factory,
        shape: tuple[int, ...],
        num_classes: int,
        *,
        is_image: bool,
        takes_integers: bool = False,
        embedding: str | None = None,
        train: Sequence[str] = (),
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._name = name
        self._shape = (*shape, 1) if is_image and len(shape) == 2 else shape
        self._is_image = is_image
        self._num_classes = num_classes
        given = (self._shape[2], *self._shape[:2]) if is_image else shape
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self._module = _call_factory(name, factory, given, num_classes).to(dtype)
        state = self._module.state_dict()
        buffers = {n for n, value in self._module.named_buffers() if value.is_floating_point()}
        buffers &= state.keys()
        if train:
            parameters = dict(self._module.named_parameters())
            names = [n for n in state if n in parameters or n in buffers]
            chosen = find_matches("model.train", train, names)
            for n, value in parameters.items():
                value.requires_grad_(n in chosen and value.is_floating_point())
            buffers &= chosen
        trained = {n for n, value in self._module.named_parameters() if value.requires_grad}
        if not trained:
            raise InvalidInput(
                f"model.name is {name!r}, whose module has no parameters to train; at least one "
                "must require gradients."
            )
        self.buffers = frozenset(buffers)
        self._evaluated = [
            each
            for prefix, each in self._module.named_modules()
            if isinstance(each, nn.modules.batchnorm._NormBase)
            and each.running_mean is not None
            and f"{prefix}.running_mean".lstrip(".") not in buffers
        ]
        """Normalizations by constant statistics, which training must not change either."""
        self._names = [n for n in state if n in trained or n in self.buffers]
        self.normalization = frozenset(
            f"{prefix}.{n}" if prefix else n
            for prefix, each in self._module.named_modules()
            if isinstance(each, _NORMALIZATIONS)
            for n in each.state_dict()
        )
        self._caught: Tensor | None = None
        inputs = torch.zeros(_TRIAL_SIZE, *given, dtype=torch.int64 if takes_integers else dtype)
        self._hook(embedding, inputs)
        self._try(inputs, num_classes)

    def _hook(self, embedding: str | None, inputs: Tensor) -> None:
        """Catch the embedding whenever the module is called."""
        modules = dict(self._module.named_modules())
        if embedding is not None:
            if embedding not in modules:
                raise InvalidInput(
                    f"model.embedding is {embedding!r}; it must name a submodule of "
                    f"{self._name}: {', '.join(filter(None, modules))}."
                )
            modules[embedding].register_forward_hook(lambda *call: self._catch(call[2]))
            return
        called: list[str] = []
        hooks = [
            each.register_forward_pre_hook(lambda *_, name=name: called.append(name))
            for name, each in modules.items()
            if isinstance(each, nn.Linear)
        ]
        self._call(inputs)
        for hook in hooks:
            hook.remove()
        if not called:
            raise InvalidInput(
                f"model.name is {self._name!r}, whose module calls no torch.nn.Linear; "
                "model.embedding must name the submodule whose output is the embedding."
            )
        last = modules[called[-1]]
        self.classifier = frozenset(f"{called[-1]}.{name}" for name in last.state_dict())
        last.register_forward_pre_hook(lambda _, arguments: self._catch(arguments[0]))

    def _catch(self, embedding: Tensor) -> None:
        self._caught = embedding

    def _try(self, inputs: Tensor, num_classes: int) -> None:
        """Check the outputs, and find out whether training differs from evaluation."""
        before = torch.random.get_rng_state()
        with torch.random.fork_rng():
            self._set_mode(training=True)
            trained = self._call(inputs)
            draws = not torch.equal(torch.random.get_rng_state(), before)
        self._module.eval()
        logits = self._call(inputs)
        embedding, wanted = self._caught, [_TRIAL_SIZE, num_classes]
        is_odd = [not isinstance(e, Tensor) or list(e.shape) != wanted for e in (trained, logits)]
        if any(is_odd):
            odd = trained if is_odd[0] else logits
            raise InvalidInput(
                f"model.name is {self._name!r}, whose module returns {_describe(odd)} for "
                f"{_TRIAL_SIZE} samples; it must return logits {wanted}, one for each class."
            )
        if not isinstance(embedding, Tensor) or len(embedding) != _TRIAL_SIZE:
            raise InvalidInput(
                f"model.name is {self._name!r}, whose embedding is {_describe(embedding)} for "
                f"{_TRIAL_SIZE} samples; model.embedding must name a submodule that returns "
                "[samples, values]."
            )
        self.embedding_size = embedding[0].numel()
        if self.buffers:
            self.difference = "the model has running statistics"
        elif draws:
            self.difference = "the model draws random numbers while it trains"
        elif not torch.equal(trained, logits):
            self.difference = "the model trains and evaluates differently"

    def _call(self, inputs: Tensor) -> Any:
        """Call the module in a trial, which leaves no trace; errors are the user's."""
        # Training mode updates running statistics.
        tensors = {n: v.clone() for n, v in self._module.state_dict().items()}
        try:
            with torch.no_grad():
                return functional_call(self._module, tensors, (inputs,))
        except Exception as error:
            raise InvalidInput(
                f"model.name is {self._name!r}, whose module fails on samples "
                f"{list(inputs.shape)} of {inputs.dtype} ({explain_user_code(error)}); it must "
                "return logits [samples, classes]."
            ) from error

    @property
    def fingerprint(self) -> str:
        """A digest of the module's layers, its classes' code and its constants.

        The number of classes does not change it: clients of a federation may not know it yet.
        """
        told = hashlib.sha256()
        kinds: set[type] = set()
        for name, each in self._module.named_modules():
            is_last = isinstance(each, nn.Linear) and each.out_features == self._num_classes
            shown = "" if is_last else each.extra_repr()
            told.update(f"{name} {type(each).__name__} {shown}\n".encode())
            if not type(each).__module__.startswith("torch."):
                kinds.add(type(each))
        for kind in sorted(kinds, key=lambda each: (each.__module__, each.__qualname__)):
            told.update(_read_code(kind).encode())
        for name, value in self._module.state_dict().items():
            if name not in self._names:
                told.update(f"{name} {list(value.shape)}".encode())
                told.update(value.detach().cpu().double().numpy().tobytes())
        return told.hexdigest()

    def init(self, generator: torch.Generator, dtype: torch.dtype) -> Tensors:
        """Return the tensors that the factory made."""
        state = self._module.state_dict()
        return {name: state[name].detach().to(dtype, copy=True) for name in self._names}

    def fits(self, params: Tensors) -> bool:
        """Return whether parameters fit this model, by names and shapes."""
        state = self._module.state_dict()
        return {n: v.shape for n, v in params.items()} == {n: state[n].shape for n in self._names}

    def apply(self, params: Tensors, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings and logits in evaluation mode."""
        self._module.eval()
        joined = apply_in_pieces(lambda some: torch.cat(self._run(params, some), dim=-1), inputs)
        return joined[..., : self.embedding_size], joined[..., self.embedding_size :]

    def apply_many(self, params: Tensors, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Evaluate several models one by one: not every module can run as a stack."""
        count = len(next(iter(params.values())))
        models = [{name: value[i] for name, value in params.items()} for i in range(count)]
        embeddings, logits = zip(*(self.apply(each, inputs) for each in models), strict=True)
        return torch.stack(embeddings), torch.stack(logits)

    def apply_in_training(self, start: Tensors, buffers: Tensors) -> Apply:
        """Return `apply` for a client that trains.

        Parameters that require gradients are used in training mode, which updates `buffers` in
        place. Others, such as those of a received model that the loss compares with, are used in
        evaluation mode with the buffers of `start`.
        """
        constants = {
            n: value.clone() for n, value in self._module.named_buffers() if n not in self.buffers
        }

        def apply(params: Tensors, inputs: Tensor) -> tuple[Tensor, Tensor]:
            is_trained = any(value.requires_grad for value in params.values())
            self._set_mode(training=is_trained)
            others = {**constants, **buffers} if is_trained else start
            try:
                return self._run({**others, **params}, inputs)
            except ValueError as error:
                raise InvalidInput(
                    f"model.name is {self._name!r}, whose module cannot train on {len(inputs)} "
                    f"samples at a time ({explain(error)}); --train.batch-size and "
                    "--partition.min-size must be larger."
                ) from error

        return apply

    def as_module(self, params: Tensors) -> nn.Module:
        """Return the module with these tensors loaded, in evaluation mode."""
        module = copy.deepcopy(self._module)
        module.load_state_dict(params, strict=False)
        return module.eval()

    def _set_mode(self, *, training: bool) -> None:
        self._module.train(training)
        for each in self._evaluated:
            each.eval()

    def shape_inputs(self, inputs: Tensor) -> Tensor:
        """Return flat inputs as the module takes them: images with channels first."""
        shaped = inputs.reshape(-1, *self._shape)
        return shaped.permute(0, 3, 1, 2) if self._is_image else shaped

    def _run(self, params: Tensors, inputs: Tensor) -> tuple[Tensor, Tensor]:
        logits = functional_call(self._module, params, (self.shape_inputs(inputs),))
        if self._caught is None:
            raise InvalidInput(
                f"model.name is {self._name!r}, whose module does not always call the layer of its "
                "embedding; it must."
            )
        embeddings, self._caught = self._caught.flatten(1), None
        return embeddings, logits


def _call_factory(
    name: str, factory: Factory, shape: tuple[int, ...], num_classes: int
) -> nn.Module:
    values: dict[str, Any] = {"num_classes": num_classes, "input_shape": shape}
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    asked = {each.name for each in parameters}
    given = {n: v for n, v in values.items() if takes_all or n in asked}
    try:
        module = factory(**given)
    except InvalidInput:
        raise
    except Exception as error:
        raise InvalidInput(
            f"model.name is {name!r}, which fails ({explain_user_code(error)}); it must return a "
            "torch.nn.Module, given "
            f"{' and '.join(f'{n}={v}' for n, v in given.items()) or 'nothing'}."
        ) from error
    if not isinstance(module, nn.Module):
        raise InvalidInput(
            f"model.name is {name!r}, which returns a {type(module).__name__}; it must return a "
            "torch.nn.Module."
        )
    return module


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    return "nothing" if value is None else f"a {type(value).__name__}"


def _read_code(kind: type) -> str:
    """Return the code of a class without comments and formatting; its name if it has no file."""
    try:
        return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(kind))))
    except (OSError, TypeError, SyntaxError):
        return kind.__qualname__
