"""A client that was not there while a run was trained: its images, training and accuracy."""

from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from mpfedcl.data.client_data import load_own_samples
from mpfedcl.data.inputs import byte_input_maker, feature_input_maker
from mpfedcl.data.own_samples import open_own_samples
from mpfedcl.data.sample_format import ImageFormat, choose_format
from mpfedcl.data.samples import SampleIndex
from mpfedcl.data.train_test_split import Indices
from mpfedcl.deployment.trained_run import TrainedRun
from mpfedcl.engines import InProcessEngine
from mpfedcl.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.messages import Broadcast, Update
from mpfedcl.methods import Method
from mpfedcl.prototypes import PrototypePool, Prototypes
from mpfedcl.rng import seed_for
from mpfedcl.rounds.clock import Clock
from mpfedcl.rounds.evaluation import Evaluator, Predictions, as_stack, percent_correct
from mpfedcl.rounds.guard import Guard
from mpfedcl.rounds.update_collector import UpdateCollector
from mpfedcl.tensors import Tensors

Accuracies = dict[str, float | None]
"""Percent right on the client's test images, by what predicts; None where nothing does."""


@dataclass(frozen=True)
class TrainingOutcome:
    """What a client has after its training, or at once where it did not train."""

    params: Tensors
    update: Update
    """What it would send to a server."""
    rejected: str | None
    """Why a server would not take it, or None."""

    @property
    def prototypes(self) -> Prototypes:
        """Its own prototypes."""
        return self.update.prototypes


class NewClient:
    """A new client of a finished run; the run's own files are only read."""

    def __init__(
        self, trained: TrainedRun, source: Path, name: str, *, test_fraction: float | None = None
    ) -> None:
        self.name = name
        self._trained = trained
        self._experiment = trained.experiment
        if test_fraction is not None:
            # Whoever says how much to hold out wants the rest to be used.
            self._experiment = self._experiment.replace(
                dataset__test_fraction=test_fraction,
                dataset__per_class=None,
                dataset__test_per_class=None,
                dataset__train_size=None,
            )
        sample_index = open_own_samples(source, trained.class_names)
        if sample_index.vector_width != trained.input_format.vector_width:
            raise InvalidInput(
                f"data is {str(source)!r}, which holds {sample_index}; the run takes "
                f"{trained.input_format}."
            )
        self.data = load_own_samples(
            self._experiment, self._make_inputs, sample_index=sample_index, name=name
        )
        self.client = self.data.clients[0]

    @property
    def num_classes_held(self) -> int:
        """Classes that it has training images of."""
        return int((torch.bincount(self.client.labels) > 0).sum())

    def with_training_images(self, chosen: Tensor) -> Self:
        """Return the same client with some of its training images, and all its test images."""
        client = replace(
            self.client, inputs=self.client.inputs[chosen], labels=self.client.labels[chosen]
        )
        limited = copy(self)
        limited.data, limited.client = replace(self.data, clients=(client,)), client
        return limited

    def train(
        self, params: Tensors, pool: PrototypePool, *, epochs: int, lr: float | None = None
    ) -> TrainingOutcome:
        """Train from a model and a pool as a client does in a round, then make prototypes.

        The learning rate stays as it is given, the run's first one unless told. Without epochs the
        model is taken as it is.
        """
        # A round's learning rate has decayed to next to nothing by the end of a run.
        changes = {"train__lr": lr or self._experiment.train.lr, "train__lr_decay": 1.0}
        experiment = self._experiment.replace(**changes, train__epochs=max(1, epochs))
        method = type(self._trained.method)(experiment, self.data.num_classes)
        server = method.init_server(params)
        # The same keys as in the round after the run's last: nothing of the run is drawn again.
        broadcast = Broadcast(experiment.rounds + 1, params, server.extra, method.reference(pool))
        train = self._train if epochs else self._keep_model
        model, update = train(experiment, method, broadcast)
        sizes = {self.name: len(self.client.labels)}
        dimension = self._trained.model.embedding_size
        collector = UpdateCollector(
            Guard.of(method, params, sizes, dimension=dimension), broadcast, sizes
        )
        collector.add(update)
        return TrainingOutcome(model, update, collector.rejected.get(self.name))

    def evaluate(self, params: Tensors, own: Prototypes, pool: PrototypePool) -> Accuracies:
        """Return the accuracy on the test images, by classifier and by nearest prototype.

        `pool`: the others' prototypes alone; `own`: the client's alone; `both`: all together.
        """
        pools = {"pool": pool, "own": self._gather(own), "both": pool.with_client(self.name, own)}
        found: Accuracies = dict.fromkeys(("classifier", *pools))
        if len(self.data.test_labels):
            for name, each in pools.items():
                predictions = self._predict(params, each)
                found["classifier"] = self._percent(predictions.classifier)
                found[name] = self._percent(predictions.prototype) if len(each) else None
        return found

    def _gather(self, prototypes: Prototypes) -> PrototypePool:
        return PrototypePool.gather(
            {self.name: prototypes},
            num_classes=self.data.num_classes,
            num_prototypes=self._trained.method.num_prototypes,
        )

    def _train(
        self, experiment: Experiment, method: Method, broadcast: Broadcast
    ) -> tuple[Tensors, Update]:
        model, params = self._trained.model, broadcast.params
        engine = InProcessEngine(experiment, method, model, self.data, params, Clock())
        (update,) = engine.train(broadcast, [self.name], keep=[self.name])
        ((_, own),) = engine.personal_models(params)
        return own, update

    @torch.no_grad()
    def _keep_model(
        self, experiment: Experiment, method: Method, broadcast: Broadcast
    ) -> tuple[Tensors, Update]:
        """Make prototypes with the model as it came."""
        embeddings, _ = self._trained.model.apply(broadcast.params, self.client.inputs)
        seed = seed_for(experiment.seed, broadcast.round, self.name, "clusters")
        (prototypes,) = method.summarize([method.project(embeddings)], [self.client.labels], [seed])
        averaged = method.template(broadcast.params)
        update = Update(self.name, len(self.client.labels), averaged, prototypes, 0.0)
        return broadcast.params, update

    def _predict(self, params: Tensors, pool: PrototypePool) -> Predictions:
        method, model = self._trained.method, self._trained.model
        evaluator = Evaluator(
            self.data.test_inputs, self.data.test_labels, method.project, method.reference(pool)
        )
        (predictions,) = evaluator.predict(lambda inputs: as_stack(model.apply(params, inputs)))
        return predictions

    def _percent(self, predicted: Tensor | None) -> float | None:
        return percent_correct(None if predicted is None else predicted == self.data.test_labels)

    def _make_inputs(
        self, sample_index: SampleIndex, rows: Indices, experiment: Experiment
    ) -> Tensor:
        encoder, input_format = self._trained.encoder, self._trained.input_format
        if encoder is not None:
            trains = experiment.encoder.train
            make = byte_input_maker(encoder) if trains else feature_input_maker(encoder)
            return make(sample_index, rows, experiment)
        own = choose_format(sample_index.store.inspect(), None, input_format.dtype)
        if isinstance(own, ImageFormat) and isinstance(input_format, ImageFormat):
            # In their own colour mode: `convert` takes colour out as it does for a prediction.
            own = replace(input_format, is_colour=own.is_colour)
        samples = sample_index.store.load(rows, own)
        return self._trained.inputs(input_format.convert(samples))
