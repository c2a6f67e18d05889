"""The `Method` interface: a federated method overrides the hooks in which it differs from FedAvg.

Parameters w, gradients and all other tensors of a hook are dictionaries from name to tensor
(`Tensors`), such as `{"classifier.weight": [C, d], ...}`, the last layer. Hooks run in this order:

    server  init_server(w)           server state; before round 1 only
            -> each round's broadcast: round, params = w, extra = server.extra, prototype pool
    client  init_client(w)           client state, from the initial w; before its first round only
            describe(labels)         constants of the client's labels, once   -> context.own
            prepare(broadcast)       any value, the same for all clients      -> context.received
            begin(context)           first parameters w_i and memory
            for each batch of B samples:
              loss(w_i, batch, ...)    a scalar; inputs [B, ...], labels [B], mask [B]
              adjust(gradients, ...)   gradients g and memory; the optimizer steps: w_i - lr g
              after_step(w_i, ...)     w_i and memory
            finish(w_i, ...)         tensors u_i for the server, and the next client state
    server  weigh(update, server)    weight p_i of one update; FedAvg: its number of samples n_i
            reduce(server, means, tally)   next server state; means = sum_i p_i u_i / sum_i p_i
            remarks(broadcast)       JSON values for the record of the round

`shared` names the parameters that are sent, and `local_training` sets the steps of a client.
`loss`, `adjust` and `after_step` run under `torch.func.vmap`, for many clients at once: use
`torch.where` or masks instead of `if` on values of tensors. The other hooks are ordinary code and
see one client at a time.

`Method` has an example. `mpfedcl.methods.check_method(MyMethod)` checks a class on generated data,
and `mpfedcl run --method package.module:MyMethod` runs it. A method that does more than average
parameters inherits from a capability in `mpfedcl.methods`:

    SharesPrototypes    clients send prototypes; the server pools them
    CollectsStatistics  clients send sums, such as class means
    OneShot             a single exchange of statistics
    Asynchronous        the server mixes in each update as it arrives
    PartialModel        clients train some of the hidden units
    TwoModels           clients train a personal model next to the shared one
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Self, final, get_type_hints

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.method_settings import read_section
from mpfedcl.experiment.settings import Settings, TrainSettings
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.methods.predictors import PREDICTORS, PredictorName, Test
from mpfedcl.prototypes import PrototypePool, Prototypes

Family = Literal[
    "shared model", "personal models", "prototypes", "asynchronous", "one-shot", "alone"
]


# Values that hooks are given and return


class Batch(NamedTuple):
    """Inputs [B, ...], labels [B] and a mask [B] that is false for padding rows.

    Engines that train many clients at once pad the batches of the package's own methods, whose
    losses average with `mean` or `cross_entropy`. A loss of your own never sees a padding row.
    """

    inputs: Tensor
    labels: Tensor
    mask: Tensor
    weights: Tensor | None = None
    """[B], used by `cross_entropy`; None for equal weights."""

    def mean(self, per_sample: Tensor) -> Tensor:
        """Return the mean of one value per sample [B] over the real samples."""
        # Filled, not multiplied: a padding row counts for nothing even if it is NaN.
        return per_sample.masked_fill(~self.mask, 0).sum() / self.mask.sum().clamp(min=1)

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """Return the mean cross-entropy of logits [B, C] over the real samples, as weighted."""
        if torch._C._functorch.is_functorch_wrapped_tensor(logits):
            # Bit-identical: torch's own is slow under vmap, and loads a compiler at the first step.
            likelihoods = log_softmax(logits, -1).gather(-1, self.labels.unsqueeze(-1))
            losses = -likelihoods.squeeze(-1)
        else:
            losses = cross_entropy(logits, self.labels, reduction="none")
        if self.weights is None:
            return self.mean(losses)
        return self.mean(self.weights * losses) / self.mean(self.weights)


class FullBatch(Batch):
    """A batch without padding: means need no mask, and fewer operations."""

    __slots__ = ()

    @classmethod
    def of(cls, inputs: Tensor, labels: Tensor, weights: Tensor | None = None) -> Self:
        """Return these samples, all of them real."""
        return cls(inputs, labels, torch.ones_like(labels, dtype=torch.bool), weights)

    def mean(self, per_sample: Tensor) -> Tensor:
        """Return the mean of one value per sample."""
        return per_sample.mean()

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        is_plain = not torch._C._functorch.is_functorch_wrapped_tensor(logits)
        if self.weights is not None or not is_plain:
            return super().cross_entropy(logits)
        return cross_entropy(logits, self.labels)


@dataclass(frozen=True)
class Context:
    """The values that a client's hooks can use, next to the parameters and the batch."""

    apply: Callable[[Tensors, Tensor], tuple[Tensor, Tensor]]
    """The model: `embeddings, logits = context.apply(params, inputs)`."""
    start: Tensors
    """The parameters at the start of the round: received if they are shared, otherwise the client's
    own from its last round (at first `method.initial`)."""
    received: Any
    """The value that `prepare` returned: the same for every client."""
    state: Tensors
    """The client's state, kept between rounds: `init_client`, then from `finish`."""
    own: Tensors = field(default_factory=dict)
    """The constants that `describe` computed from this client's labels."""
    memory: Tensors = field(default_factory=dict)
    """Tensors that last until the round ends: from `begin`, then from `adjust` and `after_step`."""
    step: int = 0
    """The number of the client's step in the round, from 0; an ordinary number also under vmap."""


class LocalTraining(NamedTuple):
    """The learning rate, momentum and number of steps of a client in a round."""

    lr: float
    momentum: float
    epochs: int
    """Passes over the client's samples."""
    repeats: int = 1
    """Steps on each batch."""
    batches: int = 0
    """Batches after the epochs (`train.steps`)."""

    @classmethod
    def of(cls, train: TrainSettings, round_number: int) -> Self:
        """Return what the settings ask for in a round."""
        epochs = train.epochs if train.steps is None else 0
        lr = train.learning_rate(round_number)
        return cls(lr, train.momentum, epochs, batches=train.steps or 0)

    def passes(self, num_samples: float, batch_size: int) -> float:
        """Return in how many steps a client uses each of its samples, on average."""
        size = max(1, num_samples)
        # After the last whole pass, all batches are full.
        whole, rest = divmod(self.batches, math.ceil(size / batch_size))
        return self.repeats * (self.epochs + whole + rest * batch_size / size)


class LayerNames(NamedTuple):
    """The names of the tensors of some layers of the model."""

    classifier: frozenset[str] = frozenset()
    """The last layer."""
    normalization: frozenset[str] = frozenset()
    """All normalization layers, with their running statistics."""


@dataclass(frozen=True)
class Server:
    """The server's state between rounds, without the prototype pool."""

    params: Tensors
    """All parameters, also those that `shared` keeps at the clients."""
    extra: Tensors = field(default_factory=dict)
    """Sent to the clients with each broadcast, next to the shared parameters."""
    private: Tensors = field(default_factory=dict)
    """Kept on the server, never sent."""


class Public(NamedTuple):
    """Samples that the server holds, and the model to evaluate on them."""

    apply: Callable[[Tensors, Tensor], tuple[Tensor, Tensor]]
    """`embeddings, logits = public.apply(params, public.inputs)`."""
    inputs: Tensor
    labels: Tensor


class Tally(NamedTuple):
    """The accepted updates of a round, in order of client name."""

    names: Sequence[str]
    sizes: Sequence[int]
    """Training samples."""
    weights: Sequence[float]
    """Weights in the mean; 0 for a client that withheld its update."""
    losses: Sequence[float | None]
    share: float
    """Σ n_i of these clients / Σ n_i of all clients."""
    prototypes: Mapping[str, Prototypes]
    sums: Tensors
    """Sums over clients of the statistics that `CollectsStatistics.collect` returned."""
    units: Mapping[str, Tensors] = MappingProxyType({})
    """`PartialModel`: masks of the hidden units that a client trained, by client and layer."""


# The interface

_PROMISES = {
    "plain_steps": {"init_client", "begin", "adjust", "after_step", "finish"},
    "plain_average": {"reduce"},
    "totals_suffice": {"weigh"},
}
"""Hooks that withdraw a promise: a class that overrides one has the attribute set to False, unless
the class itself sets the attribute."""


_PERSONAL: Mapping[PredictorName, PredictorName] = {
    "global_classifier": "personal_classifier",
    "global_prototype": "personal_prototype",
}


class Method:
    """A federated method; every default is FedAvg's.

    A subclass needs a `name` and a `summary`. Methods in this folder are found by their file name;
    a custom class is selected by `--method package.module:Class`.

    Args:
        experiment: All settings, with every default filled in.
        num_classes: C, the number of classes of the data set.

    Example: FedAvg with a proximal term in the loss (FedProx) and momentum on the server.
        >>> from mpfedcl.methods import Method, Server, Settings, check_method
        >>> class ProxSettings(Settings):
        ...     section = "prox"  # the flag --prox.mu, and the key prox.mu of experiment.toml
        ...     mu: float = 0.01
        >>> class ProxMomentum(Method):
        ...     name, summary = "prox-momentum", "FedProx with momentum on the server"
        ...     settings: ProxSettings
        ...
        ...     def loss(self, params, batch, context):
        ...         embeddings, logits = context.apply(params, batch.inputs)
        ...         squares = [(w - context.start[n]).square().sum() for n, w in params.items()]
        ...         return batch.cross_entropy(logits) + self.settings.mu / 2 * sum(squares)
        ...
        ...     def init_server(self, params):
        ...         return Server(params, private={n: 0 * w for n, w in params.items()})
        ...
        ...     def reduce(self, server, means, tally):
        ...         v, w = server.private, server.params
        ...         v = {n: 0.9 * v[n] + means[n] - w[n] for n in w}
        ...         return Server({n: w[n] + v[n] for n in w}, private=v)
        >>> check_method(ProxMomentum)
    """

    # Description

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    family: ClassVar[Family] = "shared model"
    """The heading under which `mpfedcl methods` and the docs list the method."""
    paper: ClassVar[str] = ""
    """Authors, venue and year: `McMahan et al., AISTATS 2017`."""
    interpretation: ClassVar[str] = ""
    """One sentence about our choices where the paper leaves points open."""
    sends: ClassVar[str] = "its model"
    """The content of an update, in a few words."""
    keeps: ClassVar[str] = "nothing"
    """The state between rounds, in a few words: `its last layer; the server: momentum`."""

    # Evaluation

    primary_predictor: ClassVar[PredictorName] = "global_classifier"
    """The predictor of the primary metric on the local test sets; methods with personal models
    set `personal_classifier`."""
    primary_predictor_global: PredictorName | None = None
    """The same on the global test set; None: `primary_predictor`."""
    predictors: ClassVar[tuple[PredictorName, ...]] = PREDICTORS
    """The predictors that are defined; the others are null in records. Leave out `global_...` if
    the server has no whole model."""

    # Settings

    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Settings that differ from the data set's defaults, such as `{"prototypes__padding": "fill"}`;
    a function computes the value from the experiment at the start of a run."""
    search_space: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
        {"train__lr": (0.01, 0.03, 0.1, 0.3)}
    )
    """Settings that `mpfedcl tune` searches, and the values to try; the defaults are always tried.
    A method adds its own: `{**Method.search_space, "mine__beta": (0.1, 0.5)}`."""
    settings: Settings
    """The method's settings: declare `settings: MySettings`, a subclass of `Settings` with a
    `section`; its fields become the flags `--section.field` and the keys of that section. Settings
    are pydantic models: `mu: float = Field(0.01, ge=0)` bounds a field."""

    # Behavior

    trains: ClassVar[bool] = True
    """False: clients take no steps (`ClosedForm`, or `CollectsStatistics` without a model)."""
    shares_model: bool = True
    """Whether all parameters are sent; override `shared` to send some of them."""
    needs_sgd: ClassVar[bool] = False
    """Whether the formulas hold only for SGD, with or without momentum: Adam is then rejected."""
    may_withhold: ClassVar[bool] = False
    """Whether `finish` may return None; otherwise an update without a model is rejected."""
    public: Public | None = None
    """Samples that no client holds, if `--public.size` is set."""
    initial: Tensors
    """The initial parameters in the order of the layers; set before the first hook is called."""
    layers: LayerNames = LayerNames()
    """The names of the tensors of some layers; set before the first hook is called."""

    # Promises, withdrawn from a class that overrides the hooks they concern (see `_PROMISES`)

    plain_steps: ClassVar[bool] = True
    """Whether training only takes gradient steps on `loss`: engines then skip these hooks."""
    plain_average: ClassVar[bool] = True
    """Whether `reduce` only averages, as a privacy budget for the model requires."""
    totals_suffice: ClassVar[bool] = False
    """Whether the server needs only sums over clients, as `--secure-aggregation` requires: set it
    to True if weights are numbers of samples and `reduce` reads no single client from the tally."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for promise, hooks in _PROMISES.items():
            if promise not in vars(cls):
                inherited = all(getattr(base, promise, True) for base in cls.__bases__)
                setattr(cls, promise, inherited and not hooks & vars(cls).keys())

    def __init__(self, experiment: Experiment, num_classes: int) -> None:
        self.experiment = experiment
        self.num_classes = num_classes
        kind = self.settings_class()
        values = getattr(experiment, kind.section, {}) if kind.section else {}
        self.settings = read_section(kind.section, kind, values)
        if self.needs_sgd and experiment.train.optimizer != "sgd":
            raise InvalidInput(
                f"train.optimizer is {experiment.train.optimizer!r}; with method {self.name} it "
                "must be sgd: its formulas assume steps along the gradient."
            )
        if experiment.train.class_weights != "none" and not self.trains:
            raise InvalidInput(
                f"train.class_weights is {experiment.train.class_weights!r}; with method "
                f"{self.name} it must be none: it takes no steps on a loss."
            )

    @final
    @classmethod
    def settings_class(cls) -> type[Settings]:
        """Return the class of the method's own settings, or `Settings` if it has none."""
        found: type[Settings] = get_type_hints(cls)["settings"]
        return found

    @final
    def predictor_on(self, test: Test) -> PredictorName:
        """Return the primary predictor on a test set; a shared test set is a global one."""
        own, overall = self.primary_predictor, self.primary_predictor_global
        overall = overall or own
        if self.experiment.model.share:
            # No model is global.
            own, overall = _PERSONAL.get(own, own), _PERSONAL.get(overall, overall)
        if self.experiment.privacy.has_budget:
            # The other predictors read training samples, which no noise protects there.
            return overall if overall == "global_prototype" else "global_classifier"
        if test == "global_test" or self.experiment.partition.test == "shared":
            return overall
        return own

    # State

    def init_server(self, params: Tensors) -> Server:
        """Return the server's state before round 1, given the initial parameters."""
        return Server(params)

    def init_client(self, params: Tensors) -> Tensors:
        """Return a client's state before its first round, given the initial parameters.

        The state stays with the client from round to round; hooks find it in `context.state`.
        """
        return {}

    # On the client

    def shared(self, parameter: str) -> bool:
        """Return whether the parameter of this name is sent; the others stay with each client.

        FedRep's is `return parameter not in self.layers.classifier`. Running statistics of batch
        normalization are asked for too: they are sent, averaged and kept like parameters, but the
        hooks see none of them.
        """
        return self.shares_model

    def describe(self, labels: Tensor) -> Tensors:
        """Return constants of a client's training labels [n], for `context.own`.

        They are computed once and never sent.
        """
        return {}

    def prepare(self, broadcast: Broadcast) -> Any:
        """Return the value of `context.received`, computed once per round from the broadcast.

        `broadcast` has the `round`, the shared `params`, the server's `extra` tensors and the
        prototype `pool`; the learning rate is `self.local_training(broadcast.round).lr`.
        """
        return None

    def local_training(self, round_number: int) -> LocalTraining:
        """Return the learning rate, momentum and number of steps of a round (from 1)."""
        return LocalTraining.of(self.experiment.train, round_number)

    def begin(self, context: Context) -> tuple[Tensors, Tensors]:
        """Return a client's parameters before the first step, and its memory.

        Memory is a dictionary of tensors that lasts until the round ends; `context.memory`.
        """
        return context.start, {}

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        """Return the loss of a batch, a scalar []; runs under vmap.

        `context.apply(params, batch.inputs)` returns embeddings [B, d] and logits [B, C].
        `batch.cross_entropy(logits)` is the mean cross-entropy over the samples.
        """
        _, logits = context.apply(params, batch.inputs)
        return batch.cross_entropy(logits)

    def adjust(
        self, gradients: Tensors, params: Tensors, context: Context
    ) -> tuple[Tensors, Tensors]:
        """Return the gradients that the optimizer applies, and the new memory; runs under vmap.

        The optimizer adds weight decay after this hook.
        """
        return gradients, context.memory

    def after_step(self, params: Tensors, context: Context) -> tuple[Tensors, Tensors]:
        """Return the parameters after the optimizer's step, and the new memory; runs under vmap."""
        return params, context.memory

    def finish(
        self, params: Tensors, context: Context, num_steps: int
    ) -> tuple[Tensors | None, Tensors]:
        """Return the tensors u_i that the server averages, and the client's next state.

        `num_steps` is the number of steps of this round. The tensors must have the same names,
        shapes and types in every round; a call before round 1, without training, determines them.
        Tensors that are not parameters, such as ||w_i - w||^2, are averaged likewise; `reduce` must
        take them out. None instead of tensors withholds the update (requires `may_withhold`).
        """
        return {name: value for name, value in params.items() if self.shared(name)}, context.state

    # On the server

    def weigh(self, update: Update, server: Server) -> float:
        """Return the weight p_i >= 0 of an update in the mean; 0 leaves the update out.

        Weights need not sum to 1: `means` are divided by their sum.
        """
        return update.num_samples

    def reduce(self, server: Server, means: Tensors, tally: Tally) -> Server:
        """Return the server's next state.

        `means` = sum_i p_i u_i / sum_i p_i has the names and shapes that `finish` returned, by
        default those of the shared parameters. It is empty if clients send statistics only, or if
        all clients have withheld their updates. `tally` has names, sample counts,
        weights, losses and prototypes of the accepted clients.
        """
        return replace(server, params={**server.params, **means})

    def remarks(self, broadcast: Broadcast) -> dict[str, Any]:
        """Return JSON values to add to the round's record in `rounds.jsonl`.

        It runs after `reduce`, which may leave values for it on the method object.
        """
        return {}


def update_template(method: Method, initial: Tensors, embedding_size: int) -> Tensors:
    """Return tensors of the names, shapes and types that a client's `finish` sends.

    They are found by running the hooks of the first round without any step.
    """
    if not method.trains:
        return {}
    shared = {name: value for name, value in initial.items() if method.shared(name)}
    if method.plain_steps:
        return shared
    like = next(iter(initial.values()))
    pool = PrototypePool.empty(
        method.num_classes, embedding_size, dtype=like.dtype, device=like.device
    )
    broadcast = Broadcast(1, shared, method.init_server(initial).extra, pool)
    context = Context(
        _reject_apply,
        initial,
        method.prepare(broadcast),
        method.init_client(initial),
        method.describe(torch.zeros(1, dtype=torch.int64, device=like.device)),
    )
    params, memory = method.begin(context)
    sent, _ = method.finish(params, replace(context, memory=memory), 1)
    return shared if sent is None else sent


def _reject_apply(*_: object) -> tuple[Tensor, Tensor]:
    raise TypeError("finish has no samples to apply the model to")
