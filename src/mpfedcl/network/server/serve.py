"""The server of a federation: waits for clients and runs the round loop with them."""

import secrets
from collections.abc import Iterator, Mapping
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
from mpfedcl.methods import Asynchronous
from mpfedcl.methods.messages import Broadcast, Failure, Update
from mpfedcl.models import Mlp, Model, ModuleModel
from mpfedcl.models.factory import make_model
from mpfedcl.network.packing import DataFormat
from mpfedcl.network.server.asynchronous import AsynchronousEngine
from mpfedcl.network.server.engine import NetworkEngine
from mpfedcl.network.server.registry import ClientRegistry, agree_on_classes
from mpfedcl.network.server.status import Status
from mpfedcl.network.transport import Transport
from mpfedcl.privacy.secure_aggregation import describe_secure_aggregation
from mpfedcl.rounds.assembly import Assembly, assemble
from mpfedcl.rounds.collector import UpdateCollector
from mpfedcl.rounds.evaluation import RoundEvaluation
from mpfedcl.rounds.processors import ProcessorChain
from mpfedcl.rounds.validation import UpdateValidator
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.observer import NO_CALLBACKS, Callbacks, Observer, RunResult
from mpfedcl.runs.plan import plan, resolve
from mpfedcl.runs.run_loop import RunLoop

_MOST_IDLE_ROUNDS = 3
"""Rounds in a row without an accepted update before the run ends."""


def serve(
    transport: Transport,
    experiment: Experiment,
    out: Path | None = None,
    status: Path | None = None,
    observer: Observer | None = None,
    callbacks: Callbacks = NO_CALLBACKS,
) -> RunResult:
    """Wait for clients, and run an experiment with them into a new run directory."""
    run = _NetworkRun(transport, status, observer, callbacks)
    experiment = run.wait_for_clients(experiment)
    path = out if out is not None else unused_folder(Path("runs") / f"{experiment.method}-network")
    with RunDirectory.create(path, experiment) as directory:
        return run.execute(experiment, directory)


def resume_serving(
    transport: Transport,
    path: Path,
    rounds: int | None = None,
    status: Path | None = None,
    observer: Observer | None = None,
    callbacks: Callbacks = NO_CALLBACKS,
) -> RunResult:
    """Resume a run from its newest valid checkpoint."""
    run = _NetworkRun(transport, status, observer, callbacks)
    with RunDirectory.resume(path) as directory:
        experiment = directory.read_experiment()
        if rounds is not None:
            experiment = experiment.replace(rounds=rounds)
        known = directory.read_json("federation.json")
        if known is None and directory.read_records():
            raise InvalidInput(
                f"resume is {str(path)!r}; it must be a run over a network, and this one is not."
            )
        experiment = run.wait_for_clients(experiment, known, path)
        return run.execute(experiment, directory)


class _NetworkRun:
    """A run: the wait for its clients, its rounds, and the files about its clients."""

    def __init__(
        self,
        transport: Transport,
        status: Path | None,
        observer: Observer | None,
        callbacks: Callbacks,
    ) -> None:
        self._transport, self._callbacks = transport, callbacks
        self._status = Status(status)
        self._observer = observer or Observer()
        self._idle = 0

    def wait_for_clients(
        self,
        experiment: Experiment,
        known: Mapping[str, Any] | None = None,
        path: Path | None = None,
    ) -> Experiment:
        """Wait for clients; return the experiment with their classes.

        `known` is the federation.json of the run at `path`, if it is resumed.
        """
        planned = plan(experiment, over_network=True, run=path)
        for notice in planned.notices:
            self._observer.on_warning(notice)
        experiment = planned.experiment
        # Report missing packages before waiting for clients.
        self._attach = self._callbacks.attach(experiment)
        data_format = DataFormat.from_json(known) if known else None
        self._registry = ClientRegistry(experiment, self._transport, self._status, data_format)
        self._registry.wait_for_clients()
        experiment, odd = agree_on_classes(experiment, self._registry.members)
        self._registry.exclude(odd)
        assert self._registry.data_format is not None
        self._format = self._registry.data_format
        if self._format.samples != "images":
            experiment = experiment.replace(encoder__name="none")
        if all(member.own_data for member in self._registry.members.values()):
            # Such clients have local test sets.
            experiment = experiment.replace(partition__test="matched")
        experiment = resolve(experiment)
        self._registry.use_experiment(experiment)
        return experiment

    def execute(self, experiment: Experiment, directory: RunDirectory) -> RunResult:
        """Run the remaining rounds."""
        observer = self._observer = self._attach(directory.path, self._observer)
        cap_threads()
        for notice in describe_secure_aggregation(experiment):
            observer.on_warning(notice)
        device = find_device(experiment.device)
        known = directory.read_json("federation.json") or {
            "run": secrets.token_hex(16),
            **self._format._asdict(),
        }
        directory.write_json("federation.json", known)
        assembly = assemble(
            experiment,
            make_network_model(experiment, self._format, device),
            num_classes=len(experiment.dataset.classes),
            input_size=self._format.input_size,
            device=device,
            public=_load_public(experiment, self._format, device),
        )
        kind = AsynchronousEngine if isinstance(assembly.method, Asynchronous) else NetworkEngine
        engine = kind(
            assembly, self._transport, self._registry, known["run"], self._status, directory.path
        )

        def on_start(started: Experiment, rounds_done: int) -> None:
            self._write_partition(directory, experiment)
            observer.on_start(started, rounds_done)

        def on_round(record: Any) -> None:
            self._write_partition(directory, experiment)
            observer.on_round(record)
            self._idle = self._idle + 1 if record["unchanged"] else 0
            if self._idle >= _MOST_IDLE_ROUNDS and record["round"] < experiment.rounds:
                rejected = sorted(record["clients"]["rejected"].items())
                reasons = "".join(f" {name}: {why.removesuffix('.')}." for name, why in rejected)
                raise RunCutShort(f"no client was accepted in {self._idle} rounds.{reasons}")

        watching = replace(
            observer,
            on_start=on_start,
            on_round=on_round,
            should_stop=lambda: observer.should_stop() or self._status.stop_requested(),
        )
        run_loop = NetworkRunLoop(assembly, engine, experiment.dataset.classes)
        try:
            return run_loop.run(directory, watching)
        except RunCutShort as error:
            raise RunCutShort(f"{error} Resume it with --resume {directory.path}") from None

    def _write_partition(self, directory: RunDirectory, experiment: Experiment) -> None:
        """Write the reported label counts; clients that have left stay in the file."""
        before = directory.read_json("partition.json") or {"clients": {}}
        members, data_format = self._registry.members, self._format
        introduced = {
            name: {"train": counts, "test": members[name].test}
            for name, counts in self._registry.label_counts.items()
        }
        encoders = {each.encoder for each in members.values() if each.encoder}
        content: dict[str, Any] = {
            "classes": list(experiment.dataset.classes),
            "clients": dict(sorted({**before["clients"], **introduced}.items())),
            "input_means": {},
            # The experiment's data settings do not describe clients with their own data.
            "network": True,
        }
        if encoders:
            content["encoder"] = encoders.pop()
        if data_format.model:
            content["model"] = data_format.model
        elif experiment.model.clients:
            known = {name: each.model for name, each in members.items() if each.model}
            content["models"] = dict(sorted({**(before.get("models") or {}), **known}.items()))
        if data_format.samples != "images":
            content["input_shape"] = list(data_format.image_shape or [data_format.input_size])
            content |= {"holds_tokens": True} if data_format.samples == "tokens" else {}
        elif data_format.image_shape:
            content["image_shape"] = list(data_format.image_shape)
        if content != before:
            directory.write_partition(content)


def _load_public(
    experiment: Experiment, data_format: DataFormat, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Return the server's public samples from the experiment's data set, if the method uses them.

    Clients with shares of that data set leave the same samples out.
    """
    if not experiment.public.size:
        return None
    data, _ = load_data_and_model(experiment, device)
    if data.input_size != data_format.input_size or data.class_names != experiment.dataset.classes:
        raise InvalidInput(
            f"dataset.name is {experiment.dataset.name!r}, whose samples the server evaluates "
            "models on; they must have the size and the classes of the clients' samples."
        )
    return data.public


def make_network_model(
    experiment: Experiment, data_format: DataFormat, device: torch.device
) -> Model:
    """Return the model for the clients' data format."""
    if experiment.model.clients:
        # Only clients have models then; the size of prototypes is all that the server needs.
        return Mlp((1, data_format.embedding_size), len(experiment.dataset.classes))
    encoder, is_trained = None, experiment.encoder.train
    if is_trained:
        encoder = find_experiment_encoder(experiment, device)
        if data_format.encoder != encoder.fingerprint:
            raise InvalidInput(
                "encoder.weights are not those of the clients; with encoder.train all must begin "
                "with the same."
            )
    is_encoded = experiment.encoder.name not in (None, "none")
    shape = () if is_encoded else data_format.image_shape
    model = make_model(
        experiment,
        encoder,
        shape or (data_format.input_size,),
        len(experiment.dataset.classes),
        is_image=data_format.samples == "images" and not is_encoded,
        takes_integers=data_format.samples == "tokens",
    )
    if isinstance(model, ModuleModel) and model.fingerprint != data_format.model:
        raise InvalidInput(
            f"model.name is {experiment.model.name!r}, which is not the same model at the server "
            "and at the clients; all must have the same version of its code installed."
        )
    return model


class NetworkRunLoop(RunLoop):
    """Completes each round's record when clients have evaluated the round.

    Clients evaluate a round with the message of the next one, and the last round with a closing
    message. So rounds.jsonl is one round behind the checkpoint, which holds the pending record.
    """

    def __init__(
        self, assembly: Assembly, engine: NetworkEngine, class_names: tuple[str, ...]
    ) -> None:
        super().__init__(assembly, engine, class_names)
        self._network = engine
        self._pending: dict[str, Any] | None = None
        """The record of a round that clients have not evaluated yet."""

    def _write_record(
        self, directory: RunDirectory, record: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Write the record of the previous round; this record waits if its round is evaluated."""
        if self._pending is not None:
            yield self._complete(directory, self._pending, self._network.previous_evaluation)
        if self._is_incomplete(record):
            self._pending = record
        else:
            yield from super()._write_record(directory, record)

    def _complete_records(self, directory: RunDirectory) -> Iterator[dict[str, Any]]:
        """Let clients evaluate the last round, and complete its record."""
        if self._pending is None or self._round_loop.state.round < self._experiment.rounds:
            return
        record = self._pending
        evaluation, remarks = self._network.evaluate_last_round(self._round_loop.broadcast())
        if evaluation is None:
            raise RunCutShort(f"no client has evaluated the last round, {record['round']}.")
        if remarks:
            record["remarks"]["closing"] = remarks
        self._write_confusion(directory, evaluation.confusion)
        yield self._complete(directory, record, evaluation)

    def _restore(self, directory: RunDirectory, observer: Observer) -> list[dict[str, Any]]:
        """Return to the newest valid checkpoint and its pending record."""
        records = super()._restore(directory, observer)
        if records and self._is_incomplete(records[-1]):
            self._pending = records.pop()
            directory.rewind_records(records[-1] if records else None)
        return records

    def _is_incomplete(self, record: dict[str, Any]) -> bool:
        return self._experiment.evaluates(record["round"]) and record["accuracy"] is None

    def _complete(
        self, directory: RunDirectory, record: dict[str, Any], evaluation: RoundEvaluation | None
    ) -> dict[str, Any]:
        """Add the clients' evaluation to the record of a round, and write it."""
        if evaluation is not None:
            if versions := self._network.read_versions:
                record["remarks"]["read_versions"] = list(versions)
            record["accuracy"] = evaluation.table()
            record["accuracy_per_client"] = evaluation.per_client(
                self._method.predictor_on("local_test")
            )
            is_last = record["round"] == self._experiment.rounds
            fields = evaluation.metric_fields(self._experiment.metric, is_last=is_last)
            record |= {n: e.to_json() if n == "metrics" else e for n, e in fields.items()}
        directory.append_record(record)
        self._pending = None
        return record


class SingleClient:
    """One client of a finished run; other connected clients are ignored.

    `experiment` is the run's, and `known` is the content of its federation.json.
    """

    def __init__(
        self,
        transport: Transport,
        experiment: Experiment,
        known: Mapping[str, Any],
        name: str,
        status: Status,
    ) -> None:
        self.name = name
        self._known = dict(known)
        data_format = DataFormat.from_json(known)
        registry = ClientRegistry(experiment, transport, status, data_format, only=name)
        registry.wait_for_only()
        device = torch.device("cpu")
        self._assembly = assemble(
            experiment,
            make_network_model(experiment, data_format, device),
            num_classes=len(experiment.dataset.classes),
            input_size=data_format.input_size,
            device=device,
        )
        self._engine = NetworkEngine(self._assembly, transport, registry, known["run"], status)
        settled: dict[str, int] = known.get("settled", {})
        # The one-shot exchange was round 1, and the client must keep its state of that round.
        self._round = 1 + max([1, *settled.values()])
        last = torch.tensor(settled.get(name, 1))
        self._engine.restore({f"settled/{name}": last}, {"round": self._round - 1})

    def ask(self, current: Broadcast) -> tuple[Update, str | None]:
        """Return the client's statistics, and why update validation rejects them, or None.

        The client evaluates `current`, the federation's present outcome, on its local test set.
        """
        broadcast = replace(current, round=self._round)
        self._engine.absent_clients()
        answer = next(self._engine.train(broadcast, [self.name], keep=[]), None)
        if answer is None:
            missing = self._engine.remarks().get("missing", {})
            raise RunCutShort(f"{self.name} did not answer: {missing.get(self.name, 'no answer')}.")
        if isinstance(answer, Failure):
            raise RunCutShort(f"{self.name} failed: {answer.reason}")
        # Secure aggregation, the only source of totals, cannot change single clients.
        assert isinstance(answer, Update)
        method, members = self._assembly.method, self._engine.members
        server = method.init_server(self._assembly.initial)
        validator = UpdateValidator(self._assembly, members.sizes, members.label_counts)
        collector = UpdateCollector(method, validator, server, broadcast, [self.name])
        collector.add(answer)
        if (rejected := collector.rejected.get(self.name)) is not None:
            return answer, rejected
        return ProcessorChain(method.experiment).unpack(answer, broadcast), None

    def close(self, outcome: Broadcast) -> tuple[RoundEvaluation | None, RoundEvaluation | None]:
        """Send the client the new outcome; return its evaluation before and after."""
        following = replace(outcome, round=self._round + 1)
        self._engine.keep([self.name], lambda: following)
        after, _ = self._engine.evaluate_last_round(following)
        return self._engine.previous_evaluation, after

    def described(self) -> dict[str, Any]:
        """Return the content of federation.json with the round of the client's new statistics."""
        settled = {**self._known.get("settled", {}), self.name: self._round}
        return {**self._known, "settled": settled}
