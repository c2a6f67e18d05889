"""A client that was not part of a finished run: its samples, training and accuracy."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.rng import seed_for
from mpfedcl.core.tensors import Tensors
from mpfedcl.data.loading import byte_input_maker, feature_input_maker, load_own_samples
from mpfedcl.data.samples import ImageFormat, Indices, SampleIndex
from mpfedcl.engines import InProcessEngine
from mpfedcl.experiment import Experiment
from mpfedcl.inference.samples import load_converted, open_labeled_samples
from mpfedcl.inference.trained_run import INPUTS_AT_ONCE, TrainedRun, apply_to_batches
from mpfedcl.methods import Server, prototype_rule
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.prototypes import PrototypePool, Prototypes
from mpfedcl.rounds.assembly import Assembly, assemble
from mpfedcl.rounds.collector import UpdateCollector
from mpfedcl.rounds.metrics import percent_correct
from mpfedcl.rounds.validation import UpdateValidator

Accuracies = dict[str, float | None]
"""Accuracy in % on the client's test samples by predictor; None if it cannot be measured."""


@dataclass(frozen=True)
class ClientOutcome:
    """A new client's model and the update that it would send to a server."""

    params: Tensors
    update: Update
    rejected: str | None
    """Why update validation rejects the update, or None."""

    @property
    def prototypes(self) -> Prototypes:
        """The client's prototypes."""
        return self.update.prototypes


class NewClient:
    """A new client of a finished run, whose files are only read."""

    def __init__(
        self,
        trained: TrainedRun,
        source: Path,
        name: str,
        *,
        test_fraction: float | None = None,
    ) -> None:
        self.name = name
        self.noun = trained.input_format.noun
        self._trained = trained
        self._experiment = trained.experiment
        if test_fraction is not None:
            if not 0 < test_fraction < 1:
                raise InvalidInput(
                    f"test_fraction is {test_fraction:g}; it must be greater than 0 and less than "
                    "1."
                )
            # All samples that are not held out are used.
            self._experiment = self._experiment.replace(
                dataset__test_fraction=test_fraction,
                dataset__per_class=None,
                dataset__test_per_class=None,
                dataset__train_size=None,
            )
        sample_index = open_labeled_samples(trained, source, "data")
        self.data = load_own_samples(
            self._experiment, self._make_inputs, sample_index=sample_index, name=name
        )
        self.client = self.data.clients[0]
        self.data.partition["input_shape"] = list(trained.input_format.shape)

    def train(
        self, params: Tensors, pool: PrototypePool, *, epochs: int, lr: float | None = None
    ) -> ClientOutcome:
        """Train from a model and a pool as in a round, then compute prototypes.

        The learning rate is constant; without `epochs` the model is used as it is.
        """
        # By the end of a run the decayed learning rate is too small to change anything.
        experiment = self._experiment.replace(
            train__lr=lr or self._experiment.train.lr,
            train__lr_decay=1.0,
            train__epochs=max(1, epochs),
            train__steps=None,
        )
        assembly = self._assemble(experiment, params)
        method = assembly.method
        server = method.init_server(params)
        # The keys of the round after the last: no random number of the run is used again.
        broadcast = Broadcast(
            experiment.rounds + 1, params, server.extra, prototype_rule(method).reference(pool)
        )
        if epochs:
            engine = InProcessEngine(assembly, self.data)
            (update,) = engine.train(broadcast, [self.name], keep=[self.name])
            ((_, model),) = engine.personal_models(broadcast.params)
        else:
            model, update = params, self._summarize(assembly, broadcast)
        return ClientOutcome(model, update, self._validate(assembly, server, broadcast, update))

    def collect(self) -> tuple[Update, str | None]:
        """Return the statistics that the client would send, and why they are rejected, or None."""
        assembly = self._assemble(self._experiment)
        server = assembly.method.init_server(assembly.initial)
        like = assembly.initial["weight"]
        empty = PrototypePool.empty(self.data.num_classes, like.shape[-1], 1, dtype=like.dtype)
        broadcast = Broadcast(1, server.params, server.extra, empty)
        (sent,) = InProcessEngine(assembly, self.data).train(broadcast, [self.name], keep=[])
        update = sent.written_out()
        # Validated like a message from a network: the statistics stay in the global model.
        counts = torch.bincount(self.client.labels, minlength=self.data.num_classes)
        label_counts = {self.name: counts.tolist()}
        return update, self._validate(assembly, server, broadcast, update, label_counts)

    def _validate(
        self,
        assembly: Assembly,
        server: Server,
        broadcast: Broadcast,
        update: Update,
        label_counts: dict[str, list[int]] | None = None,
    ) -> str | None:
        """Return why update validation rejects an update, or None."""
        sizes = {self.name: len(self.client.labels)}
        validator = UpdateValidator(assembly, sizes, label_counts)
        collector = UpdateCollector(assembly.method, validator, server, broadcast, sizes)
        collector.add(update)
        return collector.rejected.get(self.name)

    def evaluate(self, params: Tensors, own: Prototypes, pool: PrototypePool) -> Accuracies:
        """Return the accuracy on the test samples, by classifier and by nearest prototype.

        `pool`: the prototypes of the others only; `own`: the client's only; `both`: all together.
        """
        rule, truth = prototype_rule(self._trained.method), self.data.test_labels
        own_pool = PrototypePool.gather(
            {self.name: own}, num_classes=self.data.num_classes, num_prototypes=rule.num_prototypes
        )
        pools = {"pool": pool, "own": own_pool, "both": pool.with_client(self.name, own)}
        found: Accuracies = dict.fromkeys(("classifier", *pools))
        if not len(truth):
            return found
        points, logits = self._apply(params, self.data.test_inputs)
        if "personal_classifier" in self._trained.method.predictors:
            found["classifier"] = percent_correct(logits.argmax(1) == truth)
        for name, each in pools.items():
            if len(each):
                nearest, _ = rule.reference(each).nearest(points)
                found[name] = percent_correct(nearest == truth)
        return found

    def _assemble(self, experiment: Experiment, initial: Tensors | None = None) -> Assembly:
        return assemble(
            experiment,
            self._trained.model,
            num_classes=self.data.num_classes,
            input_size=self.data.input_size,
            method_class=type(self._trained.method),
            initial=initial,
        )

    def _apply(self, params: Tensors, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return projected embeddings and logits of the run's model."""
        batches = torch.split(inputs, INPUTS_AT_ONCE)
        return apply_to_batches(self._trained.method, self._trained.model, params, batches)

    @torch.no_grad()
    def _summarize(self, assembly: Assembly, broadcast: Broadcast) -> Update:
        """Return an update with prototypes of the model as it is."""
        points, _ = self._apply(broadcast.params, self.client.inputs)
        seed = seed_for(assembly.experiment.seed, broadcast.round, self.name, "clusters")
        rule = prototype_rule(assembly.method)
        (prototypes,) = rule.summarize([points], [self.client.labels], [seed])
        return Update(self.name, len(self.client.labels), assembly.template, prototypes, 0.0)

    def _make_inputs(
        self, sample_index: SampleIndex, rows: Indices, experiment: Experiment
    ) -> Tensor:
        encoder, input_format = self._trained.encoder, self._trained.input_format
        is_gray = isinstance(input_format, ImageFormat) and not input_format.is_color
        if encoder is not None and not is_gray:
            trains = experiment.encoder.train
            make = byte_input_maker(encoder) if trains else feature_input_maker(encoder)
            return make(sample_index, rows, experiment)
        return self._trained.inputs(load_converted(self._trained, sample_index, rows))
