"""A client on its own machine: its settings, its data, its training, and its answers."""

import math
from dataclasses import replace
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any

import torch

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.plugins import entry_points
from mpfedcl.core.tensors import Tensors, take_group
from mpfedcl.data.client_data import FederatedData
from mpfedcl.data.loading import load_data_and_model, load_own_samples
from mpfedcl.data.sample_index import open_own_samples
from mpfedcl.data.secret_split import find_secret, split_by_secret
from mpfedcl.data.tables import TableColumns, declare_columns
from mpfedcl.engines import InProcessEngine
from mpfedcl.engines.evaluation import ClientEvaluation
from mpfedcl.engines.hardware import cap_threads, find_device
from mpfedcl.engines.trainers.base import TrainedClient
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.data_folder import holds_arrays
from mpfedcl.experiment.names import MODELS
from mpfedcl.methods import (
    PREDICTORS,
    TESTS,
    Asynchronous,
    ClosedForm,
    SharesPrototypes,
    find_method,
    is_built_in,
    prototype_rule,
)
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.models import Model
from mpfedcl.network.client import ClientRefusal
from mpfedcl.network.client.answers import answer_evaluation, answer_kind
from mpfedcl.network.client.budget import ClientLedger, check_plan, plan_releases, release_once
from mpfedcl.network.client.secure_aggregation import (
    SecureAggregation,
    check_conditions,
    draw_once,
)
from mpfedcl.network.client.state import ClientStateStore, save_final_models
from mpfedcl.network.packing import (
    Introduction,
    ReportedEvaluation,
    SampleKind,
    name_dispatch,
    pack_part_update,
    pack_update,
    unpack_broadcast,
    unpack_part,
)
from mpfedcl.network.setup.folders import ClientSettings
from mpfedcl.network.transport import FORMAT, Kind, Message
from mpfedcl.privacy.private_rounds import released_predictors
from mpfedcl.privacy.secure_aggregation import check_secure_aggregation
from mpfedcl.privacy.secure_aggregation.layout import SumLayout
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.assembly import Assembly, assemble
from mpfedcl.rounds.evaluation import AccuracyTable, WantedPredictors
from mpfedcl.rounds.scoring import Evaluator

_NO_FILES = ("random-resnet18:", "random-filters:")
"""Prefixes of encoder names that are not followed by a file."""


class NetworkClient:
    """Answers a server's requests with the messages of `packing.py`, and nothing else."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings, self._policy = settings, settings.policy
        self.loaded: tuple[Experiment, FederatedData, Model] | None = None
        """Cache for the messages of one run."""

    def answer(self, kind: Kind, message: Message) -> Message:
        """Return the answer to a request."""
        try:
            return self._answer(kind, message)
        except ClientRefusal:
            raise
        except InvalidInput as error:
            # The error may contain file names, and file names may contain names of people.
            getLogger("mpfedcl").error("%s", error)
            raise ClientRefusal(
                "it cannot use its data, its encoder or its model; its own log contains the reason."
            ) from None

    def _answer(self, kind: Kind, message: Message) -> Message:
        if (found := message.value("format", int)) != FORMAT:
            newer, older = ("server", "client") if found > FORMAT else ("client", "server")
            raise ClientRefusal(
                f"format is {found} and must be {FORMAT}: the {newer} is of a newer version; the "
                f"{older} must be updated."
            )
        cap_threads()
        experiment = self._read_experiment(message.value("experiment", str))
        plan = plan_releases(experiment)
        check_plan(experiment, plan, self._policy)
        ledger = ClientLedger(self._settings.state, self._policy)
        if kind == "hello":
            # A new run: the data may have changed.
            self.loaded = None
            return self._introduce(*self._loaded(experiment), tells_counts=experiment.tells_counts)
        store = ClientStateStore(self._settings.state, message.value("run", str))
        if plan is None or kind != "close":
            # Before training, and before others count on this client.
            ledger.begin(store.folder.name, message.value("round", int), plan)
        if kind == "secure":
            return self._secure_aggregation(experiment, message).answer()
        device, (data, model) = find_device(self._settings.device), self._loaded(experiment)
        assembly = assemble(
            experiment,
            model,
            num_classes=data.num_classes,
            input_size=data.input_size,
            device=device,
        )
        num_prototypes = prototype_rule(assembly.method).num_prototypes
        broadcast = unpack_broadcast(message, data.num_classes, num_prototypes).to(device)
        broadcast = unpack_part(broadcast, message, data.names[0], assembly.initial)
        trainer = ClientTrainer(assembly, data)
        after = message.value("settled", int)
        state = store.load(after, device)
        is_asynchronous = isinstance(assembly.method, Asynchronous)
        if "delay" in message.values:
            state = trainer.note_delay(state, message.value("delay", float))
        late: dict[str, Any] = {}
        if message.value("read", bool):
            has_own = after > 0 if is_asynchronous else after == broadcast.round - 1
            own = trainer.personal_model(broadcast, state) if has_own else {}
            rules = self._policy.evaluation
            is_exact = answer_kind(rules, experiment) == "exact"
            confuses = kind == "close" and self._policy.data.min_class_count == 1 and is_exact
            evaluation = trainer.evaluate(broadcast, own, confuses)
            ask = partial(answer_evaluation, rules, ledger, store, assembly.method)
            late = {"late": ask(kind, message, evaluation, len(data.test_labels))}
            if kind == "close":
                if own and not assembly.method.trains:
                    # A one-shot method has a personal model only after the exchange.
                    store.replace(after, state | as_personal(own))
                personal = trainer.personal_model(broadcast, state)
                models = *trainer.received_models(broadcast), personal
                last = broadcast.round - 1
                save_final_models(store, assembly.method, data, models, last, evaluation.table)
        if kind == "close":
            return Message(late)
        update, kept = trainer.train(broadcast, state)
        if update.loss is not None and not math.isfinite(update.loss):
            raise ClientRefusal(f"its loss is {update.loss}; it must be finite.")
        keep = plan and partial(release_once, ledger, store, broadcast.round, plan)
        if experiment.privacy.has_budget:
            # No count and no loss.
            update = replace(update, num_samples=1, loss=None)
        elif self._policy.data.min_class_count > 1:
            update = replace(update, num_samples=sum(self._told_counts(data)))
        if keep and not experiment.secure_aggregation:
            update = replace(update, summed=keep(dict(update.summed)))
        store.save(broadcast.dispatch or broadcast.round, kept, after=after)
        if experiment.secure_aggregation:
            encode = partial(SumLayout(assembly).encode, update)
            if keep:
                encode = partial(draw_once, keep, experiment, encode)
            answer = self._secure_aggregation(experiment, message).mask(encode)
        else:
            answer = pack_update(pack_part_update(update, broadcast))
        return Message({**answer.values, **late, **name_dispatch(broadcast)}, answer.arrays)

    def _secure_aggregation(self, experiment: Experiment, message: Message) -> SecureAggregation:
        if not experiment.secure_aggregation:
            raise ClientRefusal("secure_aggregation is False; it must be True for such a message.")
        try:
            check_secure_aggregation(experiment)
        except InvalidInput as error:
            raise ClientRefusal(str(error)) from None
        return SecureAggregation(self._settings, experiment, message)

    def _read_experiment(self, document: str) -> Experiment:
        """Return the server's experiment with this client's paths and without foreign code."""
        settings = self._settings
        try:
            experiment = Experiment.parse_toml(document, Path("the server's experiment"))
        except InvalidInput as error:
            raise ClientRefusal(str(error)) from None
        allow = self._policy.allow
        allow.check("methods", experiment.method, is_built_in(experiment.method))
        if settings.name in (own := experiment.model.of_clients([settings.name])):
            # The models of other clients need not be installed here.
            experiment = experiment.replace(model=own[settings.name])
        model = experiment.model.name or ""
        if model:
            allow.check("models", model, model in MODELS)
        if ":" in experiment.dataset.name:
            raise ClientRefusal(
                f"dataset.name is {experiment.dataset.name!r}; it must be a named set, because a "
                "client imports no function that a server names."
            )
        # Importing the method registers its settings, which can be checked only now.
        find_method(experiment.method)
        try:
            experiment = experiment.replace()
        except InvalidInput as error:
            raise ClientRefusal(str(error)) from None
        check_conditions(settings, experiment)
        name = settings.encoder or experiment.encoder.name
        is_table = experiment.dataset.name == "table"
        holds = settings.data is not None and (is_table or holds_arrays(settings.data))
        if not settings.encoder and holds:
            # The server's default is for images.
            name = "none"
        if not settings.encoder and name and ":" in name and not name.startswith(_NO_FILES):
            raise ClientRefusal(
                f"encoder.name is {name!r}; the client must give the path of that file (--encoder)."
            )
        if not settings.encoder and name not in (None, "", "none"):
            is_own = name.partition(":")[0] not in entry_points("mpfedcl.encoders")
            allow.check("encoders", name, is_own)
        return experiment.replace(
            dataset__root=settings.data,
            encoder__name=name,
            encoder__weights=settings.encoder_weights,
            prototypes__min_cluster_size=max(
                self._policy.data.min_class_count, experiment.prototypes.min_cluster_size
            ),
            device=settings.device,
            workers=1,
            engine="auto",
        )

    def _loaded(self, experiment: Experiment) -> tuple[FederatedData, Model]:
        if self.loaded is None or self.loaded[0] != experiment:
            self.loaded = (experiment, *self._load(experiment, find_device(self._settings.device)))
        return self.loaded[1:]

    def _load(self, experiment: Experiment, device: torch.device) -> tuple[FederatedData, Model]:
        settings = self._settings
        if settings.share is not None:
            data, model = load_data_and_model(experiment, device)
            if not 0 <= settings.share < len(data.names):
                raise ClientRefusal(
                    f"share is {settings.share}; it must be from 0 to {len(data.names) - 1}: the "
                    f"experiment has {len(data.names)} clients."
                )
            return data.with_one_client(data.names[settings.share], settings.name), model
        assert settings.data is not None
        columns = declare_columns(experiment.dataset)
        self._check_classes(experiment.dataset.classes, columns)
        sample_index = split_by_secret(
            open_own_samples(settings.data, experiment.dataset.classes, columns),
            find_secret(settings.state),
            self._policy.data.test_fraction,
        )
        own = experiment.replace(
            # Size limits are for benchmarks; a client uses all of its own data.
            **dict.fromkeys(("dataset__per_class", "dataset__test_per_class"), None),
            dataset__train_size=None,
        )
        load = partial(load_own_samples, sample_index=sample_index, name=settings.name)
        return load_data_and_model(own, device, load)

    def _check_classes(self, known: tuple[str, ...], columns: TableColumns | None) -> None:
        """Reject unknown classes without naming the data folder."""
        assert self._settings.data is not None
        sample_index = open_own_samples(self._settings.data, None, columns)
        odd = sorted(set(sample_index.class_names) - set(known))
        if known and odd and sample_index.names_classes:
            raise ClientRefusal(f"it has the class {odd[0]!r}, which the experiment does not have.")

    def _introduce(self, data: FederatedData, model: Model, *, tells_counts: bool) -> Message:
        return Introduction(
            name=self._settings.name,
            classes=data.class_names,
            train=self._told_counts(data) if tells_counts else (),
            test=len(data.test_labels) if tells_counts else 0,
            input_size=data.input_size,
            encoder=str(data.partition.get("encoder", "")),
            samples=_kind_of_samples(data),
            image_shape=_shape_of_samples(data),
            own_data=self._settings.share is None,
            model=str(data.partition.get("model", "")),
            embedding_size=model.embedding_size,
        ).to_message()

    def _told_counts(self, data: FederatedData) -> tuple[int, ...]:
        """Return the sample count of each class; counts below min_class_count are sent as 0."""
        least = self._policy.data.min_class_count
        return tuple(n if n >= least else 0 for n in data.label_counts()[0].tolist())


def _kind_of_samples(data: FederatedData) -> SampleKind:
    if not data.holds_arrays:
        return "images"
    return "tokens" if data.partition.get("holds_tokens") else "vectors"


def _shape_of_samples(data: FederatedData) -> tuple[int, ...]:
    shape = tuple(data.partition.get("input_shape", ()) if data.holds_arrays else ())
    return shape if len(shape) > 1 else tuple(data.partition.get("image_shape", ()))


class ClientTrainer:
    """Evaluates and trains one client."""

    def __init__(self, assembly: Assembly, data: FederatedData) -> None:
        self._method, self._model, self._data = assembly.method, assembly.model, data
        self._name = data.names[0]
        self._initial = assembly.initial
        self._engine = InProcessEngine(assembly, data)
        self._evaluation = _Evaluation(assembly.method, assembly.model, data)

    def personal_model(self, broadcast: Broadcast, state: Tensors) -> Tensors:
        """Return the personalized model after the previous round; empty if there is none.

        It is part of the state, or for one-shot methods computed from the broadcast.
        """
        if self._method.trains:
            return take_group(state, "personal/")
        if not isinstance(self._method, ClosedForm):
            return {}
        client, received = self._data.clients[0], self._method.prepare(broadcast)
        return self._method.personalize(received, client.inputs, client.labels) or {}

    def received_models(self, broadcast: Broadcast) -> tuple[Tensors | None, PrototypePool | None]:
        """Return the global model and the prototype pool; None if the server does not send them."""
        shares_all = all(self._method.shared(name) for name in self._initial)
        method, before = self._method, broadcast.round - 1
        pool = None
        if isinstance(method, SharesPrototypes) and method.sends_pool and method.shares_in(before):
            pool = broadcast.pool
        return broadcast.params if shares_all else None, pool

    def evaluate(
        self, broadcast: Broadcast, personal: Tensors, with_confusion: bool
    ) -> ReportedEvaluation:
        """Evaluate the personalized and the global model after the previous round."""
        is_personal = bool(personal) and not self._method.experiment.privacy.has_budget
        table: AccuracyTable = {test: dict.fromkeys(PREDICTORS) for test in TESTS}
        if not len(self._data.test_labels):
            return ReportedEvaluation(table, is_personal)
        averaged, pool = self.received_models(broadcast)
        # The global test set is unknown here.
        wanted: WantedPredictors = {"local_test": PREDICTORS, "global_test": ()}
        predicted = self._evaluation.predict_global(averaged, pool, wanted)
        trained = {}
        if personal:
            client = self._data.clients[0]
            trained[self._name] = TrainedClient(
                client, self._model, personal, averaged=None, state={}, loss=0.0
            )
        found = self._evaluation.read(
            predicted, pool, trained, wanted, with_confusion=with_confusion
        )
        columns = found.columns["local_test"]
        table["local_test"] |= {r: columns[r][0] for r in released_predictors(self._method)}
        metrics = None
        if with_confusion and found.metrics is not None:
            metrics = found.metrics.per_client.get(self._name)
        return ReportedEvaluation(table, is_personal, found.confusion.get(self._name), metrics)

    def note_delay(self, state: Tensors, seconds: float) -> Tensors:
        """Return the state updated by the delay of the client's last accepted answer."""
        prefix = f"own/{self._name}/"
        own = take_group(state, prefix)
        if not own or not isinstance(self._method, Asynchronous):
            return state
        noted = self._method.note_delay(own, seconds)
        return {**state, **{f"{prefix}{name}": value for name, value in noted.items()}}

    def train(self, broadcast: Broadcast, state: Tensors) -> tuple[Update, Tensors]:
        """Train; return the update, and the new state in case the server accepts it."""
        kept = {name: each for name, each in state.items() if not name.startswith("personal/")}
        self._engine.restore(kept, {})
        (update,) = self._engine.train(broadcast, [self._name], keep=[self._name])
        self._engine.keep([self._name])
        personal = dict(self._engine.personal_models(broadcast.params)).get(self._name, {})
        return update.written_out(), self._engine.state() | as_personal(personal)


class _Evaluation(ClientEvaluation):
    """Compares with the prototypes that the server sends, which are the reference already.

    A server cannot name a metric whose code the client would run.
    """

    _own_metric = None

    def _evaluator(self, pool: PrototypePool | None) -> Evaluator:
        return replace(super()._evaluator(None), reference=pool)


def as_personal(params: Tensors) -> Tensors:
    """Return a personalized model under the names of a client's state."""
    return {f"personal/{name}": value for name, value in params.items()}
