"""The server of a federation over a network: the same round loop, with clients elsewhere."""

import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpfedcl.core.errors import InvalidInput, RunCutShort
from mpfedcl.core.files import unused_folder
from mpfedcl.data.loading import find_experiment_encoder, load_data_and_model
from mpfedcl.engines.hardware import cap_threads, find_device
from mpfedcl.experiment import Experiment
from mpfedcl.methods import Asynchronous, find_method
from mpfedcl.models import Model
from mpfedcl.models.encoders.torch_encoders import make_model
from mpfedcl.network.packing import Form
from mpfedcl.network.server.arrival_engine import ArrivalEngine
from mpfedcl.network.server.class_agreement import agree_on_classes
from mpfedcl.network.server.client_registry import ClientRegistry
from mpfedcl.network.server.engine import NetworkEngine
from mpfedcl.network.server.mailbox import Mailbox
from mpfedcl.network.server.run_loop import NetworkRunLoop
from mpfedcl.network.server.status import Status
from mpfedcl.network.transport import Transport
from mpfedcl.privacy.secure_aggregation import LEAST_CLIENTS
from mpfedcl.rounds.assembly import assemble
from mpfedcl.rounds.noise_shares import fix_noise
from mpfedcl.rounds.secure_checks import check_secure_aggregation, describe_secure_aggregation
from mpfedcl.rounds.timing_checks import check_timing, refuse_over_network
from mpfedcl.runs.budget import limit_rounds
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.observer import NO_COMPANIONS, Callbacks, Observer, RunResult

_MOST_IDLE_ROUNDS = 3
"""Rounds in a row in which no update was accepted, before the run ends."""


def serve(
    transport: Transport,
    experiment: Experiment,
    out: Path | None = None,
    status: Path | None = None,
    observer: Observer | None = None,
    callbacks: Callbacks = NO_COMPANIONS,
) -> RunResult:
    """Wait for clients, run an experiment with them into a new run directory, and return it."""
    run_status = Status(status)
    warn = (observer or Observer()).on_warning
    experiment = fix_noise(limit_rounds(check_experiment(experiment), warn))
    # What is missing is said before anybody is waited for.
    attach = callbacks.attach(experiment)
    transport = _open_mailbox(transport, experiment)
    registry = ClientRegistry(experiment, transport, run_status)
    experiment = _wait_for_clients(registry, experiment)
    path = out if out is not None else unused_folder(Path("runs") / f"{experiment.method}-network")
    with RunDirectory.create(path, experiment) as directory:
        attached = attach(path, observer or Observer())
        return _run(transport, experiment, registry, directory, run_status, attached)


def resume_serving(
    transport: Transport,
    path: Path,
    rounds: int | None = None,
    status: Path | None = None,
    observer: Observer | None = None,
    callbacks: Callbacks = NO_COMPANIONS,
) -> RunResult:
    """Resume a run from its newest sound checkpoint."""
    run_status = Status(status)
    with RunDirectory.resume(path) as directory:
        experiment = directory.read_experiment()
        if rounds is not None:
            experiment = experiment.replace(rounds=rounds)
        experiment = limit_rounds(experiment, (observer or Observer()).on_warning, path)
        known = directory.read_json("federation.json")
        if known is None and directory.read_records():
            raise InvalidInput(
                f"resume is {str(path)!r}; it must be a run over a network, and this one is not."
            )
        attach = callbacks.attach(experiment)
        form = Form.from_json(known) if known else None
        transport = _open_mailbox(transport, experiment)
        registry = ClientRegistry(check_experiment(experiment), transport, run_status, form)
        experiment = _wait_for_clients(registry, experiment)
        attached = attach(path, observer or Observer())
        return _run(transport, experiment, registry, directory, run_status, attached)


def check_experiment(experiment: Experiment) -> Experiment:
    """Return the experiment with nothing left open that the server decides.

    What cannot be run over a network is refused.
    """
    encoder = experiment.encoder.name
    method = find_method(experiment.method)
    is_asynchronous = issubclass(method, Asynchronous)
    if is_asynchronous and experiment.systems.kind is None:
        # Its clock is the one on the wall.
        experiment = experiment.replace(systems__kind="none")
    experiment = experiment.resolved(method.defaults)
    refuse_over_network(method, experiment)
    check_timing(method, experiment)
    check_secure_aggregation(experiment)
    if experiment.secure_aggregation:
        # Fewer are waited for, as long as patience lasts: no sum of theirs could be opened.
        enough = max(experiment.min_clients, LEAST_CLIENTS)
        experiment = experiment.replace(min_clients=enough)
    if experiment.dataset.name == "table":
        raise InvalidInput(
            "dataset.name is 'table'; over a network it must be left out: columns are standardized "
            "by sums over all clients, which are not exchanged there. Clients may bring vectors in "
            "npz files."
        )
    if experiment.asked_workers > 1:
        raise InvalidInput(f"workers is {experiment.workers}; over a network it must be 1.")
    # Clients read their own images alone, which is cheap: all predictors, by default in every round.
    every = 1 if experiment.evaluate_every == "auto" else experiment.evaluate_every
    experiment = experiment.replace(workers=1, evaluate_every=every, evaluate_predictors="all")
    if experiment.validation.bounds == "auto":
        # Written down, so that a simulation of the same experiment comes to the same. Where single
        # clients are not seen, or come one by one, they cannot be compared.
        is_hidden = experiment.secure_aggregation or experiment.privacy.has_budget
        bounds = "off" if is_hidden or is_asynchronous else "on"
        experiment = experiment.replace(validation__bounds=bounds)
    # Clients with vectors need no encoder, so a default one is chosen once they have come.
    return experiment.replace(encoder__name=encoder)


def _wait_for_clients(registry: ClientRegistry, experiment: Experiment) -> Experiment:
    """Wait for clients; return the experiment with the classes that they have."""
    registry.wait_for_clients()
    experiment, odd = agree_on_classes(experiment, registry.members)
    registry.exclude(odd)
    assert registry.form is not None
    if registry.form.samples == "vectors":
        experiment = experiment.replace(encoder__name="none")
    if all(member.own_data for member in registry.members.values()):
        # Each has a test of its own too, whatever the data set's protocol says.
        experiment = experiment.replace(partition__test="matched")
    experiment = experiment.resolved(find_method(experiment.method).defaults)
    registry.use_experiment(experiment)
    return experiment


def _run(
    transport: Transport,
    experiment: Experiment,
    registry: ClientRegistry,
    directory: RunDirectory,
    status: Status,
    observer: Observer,
) -> RunResult:
    cap_threads()
    for notice in describe_secure_aggregation(experiment):
        observer.on_warning(notice)
    device = find_device(experiment.device)
    classes = experiment.dataset.classes
    assert registry.form is not None
    known = directory.read_json("federation.json") or {
        "run": secrets.token_hex(16),
        "input_size": registry.form.input_size,
        "encoder": registry.form.encoder,
        **({"samples": "vectors"} if registry.form.samples == "vectors" else {}),
        **({"image_shape": registry.form.image_shape} if registry.form.image_shape else {}),
    }
    directory.write_json("federation.json", known)
    assembly = assemble(
        experiment,
        make_network_model(experiment, registry.form, device),
        num_classes=len(classes),
        input_size=registry.form.input_size,
        device=device,
        public=_load_public(experiment, registry.form, device),
    )
    kind = ArrivalEngine if isinstance(assembly.method, Asynchronous) else NetworkEngine
    engine = kind(assembly, transport, registry, known["run"], status, directory.path)
    run_loop = NetworkRunLoop(assembly, engine, classes)
    monitor = _RunMonitor(registry, directory, classes, status, observer, engine)
    try:
        return run_loop.run(directory, monitor.observer)
    except RunCutShort as error:
        raise RunCutShort(f"{error} Resume it with --resume {directory.path}") from None


def _open_mailbox(transport: Transport, experiment: Experiment) -> Transport:
    """Return a transport by which answers and introductions may be waited for at a time."""
    in_rounds = not issubclass(find_method(experiment.method), Asynchronous)
    return transport if in_rounds else Mailbox(transport)


def _load_public(
    experiment: Experiment, form: Form, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Return the images that the server has: some of the data set's, where it is on this machine.

    Clients that hold shares of that set leave out the same ones.
    """
    if not experiment.public.size:
        return None
    data, _ = load_data_and_model(experiment, device)
    if data.input_size != form.input_size or data.class_names != experiment.dataset.classes:
        raise InvalidInput(
            f"dataset.name is {experiment.dataset.name!r}, whose images the server judges models "
            "on; they must be of the size and the classes of the clients' own."
        )
    return data.public


def make_network_model(experiment: Experiment, form: Form, device: torch.device) -> Model:
    """Return the model that fits what all clients have in common."""
    num_classes, settings = len(experiment.dataset.classes), experiment.model
    if experiment.encoder.train:
        encoder = find_experiment_encoder(experiment, device)
        if form.encoder != encoder.fingerprint:
            raise InvalidInput(
                "encoder.weights are not those of the clients; with encoder.train all must begin "
                "with the same."
            )
        return make_model(encoder, form.input_size, num_classes, settings, trains_encoder=True)
    is_encoded = form.samples == "vectors" or experiment.encoder.name not in (None, "none")
    return make_model(
        None,
        form.input_size,
        num_classes,
        settings,
        takes_features=is_encoded,
        image_shape=form.image_shape or None,
    )


class _RunMonitor:
    """Keeps partition.json up to date, and ends a run in which no update is accepted any more."""

    def __init__(
        self,
        registry: ClientRegistry,
        directory: RunDirectory,
        classes: tuple[str, ...],
        status: Status,
        observer: Observer,
        engine: NetworkEngine,
    ) -> None:
        self._engine = engine
        self._registry, self._directory, self._classes = registry, directory, classes
        self._idle = self._rounds = 0
        self._observer = observer
        self.observer = replace(
            observer,
            on_start=self._on_start,
            on_round=self._on_round,
            should_stop=lambda: observer.should_stop() or status.stop_requested(),
        )

    def _on_start(self, experiment: Experiment, rounds_done: int) -> None:
        self._rounds = experiment.rounds
        self._write_partition()
        self._observer.on_start(experiment, rounds_done)

    def _on_round(self, record: Any) -> None:
        self._write_partition()
        if sums := self._engine.sums_digests:
            known = self._directory.read_json("federation.json") or {}
            self._directory.write_json("federation.json", {**known, "sums": sums})
        self._observer.on_round(record)
        self._idle = self._idle + 1 if record["unchanged"] else 0
        if self._idle >= _MOST_IDLE_ROUNDS and record["round"] < self._rounds:
            raise RunCutShort(f"no client was accepted in {self._idle} rounds.")

    def _write_partition(self) -> None:
        """Write who holds what, as clients say it; those who have left stay on record."""
        before = self._directory.read_json("partition.json") or {"clients": {}}
        introduced = {
            name: {"train": counts, "test": self._registry.members[name].test}
            for name, counts in self._registry.label_counts.items()
        }
        clients = {**before["clients"], **introduced}
        encoders = {each.encoder for each in self._registry.members.values() if each.encoder}
        form = self._registry.form
        has_vectors = form is not None and form.samples == "vectors"
        content = {
            "classes": list(self._classes),
            "clients": {name: clients[name] for name in sorted(clients)},
            "input_means": {},
            # What the experiment says of data is for clients that have none of their own.
            "network": True,
            # Whoever uses the model must put images through the same encoder.
            **({"encoder": encoders.pop()} if encoders else {}),
            **({"input_shape": [form.input_size]} if form and has_vectors else {}),
            **({"image_shape": list(form.image_shape)} if form and form.image_shape else {}),
        }
        if content != before:
            self._directory.write_partition(content)
