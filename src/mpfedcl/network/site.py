"""A client's own machine: its data, what it keeps between rounds, and how it answers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from mpfedcl.clock import Clock
from mpfedcl.data.federated import FederatedData, load_own
from mpfedcl.data.own_images import open_own_images
from mpfedcl.engines import InProcessEngine
from mpfedcl.errors import InvalidInput
from mpfedcl.exchange import Broadcast, LateReading, Share, Update
from mpfedcl.experiment import Experiment
from mpfedcl.hardware import cap_threads, find_device
from mpfedcl.loading import load_data_and_model
from mpfedcl.methods import Method, find_method, is_built_in
from mpfedcl.models import Model, Tensors
from mpfedcl.network.memory import SiteMemory
from mpfedcl.network.parcels import (
    Introduction,
    check_name,
    pack_reading,
    pack_update,
    unpack_broadcast,
)
from mpfedcl.network.wire import FORMAT, Kind, Parcel
from mpfedcl.readings import Examiner, by_reading, count_answers, single, tabulate
from mpfedcl.rng import generator


@dataclass(frozen=True)
class SiteSettings:
    """What a client's operator decides; nothing of it is sent to the server but the name."""

    name: str
    memory: Path
    """Folder for what is kept between rounds."""
    data: Path | None = None
    """Folder with the client's own images; with a share, the data folder."""
    share: int | None = None
    """To try a federation out: this part of the experiment's data set instead of own images."""
    encoder: str | None = None
    """An encoder of its own, such as onnx:PATH, instead of the one that the server names."""
    encoder_weights: Path | None = None
    device: str = "cpu"
    methods: tuple[str, ...] = ()
    """Methods of the form package.module:Class that a server may ask this client to import."""

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Read the node configuration that a client was started with."""
        share = values.get("share", values.get("partition-id"))
        # Flower's own way to number clients, so that its habits work here too.
        name = str(values.get("name", "" if share is None else f"client-{share}"))
        check_name(name)
        if share is None and "data" not in values:
            raise InvalidInput("data is not set; a client needs a folder with its images.")
        paths = {key: _path(values.get(key)) for key in ("memory", "data", "encoder-weights")}
        return cls(
            name=name,
            memory=paths["memory"] or Path("~/.local/state/mpfedcl").expanduser() / name,
            data=paths["data"],
            share=None if share is None else int(share),
            encoder=str(values["encoder"]) if values.get("encoder") else None,
            encoder_weights=paths["encoder-weights"],
            device=str(values.get("device", "cpu")),
            methods=tuple(str(values.get("methods", "")).split()),
        )


class Site:
    """Answers what a server asks. It sends what `parcels.py` has words for, and nothing else."""

    def __init__(self, settings: SiteSettings) -> None:
        self._settings = settings
        self._loaded: tuple[Experiment, FederatedData, Model] | None = None
        """What the last message needed: within a run it is the same every time."""

    def answer(self, kind: Kind, parcel: Parcel) -> Parcel:
        """Return the answer to a request."""
        if parcel.value("format", int) > FORMAT:
            raise InvalidInput("the server speaks a newer language; this client must be updated.")
        cap_threads()
        experiment = self._adopt(parcel.value("experiment", str))
        device = find_device(self._settings.device)
        if kind == "hello":
            # A run begins: images may have come since the one before.
            self._loaded = None
        if self._loaded is None or self._loaded[0] != experiment:
            self._loaded = (experiment, *self._load(experiment, device))
        _, data, model = self._loaded
        if kind == "hello":
            return self._introduce(data)
        method = find_method(experiment.method)(experiment, data.num_classes)
        broadcast = unpack_broadcast(parcel, data.num_classes, method.num_prototypes).to(device)
        desk = _Desk(experiment, method, model, data, device)
        memory = SiteMemory(self._settings.memory, parcel.value("run", str))
        settled = memory.load(parcel.value("settled", int), device)
        late = None
        if parcel.value("read", bool):
            is_personal = parcel.value("settled", int) == broadcast.round - 1
            late = desk.read(broadcast, settled, is_personal, parcel.value("confuse", bool))
        if kind == "close":
            return Parcel({} if late is None else {"late": pack_reading(late)})
        update, kept = desk.train(broadcast, settled)
        memory.save(broadcast.round, kept)
        return pack_update(replace(update, late=late))

    def _adopt(self, document: str) -> Experiment:
        """Take over the server's experiment, but no path and no code that it names."""
        settings = self._settings
        experiment = Experiment.parse_toml(document, Path("the server's experiment"))
        if not is_built_in(experiment.method) and experiment.method not in settings.methods:
            raise InvalidInput(
                f"method is {experiment.method!r}; this client imports none but those it was "
                "started with (--methods)."
            )
        name = settings.encoder or experiment.encoder.name
        if settings.encoder is None and name and ":" in name and not name.startswith("torchvision"):
            raise InvalidInput(
                f"encoder.name is {name!r}; a client must be told where that file is (--encoder)."
            )
        return experiment.replace(
            dataset__root=settings.data,
            encoder__name=name,
            encoder__weights=settings.encoder_weights,
            device=settings.device,
            workers=1,
            engine="auto",
        )

    def _load(self, experiment: Experiment, device: torch.device) -> tuple[FederatedData, Model]:
        settings = self._settings
        if settings.share is not None:
            data, model = load_data_and_model(experiment, device)
            if not 0 <= settings.share < len(data.names):
                raise InvalidInput(
                    f"share is {settings.share}; the experiment deals its images out to "
                    f"{len(data.names)} clients, so it must be from 0 to {len(data.names) - 1}."
                )
            return data.alone(data.names[settings.share], settings.name), model
        assert settings.data is not None
        listing = open_own_images(settings.data, experiment.dataset.classes)
        own = experiment.replace(
            # All that is here is used: caps are a benchmark's.
            **dict.fromkeys(("dataset__per_class", "dataset__test_per_class"), None),
            dataset__train_size=None,
        )
        load = partial(load_own, listing=listing, name=settings.name)
        return load_data_and_model(own, device, load)

    def _introduce(self, data: FederatedData) -> Parcel:
        return Introduction(
            name=self._settings.name,
            classes=data.class_names,
            train=tuple(data.label_counts()[0].tolist()),
            test=len(data.test_labels),
            input_size=data.input_size,
            encoder=str(data.partition.get("encoder", "")),
        ).pack()


class _Desk:
    """One client at work for one round."""

    def __init__(
        self,
        experiment: Experiment,
        method: Method,
        model: Model,
        data: FederatedData,
        device: torch.device,
    ) -> None:
        self._method, self._model, self._data = method, model, data
        self._name = data.names[0]
        dtype = getattr(torch, experiment.dtype)
        drawn = model.init(generator(experiment.seed, "weights"), dtype)
        self._initial = {name: value.to(device) for name, value in drawn.items()}
        self._engine = InProcessEngine(experiment, method, model, data, self._initial, Clock())

    def read(
        self, broadcast: Broadcast, settled: Tensors, is_personal: bool, confuse: bool
    ) -> LateReading:
        """Read the round before: the client's own model after it, and what it became on average."""
        shares_all = all(self._method.shared(name) for name in self._initial)
        averaged = broadcast.params if shares_all else None
        personal = _group(settled, "personal") if is_personal else None
        examiner = Examiner(
            self._data.test_inputs,
            self._data.test_labels,
            self._method.project,
            # The server sends what predictions are compared with.
            broadcast.pool if self._method.shares_prototypes else None,
        )
        asked = [
            examiner.ask(lambda inputs, p=params: single(self._model.apply(p, inputs)))[0]  # type: ignore[misc]
            if params
            else None
            for params in (personal, averaged)
        ]
        answers = by_reading(*asked)
        labels, own = self._data.test_labels, self._data.clients[0].test
        table = tabulate(answers, labels, own)
        said = answers[self._method.reading]
        counts = None
        if confuse and said is not None and len(labels):
            counts = count_answers(said, labels, self._data.num_classes)
        # Nobody here knows the others' test images.
        union = dict.fromkeys(table["union"])
        return LateReading({"own": table["own"], "union": union}, bool(personal), counts)

    def train(self, broadcast: Broadcast, settled: Tensors) -> tuple[Update, Tensors]:
        """Train; return the update, and what to keep in case the server accepts it."""
        at_home = {name: settled[name] for name in settled if not name.startswith("personal/")}
        self._engine.load_state(
            {_name_client(name, self._name): value for name, value in at_home.items()}
        )
        (update,) = self._engine.train(broadcast, [self._name], keep=[self._name])
        if isinstance(update.sums, Share):
            update = replace(update, sums=update.sums.stack.tensors(update.sums.index))
        self._engine.settle([self._name])
        ((_, personal),) = self._engine.personal_models(broadcast.params)
        kept = {
            _unname_client(name, self._name): value for name, value in self._engine.state().items()
        }
        return update, {**kept, **{f"personal/{name}": v for name, v in personal.items()}}


def _group(tensors: Tensors, name: str) -> Tensors:
    prefix = f"{name}/"
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _name_client(key: str, client: str) -> str:
    """Return an engine's key for what a site keeps without its own name: kept/x, kept/CLIENT/x."""
    kind, _, name = key.partition("/")
    return f"{kind}/{client}/{name}"


def _unname_client(key: str, client: str) -> str:
    kind, _, name = key.partition("/")
    return f"{kind}/{name.removeprefix(f'{client}/')}"


def _path(value: Any) -> Path | None:
    return Path(str(value)).expanduser() if value else None
