"""A client on its own machine: its data, its state between rounds, and how it answers."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.client_data import FederatedData
from mpfedcl.data.loading import load_data_and_model, load_own_samples
from mpfedcl.data.reader import open_own_samples
from mpfedcl.engines.hardware import cap_threads, find_device
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.data_folder import holds_vectors
from mpfedcl.methods import Asynchronous, Method, find_method, is_built_in, prototype_rule
from mpfedcl.methods.messages import Update
from mpfedcl.models import Model
from mpfedcl.network.client.final_models import FinalState, keep_final_state
from mpfedcl.network.client.secure_aggregation import SecureAggregation, SumRefusal, draw_once
from mpfedcl.network.client.state import ClientStateStore
from mpfedcl.network.client.trainer import ClientTrainer, as_personal
from mpfedcl.network.message import FORMAT, Kind, Message
from mpfedcl.network.packing import (
    Introduction,
    check_name,
    name_dispatch,
    pack_update,
    unpack_broadcast,
)
from mpfedcl.network.part_messages import pack_part_update, unpack_part
from mpfedcl.privacy.ledger import BudgetSpent
from mpfedcl.privacy.private_sums import PrivateSums
from mpfedcl.rounds.assembly import assemble
from mpfedcl.rounds.secure_checks import check_secure_aggregation
from mpfedcl.rounds.sum_layout import SumLayout

_MOST_EPSILON = 100.0
_NO_FILES = ("torchvision:", "random-resnet18:", "random-filters:")
"""How encoders begin whose names go on with something else than a file."""


@dataclass(frozen=True)
class ClientSettings:
    """What a client's operator decides; nothing of it is sent to the server but the name."""

    name: str
    state: Path
    """Folder for what is kept between rounds."""
    data: Path | None = None
    """The client's own images or vectors; with a share, the data folder."""
    share: int | None = None
    """To try a federation out: this part of the experiment's data set instead of own images."""
    encoder: str | None = None
    """An encoder of its own, such as onnx:PATH, instead of the one that the server names."""
    encoder_weights: Path | None = None
    min_cluster_size: int = 1
    """A prototype that stands for fewer images never leaves, whatever the experiment says."""
    max_epsilon: float | None = None
    """What this client lets out of its samples in its whole life, in all runs together."""
    device: str = "cpu"
    methods: tuple[str, ...] = ()
    """Methods of the form package.module:Class that a server may ask this client to import."""
    key: Path | None = None
    """The client's key in the federation, by which it signs its part in secure aggregation."""
    only_secure_aggregation: bool = False
    """Whether it takes part in no run but those with secure aggregation."""

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Read the node configuration that a client was started with."""
        share = values.get("share", values.get("partition-id"))
        # Flower's own way to number clients, so that its habits work here too.
        name = str(values.get("name", "" if share is None else f"client-{share}"))
        check_name(name)
        if share is None and "data" not in values:
            raise InvalidInput("data is not set; a client needs a folder with its images.")
        numbers = {"share": share, "min-cluster-size": values.get("min-cluster-size", 1)}
        for key, number in numbers.items():
            if number is not None and not str(number).isdecimal():
                raise InvalidInput(f"{key} is {number!r}; it must be a whole number.")
        most = values.get("max-epsilon")
        if most is not None and not 0 < float(most) <= _MOST_EPSILON:
            raise InvalidInput(f"max-epsilon is {most}; it must be above 0 and at most 100.")
        names = ("memory", "data", "encoder-weights", "key")
        paths = {key: _path(values.get(key)) for key in names}
        return cls(
            name=name,
            state=paths["memory"] or Path("~/.local/state/mpfedcl").expanduser() / name,
            data=paths["data"],
            share=None if share is None else int(share),
            encoder=str(values["encoder"]) if values.get("encoder") else None,
            encoder_weights=paths["encoder-weights"],
            min_cluster_size=int(numbers["min-cluster-size"]),
            max_epsilon=None if most is None else float(most),
            device=str(values.get("device", "cpu")),
            methods=tuple(str(values.get("methods", "")).split()),
            key=paths["key"],
            only_secure_aggregation=values.get("secure-aggregation") is True,
        )


class ClientRefusal(InvalidInput):
    """What a client tells the server in place of an answer: it names no file of its machine."""


class NetworkClient:
    """Answers a server's requests. It sends what `packing.py` packs, and nothing else."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self.loaded: tuple[Experiment, FederatedData, Model] | None = None
        """What the last message needed: within a run it is the same every time."""

    def answer(self, kind: Kind, message: Message) -> Message:
        """Return the answer to a request."""
        try:
            return self._answer(kind, message)
        except (ClientRefusal, SumRefusal):
            raise
        except BudgetSpent:
            raise ClientRefusal("its privacy budget is spent (--max-epsilon).") from None
        except InvalidInput as error:
            # It may name files, and the names of files may name people.
            print(error, file=sys.stderr, flush=True)
            raise ClientRefusal(
                "it cannot use its data or its encoder; its own log says why."
            ) from None

    def _answer(self, kind: Kind, message: Message) -> Message:
        if (found := message.value("format", int)) != FORMAT:
            newer, older = ("server", "client") if found > FORMAT else ("client", "server")
            raise ClientRefusal(f"the {newer} is of a newer version; the {older} must be updated.")
        cap_threads()
        experiment = self._read_experiment(message.value("experiment", str))
        self._check_budget(experiment)
        if kind == "secure":
            return self._sums(experiment, message).answer()
        device = find_device(self._settings.device)
        if kind == "hello":
            # A run begins: images may have come since the one before.
            self.loaded = None
        if self.loaded is None or self.loaded[0] != experiment:
            self.loaded = (experiment, *self._load(experiment, device))
        _, data, model = self.loaded
        if kind == "hello":
            return self._introduce(data, tells_counts=experiment.tells_counts)
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
        store = ClientStateStore(self._settings.state, message.value("run", str))
        after = message.value("settled", int)
        state = store.load(after, device)
        is_asynchronous = isinstance(assembly.method, Asynchronous)
        if "delay" in message.values:
            state = trainer.note_delay(state, message.value("delay", float))
        late: dict[str, Any] = {}
        if message.value("read", bool):
            has_own = after > 0 if is_asynchronous else after == broadcast.round - 1
            own = trainer.personal_model(broadcast, state) if has_own else {}
            confuses = message.value("confuse", bool) and self._settings.min_cluster_size == 1
            predictors = trainer.evaluate(broadcast, own, confuses)
            late = {"late": predictors.to_values()}
            # Whoever trains has kept it; nothing is made of one exchange before its outcome.
            if kind == "close" and own and not assembly.method.trains:
                store.replace(after, state | as_personal(own))
            if kind == "close":
                final = trainer.final_state(broadcast, state, predictors)
                self._keep(store, final, assembly.method, experiment, data)
        if kind == "close":
            return Message(late)
        update, kept = trainer.train(broadcast, state)
        if update.loss is not None and not math.isfinite(update.loss):
            raise ClientRefusal(f"its loss is {update.loss}; it must be finite.")
        if experiment.privacy.has_budget:
            update = self._release(update, experiment, store, broadcast.round)
        elif self._settings.min_cluster_size > 1:
            update = replace(update, num_samples=sum(self._told_counts(data)))
        store.save(broadcast.dispatch or broadcast.round, kept, after=after)
        if experiment.secure_aggregation:
            encode = partial(SumLayout(assembly).encode, update)
            if experiment.privacy.has_budget:
                encode = partial(draw_once, store, broadcast.round, experiment, encode)
            answer = self._sums(experiment, message).mask(encode)
        else:
            answer = pack_update(pack_part_update(update, broadcast))
        return Message({**answer.values, **late, **name_dispatch(broadcast)}, answer.arrays)

    def _keep(
        self,
        store: ClientStateStore,
        final: FinalState,
        method: Method,
        experiment: Experiment,
        data: FederatedData,
    ) -> None:
        """Keep what the run has brought, for this client's own use."""
        try:
            store.make_folder()
            keep_final_state(store.folder, final, method, experiment, data)
        except OSError as error:
            # What it has read is worth more to the others than its own copy.
            print(f"its models are not kept: {error}", file=sys.stderr, flush=True)

    def _sums(self, experiment: Experiment, message: Message) -> SecureAggregation:
        if not experiment.secure_aggregation:
            raise ClientRefusal("secure_aggregation is False; it must be True for such a message.")
        try:
            check_secure_aggregation(experiment)
        except InvalidInput as error:
            raise ClientRefusal(str(error)) from None
        settings = self._settings
        return SecureAggregation(settings.name, settings.state, settings.key, experiment, message)

    def _release(
        self, update: Update, experiment: Experiment, store: ClientStateStore, round_number: int
    ) -> Update:
        """Return what may leave under a privacy budget: no count and no loss as they are.

        Noise is drawn once for a round, and stored before it leaves: asked again, the client
        sends the same numbers again.
        """
        if experiment.privacy.model == "local" and update.summed:
            drawn = dict(update.summed)
            mechanism = PrivateSums.of(experiment.privacy, has_moments="moment" in drawn)
            assert mechanism is not None
            limit = self._settings.max_epsilon
            summed = store.keep_release(
                round_number, drawn, mechanism.multiplier, experiment.privacy, limit
            )
            update = replace(update, summed=summed)
        return replace(update, num_samples=1, loss=None)

    def _check_budget(self, experiment: Experiment) -> None:
        """Refuse an experiment that keeps no budget, or a larger one than this client allows."""
        most, privacy = self._settings.max_epsilon, experiment.privacy
        if most is None:
            return
        if privacy.epsilon is None or privacy.epsilon > most or privacy.model != "local":
            asked = "none" if privacy.epsilon is None else f"{privacy.epsilon:g}"
            raise ClientRefusal(
                f"privacy.epsilon is {asked} and privacy.model {privacy.model!r}; this client "
                f"takes part with at most {most:g}, and with noise of its own (trust nobody)."
            )

    def _read_experiment(self, document: str) -> Experiment:
        """Return the server's experiment, without any path or code that it names."""
        settings = self._settings
        try:
            experiment = Experiment.parse_toml(document, Path("the server's experiment"))
        except InvalidInput as error:
            raise ClientRefusal(str(error)) from None
        if not is_built_in(experiment.method) and experiment.method not in settings.methods:
            raise ClientRefusal(
                f"method is {experiment.method!r}; this client only imports those it was started "
                "with (--methods)."
            )
        # Its class is known only now, and with it what its own settings may be.
        find_method(experiment.method)
        try:
            experiment = experiment.replace()
        except InvalidInput as error:
            raise ClientRefusal(str(error)) from None
        if settings.only_secure_aggregation and not experiment.secure_aggregation:
            raise ClientRefusal(
                "secure_aggregation is False; this client takes part only with secure aggregation "
                "(--secure-aggregation)."
            )
        name = settings.encoder or experiment.encoder.name
        if settings.encoder is None and settings.data is not None and holds_vectors(settings.data):
            # The server cannot know, and says what is right for images.
            name = "none"
        if settings.encoder is None and name and ":" in name and not name.startswith(_NO_FILES):
            raise ClientRefusal(
                f"encoder.name is {name!r}; the client must say where that file is (--encoder)."
            )
        return experiment.replace(
            dataset__root=settings.data,
            encoder__name=name,
            encoder__weights=settings.encoder_weights,
            prototypes__min_cluster_size=max(
                settings.min_cluster_size, experiment.prototypes.min_cluster_size
            ),
            device=settings.device,
            workers=1,
            engine="auto",
        )

    def _load(self, experiment: Experiment, device: torch.device) -> tuple[FederatedData, Model]:
        settings = self._settings
        if settings.share is not None:
            data, model = load_data_and_model(experiment, device)
            if not 0 <= settings.share < len(data.names):
                raise ClientRefusal(
                    f"share is {settings.share}; the experiment splits its images among "
                    f"{len(data.names)} clients, so it must be from 0 to {len(data.names) - 1}."
                )
            return data.with_one_client(data.names[settings.share], settings.name), model
        assert settings.data is not None
        self._check_classes(experiment.dataset.classes)
        sample_index = open_own_samples(settings.data, experiment.dataset.classes)
        own = experiment.replace(
            # All that is here is used: caps are a benchmark's.
            **dict.fromkeys(("dataset__per_class", "dataset__test_per_class"), None),
            dataset__train_size=None,
        )
        load = partial(load_own_samples, sample_index=sample_index, name=settings.name)
        return load_data_and_model(own, device, load)

    def _check_classes(self, known: tuple[str, ...]) -> None:
        """Name the class that the others do not have; the reader would name the folder too."""
        assert self._settings.data is not None
        sample_index = open_own_samples(self._settings.data, None)
        odd = sorted(set(sample_index.class_names) - set(known))
        if known and odd and sample_index.names_classes:
            raise ClientRefusal(f"it has the class {odd[0]!r}, which the experiment does not have.")

    def _introduce(self, data: FederatedData, *, tells_counts: bool) -> Message:
        return Introduction(
            name=self._settings.name,
            classes=data.class_names,
            train=self._told_counts(data) if tells_counts else (),
            test=len(data.test_labels) if tells_counts else 0,
            input_size=data.input_size,
            encoder=str(data.partition.get("encoder", "")),
            samples="vectors" if data.holds_vectors else "images",
            image_shape=tuple(data.partition.get("image_shape", ())),
            own_data=self._settings.share is None,
        ).to_message()

    def _told_counts(self, data: FederatedData) -> tuple[int, ...]:
        """Return how many images there are of each class; too few of one are told as none."""
        least = self._settings.min_cluster_size
        return tuple(n if n >= least else 0 for n in data.label_counts()[0].tolist())


def _path(value: Any) -> Path | None:
    return Path(str(value)).expanduser() if value else None
