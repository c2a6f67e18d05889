"""The parts of a federation, assembled once for simulation, server, client and tests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.rng import generator
from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.methods import (
    Asynchronous,
    ClosedForm,
    LayerNames,
    Method,
    Public,
    TwoModels,
    check_hook_results,
    collect_statistics,
    find_method,
    update_template,
)
from mpfedcl.models import Model
from mpfedcl.models.patterns import find_matches
from mpfedcl.privacy.private_rounds import check_budget
from mpfedcl.rounds.record import Clock


@dataclass(frozen=True, eq=False)
class Assembly:
    """An experiment's method and model with the initial parameters."""

    experiment: Experiment
    method: Method
    model: Model
    initial: Tensors
    """The parameters before round 1, the same on every machine."""
    template: Tensors
    """Tensors of the names, shapes and types that a client's update has to average."""
    sums: Tensors
    """Zeros with the shapes and types of the statistics that clients send."""
    device: torch.device
    clock: Clock
    clients: Mapping[str, "Assembly"] = field(default_factory=dict)
    """The parts of each client, if clients have different models; then `model` and `initial` of
    this assembly are those of one of them, because no parameter is shared."""

    def of(self, client: str | None) -> "Assembly":
        """Return the parts of a client; None: those of the server."""
        return self.clients.get(client or "", self)


def assemble(
    experiment: Experiment,
    model: Model,
    *,
    num_classes: int,
    input_size: int,
    device: torch.device | None = None,
    method_class: type[Method] | None = None,
    initial: Tensors | None = None,
    public: tuple[Tensor, Tensor] | None = None,
    models: Mapping[str, Model] | None = None,
) -> Assembly:
    """Make the method and the initial parameters of a resolved experiment.

    Args:
        experiment: The resolved settings.
        model: The model, unless the method brings its own.
        num_classes, input_size: Classes of the data set, and values of one sample.
        device: The device of tensors; the CPU by default.
        method_class: Replaces the method that the experiment names.
        initial: Replaces the random initial parameters.
        public: Inputs and labels of the server's public samples.
        models: The models by client, if they differ.
    """
    device = device or torch.device("cpu")
    kind = method_class or find_method(experiment.method)
    method = kind(experiment, num_classes)
    check_hook_results(method)
    check_budget(method)
    if isinstance(method, ClosedForm):
        model = method.make_model(input_size)
    if public is not None:
        method.public = Public(model.apply, *public)
    dtype = getattr(torch, experiment.dtype)
    drawn = model.init(generator(experiment.seed, "weights"), dtype)
    # Files order parameters by name, models by layer.
    initial = drawn if initial is None else {name: initial[name] for name in drawn}
    initial = {name: value.to(device) for name, value in initial.items()}
    params, buffers = split_buffers(initial, model)
    method.initial = params
    method.layers = LayerNames(
        model.classifier & initial.keys(), model.normalization & initial.keys()
    )
    check_model(method, model)
    if experiment.model.share:
        share_part(method, list(initial))
    shares_model = method.trains and method.shares_model
    if experiment.model.train and shares_model and not any(map(method.shared, initial)):
        raise InvalidInput(
            f"model.train is {' '.join(experiment.model.train)!r}; with method {method.name} it "
            "must match more: each client keeps all of these parameters."
        )
    template = update_template(method, params, model.embedding_size)
    if experiment.model.share and not all(map(method.shared, template.keys() & params.keys())):
        raise _no_part(method, "it sends all parameters")
    if template:
        template |= {name: value for name, value in buffers.items() if method.shared(name)}
    if experiment.model.clients and template:
        raise clients_models_error(experiment)
    nothing = torch.zeros(0, input_size, dtype=dtype, device=device)
    parts: dict[Model, Assembly] = {}
    settings = experiment.model.of_clients(models or {})
    for name, each in (models or {}).items():
        if each.embedding_size != model.embedding_size:
            raise InvalidInput(
                f"model.clients gives {next(iter(models or {}))} embeddings of "
                f"{model.embedding_size} values and {name} of {each.embedding_size}; they must be "
                "of equal size, because prototypes are compared."
            )
        if each not in parts:
            parts[each] = assemble(
                experiment.replace(model=settings[name]),
                each,
                num_classes=num_classes,
                input_size=input_size,
                device=device,
                method_class=method_class,
            )
    return Assembly(
        experiment,
        method,
        model,
        initial,
        template,
        collect_statistics(method, nothing, torch.zeros(0, dtype=torch.int64, device=device)),
        device,
        Clock(),
        {name: parts[each] for name, each in (models or {}).items()},
    )


def clients_models_error(experiment: Experiment) -> InvalidInput:
    """Return the error of `model.clients` for a method whose clients share parameters."""
    return InvalidInput(
        f"model.clients is {(experiment.model.clients or ('',))[0]!r}, but clients of method "
        f"{experiment.method!r} must have the same model; the method must share no parameters: "
        "fedpcl, fedproto, local, or mp-fedcl with --no-share-model."
    )


def share_part(method: Method, names: Sequence[str]) -> None:
    """Let `method.shared` hold only for names that match `model.share`."""
    patterns, agrees = method.experiment.model.share, method.shared
    if method.experiment.privacy.has_budget:
        raise InvalidInput(
            f"model.share is {' '.join(patterns)!r}; with a privacy budget it must be left out: "
            "only a model that clients share may be evaluated there."
        )
    if not (method.trains and method.shares_model):
        raise _no_part(method, "its clients share no model")
    if isinstance(method, Asynchronous):
        raise _no_part(method, "its server mixes whole models")
    if isinstance(method, TwoModels):
        raise _no_part(method, "its clients have a personal model already")
    chosen = find_matches("model.share", patterns, names)

    def shared(parameter: str) -> bool:
        return parameter in chosen and agrees(parameter)

    # Hooks see it too, as FedRep's, which trains the two parts in turn.
    method.shared = shared  # type: ignore[method-assign]
    if not any(map(shared, names)):
        raise _no_part(method, "it keeps all that the patterns match")


def _no_part(method: Method, why: str) -> InvalidInput:
    return InvalidInput(
        f"model.share is {' '.join(method.experiment.model.share)!r}; with method {method.name} it "
        f"must be left out: {why}."
    )


def check_model(method: Method, model: Model) -> None:
    """Reject a model with running statistics for methods that cannot average them."""
    if not model.buffers:
        return
    if isinstance(method, TwoModels):
        raise InvalidInput(
            f"method is {method.name!r}, which trains two models in turn; model.name must be a "
            "model without running statistics (batch normalization)."
        )
    if method.experiment.privacy.has_budget:
        raise InvalidInput(
            f"model.name is {method.experiment.model.name!r}, which has running statistics (batch "
            "normalization); with a privacy budget it must have none, because noise covers "
            "gradients only."
        )


def split_buffers(tensors: Tensors, model: Model) -> tuple[Tensors, Tensors]:
    """Return the parameters and the running statistics."""
    if not model.buffers:
        return tensors, {}
    params = {name: value for name, value in tensors.items() if name not in model.buffers}
    return params, {name: value for name, value in tensors.items() if name in model.buffers}
