"""A client that was not there while a run was trained: its images, training and accuracy."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.rng import seed_for
from mpfedcl.core.tensors import Tensors
from mpfedcl.data.loading import byte_input_maker, feature_input_maker, load_own_samples
from mpfedcl.data.reader import open_own_samples
from mpfedcl.data.samples import ImageFormat, Indices, SampleIndex
from mpfedcl.engines import InProcessEngine
from mpfedcl.experiment import Experiment
from mpfedcl.inference.given_samples import load_converted
from mpfedcl.inference.trained_run import TrainedRun
from mpfedcl.methods import prototype_rule
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.prototypes import PrototypePool, Prototypes
from mpfedcl.rounds.assembly import Assembly, assemble
from mpfedcl.rounds.evaluation import Evaluator, as_stack, percent_correct
from mpfedcl.rounds.update_collector import UpdateCollector
from mpfedcl.rounds.validation import UpdateValidator

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
        self,
        trained: TrainedRun,
        source: Path,
        name: str,
        *,
        test_fraction: float | None = None,
        new_classes: bool = False,
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
        sample_index = open_own_samples(
            source, trained.class_names, trained.columns, new_classes=new_classes
        )
        if sample_index.vector_width != trained.input_format.vector_width:
            raise InvalidInput(
                f"data is {str(source)!r}, which holds {sample_index}; the run takes "
                f"{trained.input_format}."
            )
        self.data = load_own_samples(
            self._experiment, self._make_inputs, sample_index=sample_index, name=name
        )
        self.client = self.data.clients[0]

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
        assembly = assemble(
            experiment,
            self._trained.model,
            num_classes=self.data.num_classes,
            input_size=self.data.input_size,
            method_class=type(self._trained.method),
            initial=params,
        )
        method = assembly.method
        server, reference = method.init_server(params), prototype_rule(method).reference(pool)
        # The same keys as in the round after the run's last: nothing of the run is drawn again.
        broadcast = Broadcast(experiment.rounds + 1, params, server.extra, reference)
        train = self._train if epochs else self._keep_model
        model, update = train(assembly, broadcast)
        sizes = {self.name: len(self.client.labels)}
        collector = UpdateCollector(
            method, UpdateValidator(assembly, sizes), server, broadcast, sizes
        )
        collector.add(update)
        return TrainingOutcome(model, update, collector.rejected.get(self.name))

    def collect(self) -> tuple[Update, str | None]:
        """Return the sums that it would send, and why a server would not take them, or None."""
        assembly = assemble(
            self._experiment,
            self._trained.model,
            num_classes=self.data.num_classes,
            input_size=self.data.input_size,
            method_class=type(self._trained.method),
        )
        method, sizes = assembly.method, {self.name: len(self.client.labels)}
        server = method.init_server(assembly.initial)
        like = assembly.initial["weight"]
        nobody = PrototypePool.empty(self.data.num_classes, like.shape[-1], 1, dtype=like.dtype)
        broadcast = Broadcast(1, server.params, server.extra, nobody)
        (sent,) = InProcessEngine(assembly, self.data).train(broadcast, [self.name], keep=[])
        update = sent.written_out()
        # As closely as a message from a network: it stays in everybody's model.
        counts = torch.bincount(self.client.labels, minlength=self.data.num_classes)
        guard = UpdateValidator(assembly, sizes, {self.name: counts.tolist()})
        collector = UpdateCollector(method, guard, server, broadcast, sizes)
        collector.add(update)
        return update, collector.rejected.get(self.name)

    def evaluate(self, params: Tensors, own: Prototypes, pool: PrototypePool) -> Accuracies:
        """Return the accuracy on the test images, by classifier and by nearest prototype.

        `pool`: the others' prototypes alone; `own`: the client's alone; `both`: all together.
        """
        rule, truth = prototype_rule(self._trained.method), self.data.test_labels
        alone = PrototypePool.gather(
            {self.name: own},
            num_classes=self.data.num_classes,
            num_prototypes=rule.num_prototypes,
        )
        pools = {"pool": pool, "own": alone, "both": pool.with_client(self.name, own)}
        found: Accuracies = dict.fromkeys(("classifier", *pools))
        if len(truth):
            for name, each in pools.items():
                evaluator = Evaluator(
                    self.data.test_inputs, truth, rule.project, rule.reference(each)
                )
                (predictions,) = evaluator.predict(
                    lambda inputs: as_stack(self._trained.model.apply(params, inputs))
                )
                classified, nearest = predictions.classifier, predictions.prototype
                if "personal_classifier" in self._trained.method.predictors:
                    found["classifier"] = percent_correct(classified == truth)
                if len(each) and nearest is not None:
                    found[name] = percent_correct(nearest == truth)
        return found

    def _train(self, assembly: Assembly, broadcast: Broadcast) -> tuple[Tensors, Update]:
        engine = InProcessEngine(assembly, self.data)
        (update,) = engine.train(broadcast, [self.name], keep=[self.name])
        ((_, own),) = engine.personal_models(broadcast.params)
        return own, update

    @torch.no_grad()
    def _keep_model(self, assembly: Assembly, broadcast: Broadcast) -> tuple[Tensors, Update]:
        """Make prototypes with the model as it came."""
        experiment, method = assembly.experiment, assembly.method
        embeddings, _ = self._trained.model.apply(broadcast.params, self.client.inputs)
        seed = seed_for(experiment.seed, broadcast.round, self.name, "clusters")
        rule = prototype_rule(method)
        (prototypes,) = rule.summarize([rule.project(embeddings)], [self.client.labels], [seed])
        count = len(self.client.labels)
        update = Update(self.name, count, assembly.template, prototypes, 0.0)
        return broadcast.params, update

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
