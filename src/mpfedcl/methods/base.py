"""The one abstraction a federated method is written in.

A method is a few functions; engines differ only in where they run them. The hooks in the order in
which a round calls them: `prepare` and `begin`, then for each step `at_step`, `loss`,
`adjust` (or `adjust_and_remember`) and `after_step`, then `finish` and `summarize` on the clients;
`reduce` on the server; `project` and `reference` when prototypes predict. Hooks about sums over
clients are in `_sum_hooks.py`.

`loss`, `adjust`, `adjust_and_remember` and `after_step` run under `torch.func.vmap` in batched
engines: no branching on values, masks instead. The other hooks are ordinary code.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_type_hints

from torch import Tensor
from torch.nn.functional import normalize

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.method_settings import read_section
from mpfedcl.experiment.settings import Settings
from mpfedcl.gaussian import Metric
from mpfedcl.methods._predictors import PREDICTORS, PredictorName, Test
from mpfedcl.methods._round_values import Batch, Context, Public, Server, Tally
from mpfedcl.methods._sum_hooks import SumHooks
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.models import Model
from mpfedcl.prototypes import (
    MOST_PROTOTYPES,
    PrototypePool,
    Prototypes,
    kmeans_prototypes,
    mean_prototypes,
)

Family = Literal[
    "shared model", "personal models", "prototypes", "asynchronous", "one-shot", "alone"
]


class Method(SumHooks):
    """A federated method. The defaults are FedAvg's; a subclass says what it does differently.

    A subclass has a `name`, a one-line `summary` and the `predictor` it is judged by, and overrides
    the hooks below in which it differs. Methods in this folder are found automatically; one of your
    own is named by `--method package.module:Class`.

    Args:
        experiment: All settings, resolved: nothing is left open.
        num_classes: C, the classes of the data set.

    Example:
        >>> from mpfedcl import Batch, Context, Experiment, Method
        >>> class Ridge(Method):
        ...     name, summary = "ridge", "FedAvg with a small weight decay"
        ...
        ...     def loss(self, params, batch, context):
        ...         squares = sum(value.square().sum() for value in params.values())
        ...         return super().loss(params, batch, context) + 1e-4 * squares
        >>> Ridge(Experiment().resolved(), num_classes=10).shared("output.weight")
        True
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    family: ClassVar[Family] = "shared model"
    """Under which heading `mpfedcl methods` and the docs list it."""
    paper: ClassVar[str] = ""
    """Who described it, where and when: `McMahan et al., AISTATS 2017`."""
    interpretation: ClassVar[str] = ""
    """What the paper leaves open, or could not be checked, and how it is done here: a sentence."""
    sends: ClassVar[str] = "its model"
    """What a client sends in a round, in a few words."""
    keeps: ClassVar[str] = "nothing"
    """What a client keeps for its next round, in a few words; `the server: ...` for the server."""
    predictor: ClassVar[PredictorName] = "global_classifier"
    """The reading that this method is judged by, on the clients' local test sets."""
    global_test_predictor: ClassVar[PredictorName | None] = None
    """The same on a test of all clients' classes; None: as on their local test sets."""
    predictors: ClassVar[tuple[PredictorName, ...]] = PREDICTORS
    """What there is to read; the others are null, as a classifier's that is never trained."""
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Settings that differ from the data set's defaults, as `{"prototypes__padding": "fill"}`; a
    function finds the value from the experiment as it begins, and a resumed run keeps it."""
    search_space: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
        {"train__lr": (0.01, 0.03, 0.1, 0.3)}
    )
    """What `mpfedcl tune` searches: settings and the values to try. A method adds its own to these:
    `{**Method.search_space, "mine__beta": (0.1, 0.5)}`; the defaults are always tried."""
    options: ClassVar[tuple[str, ...]] = ()
    """Names that it reads of `experiment.options`, beside such search_space; others are refused."""
    settings: Settings
    """Settings of its own: a subclass says `settings: MySettings`, a class of settings in its own
    file with a `section`, and they are flags and keys of that name."""

    timing: ClassVar[Literal["rounds", "arrivals", "tiers", "ticks"]] = "rounds"
    """When the server folds what comes; all but rounds are for `Asynchronous` methods."""
    public: Public | None = None
    """The model and images that no client has, where `--public.size` holds some out."""
    trains: ClassVar[bool] = True
    """False: clients run no steps; what they send is what `collect` makes of their samples."""
    repeats: int = 1
    """Steps that are taken on each batch."""
    needs_sgd: ClassVar[bool] = False
    """Whether its formulas hold for steps along the gradient alone, with or without momentum."""
    shares_model: bool = True
    shares_prototypes: bool = False
    sends_pool: ClassVar[bool] = True
    """Whether clients are sent prototypes too; False: only the server looks at what they share."""
    clustering: ClassVar[Literal["kmeans", "mean", "dbscan"]] = "kmeans"
    """How `summarize` makes a class's prototypes; a method with dbscan does so itself."""

    def __init__(self, experiment: Experiment, num_classes: int) -> None:
        self.experiment = experiment
        self.num_classes = num_classes
        kind = self.settings_class()
        values = getattr(experiment, kind.section, {}) if kind.section else {}
        self.settings = read_section(kind.section, kind, values)
        per_class = experiment.prototypes.per_class
        numbers = {"kmeans": None if per_class == "auto" else per_class, "mean": 1, "dbscan": None}
        self.num_prototypes = numbers[self.clustering]
        """At most so many prototypes per class and client; None: any number."""
        if self.needs_sgd and experiment.train.optimizer != "sgd":
            raise InvalidInput(
                f"train.optimizer is {experiment.train.optimizer!r}; with method {self.name} it "
                "must be sgd: its formulas are about steps along the gradient."
            )

    @classmethod
    def settings_class(cls) -> type[Settings]:
        """Return the class of its own settings, or `Settings` where it has none."""
        found: type[Settings] = get_type_hints(cls)["settings"]
        return found

    def predictor_on(self, test: Test) -> PredictorName:
        """Return the predictor that a test is judged by; one test for all clients is a union."""
        if self.experiment.privacy.has_budget:
            # What else is read looks at training samples, which no noise protects there.
            main = self.global_test_predictor or self.predictor
            return main if main == "global_prototype" else "global_classifier"
        if test == "global_test" or self.experiment.partition.test == "shared":
            return self.global_test_predictor or self.predictor
        return self.predictor

    @property
    def epochs(self) -> int:
        """Passes over a client's samples in each round."""
        return self.experiment.train.epochs

    @property
    def adds_to_loss(self) -> bool:
        """Whether the loss is more than the classifier's: engines choose the fastest way by it.

        False where a term has no weight, so that the method then is FedAvg to the bit.
        """
        return type(self).loss is not Method.loss

    def own_model(self, input_size: int) -> Model | None:
        """Return the model of a method that brings its own; None: the one that settings name."""
        return None

    def shares_prototypes_in(self, round_number: int) -> bool:
        """Tell whether clients send prototypes in a round."""
        return self.shares_prototypes

    def see_model(self, params: Tensors) -> None:
        """Look at the model before anything is asked: its parameters, from first layer to last.

        Here a method refuses settings that do not fit the model.
        """

    # What travels, what is kept

    def shared(self, parameter: str) -> bool:
        """Tell whether a parameter is sent; the others stay with each client."""
        return self.shares_model

    def init_server(self, params: Tensors) -> Server:
        """Return the server's state before round 1."""
        return Server(params)

    def template(self, params: Tensors) -> Tensors:
        """Return a tensor of the right shape and type for each name that `finish` sends up."""
        if not self.trains:
            return {}
        return {name: value for name, value in params.items() if self.shared(name)}

    def init_client(self, params: Tensors) -> Tensors:
        """Return a client's own state before its first round."""
        return {}

    # On the client

    def describe(self, labels: Tensor) -> Tensors:
        """Return constants of a client's training labels, for the loss; they never leave it."""
        return {}

    def descent(self, round_number: int) -> tuple[float, float]:
        """Return the length of a round's steps and their momentum."""
        train = self.experiment.train
        return train.learning_rate(round_number), train.momentum

    def prepare(self, broadcast: Broadcast) -> Any:
        """Turn the broadcast into what the loss needs, once per round."""
        return None

    def at_step(self, received: Any, step: int) -> Any:
        """Return what the loss is given in a step, counted from 0: the same for every client."""
        return received

    def begin(self, context: Context) -> tuple[Tensors, Tensors]:
        """Return the parameters and the memory that a client begins a round's steps with."""
        return context.start, {}

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        """Return the loss of one batch, a scalar; safe under vmap."""
        _, logits = context.apply(params, batch.inputs)
        return batch.cross_entropy(logits)

    def adjust(self, gradients: Tensors, params: Tensors, context: Context) -> Tensors:
        """Change the gradients before a step; safe under vmap."""
        return gradients

    def adjust_and_remember(
        self, gradients: Tensors, params: Tensors, context: Context
    ) -> tuple[Tensors, Tensors]:
        """Return the gradients of a step and the memory to go on with; safe under vmap."""
        return self.adjust(gradients, params, context), context.memory

    def after_step(self, params: Tensors, context: Context) -> tuple[Tensors, Tensors]:
        """Return the parameters and the memory to go on with after a step; safe under vmap."""
        return params, context.memory

    def finish(
        self, params: Tensors, context: Context, num_steps: int
    ) -> tuple[Tensors | None, Tensors]:
        """Return what is averaged at the server, and the client's new state.

        None in place of the first withholds the update: the client has still answered.
        `num_steps` counts all steps, `context.memory` is what the last one has left.
        """
        return {name: value for name, value in params.items() if self.shared(name)}, context.state

    def summarize(
        self, embeddings: Sequence[Tensor], labels: Sequence[Tensor], seeds: Sequence[int]
    ) -> list[Prototypes]:
        """Return the prototypes of several clients from their projected embeddings.

        Where `shares_prototypes` is false they are never sent: they only serve the predictor by
        nearest prototype, beside the classifier's.
        """
        settings = self.experiment.prototypes
        common = {
            "num_classes": self.num_classes,
            "min_cluster_size": settings.min_cluster_size,
        }
        if self.clustering == "mean":
            return mean_prototypes(embeddings, labels, **common)
        number: int | Literal["auto"] = self.num_prototypes or 1
        if self._chooses_number:
            number = "auto"
        return kmeans_prototypes(
            embeddings, labels, seeds, num_prototypes=number, init=settings.init, **common
        )

    # On the server

    def thin(self, server: Server, client: str, round_number: int) -> Tensors:
        """Return masks of the units of each hidden layer that a client is sent; empty: all of them.

        Where it was not sent a number, its update has the server's.
        """
        return {}

    def weigh(self, update: Update, server: Server) -> float:
        """Return an update's weight in the mean, from this update alone; 0 leaves it out."""
        return update.num_samples

    def reduce(self, server: Server, means: Tensors, tally: Tally) -> Server:
        """Fold the clients' averages, and what else came with them, into the server's state.

        `means` is empty where clients send sums alone, or all have withheld their updates.
        """
        return replace(server, params={**server.params, **means})

    # For the records

    def remarks(self, broadcast: Broadcast) -> dict[str, Any]:
        """Return what the round's record should say beside what every method's does."""
        return {}

    # When prototypes predict

    def project(self, embeddings: Tensor) -> Tensor:
        """Return the embeddings in the space where prototypes are made and compared."""
        if self.experiment.prototypes.normalize:
            return normalize(embeddings, dim=-1, eps=1e-12)
        return embeddings

    def reference(self, pool: PrototypePool) -> PrototypePool:
        """Return the prototypes that clients are sent, and that predictions are compared with."""
        return pool

    def own_reference(self, reference: PrototypePool, client: str) -> PrototypePool:
        """Return what a client's own model is compared with, of what `reference` returned."""
        return reference

    @property
    def most_prototypes(self) -> int | None:
        """The most prototypes of a class that an honest client sends, for the guard."""
        return MOST_PROTOTYPES if self._chooses_number else self.num_prototypes

    @property
    def _chooses_number(self) -> bool:
        is_open = self.num_prototypes is None and self.clustering == "kmeans"
        return is_open and self.experiment.prototypes.per_class == "auto"

    def metric(self, fitted: Tensors, pool: PrototypePool) -> Metric | None:
        """Return the metric in which samples are far from the pool; None: by `reference` alone.

        `fitted` is what the server keeps beside its parameters.
        """
        return None

    def longest_prototype(self) -> float:
        """Return the greatest length an honest prototype can have, for the guard."""
        # A mean of vectors of length 1 is no longer than 1; the rest is rounding.
        return 1.001 if self.experiment.prototypes.normalize else math.inf
