"""MLflow: settings as parameters, curves as metrics, the run's files as artifacts.

The store is a folder of files on this machine; neither a server nor a network is used.
"""

import hashlib
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpfedcl.core.files import lock_folder
from mpfedcl.experiment import RESULT_NEUTRAL_SETTINGS, Experiment
from mpfedcl.report.tracking import Tracker, read_notes, round_scalars, write_notes
from mpfedcl.runs.observer import Record, RunResult

_FILES = ("experiment.toml", "partition.json", "rounds.jsonl")
_RESULTS = ("summary.json", "CARD.md", "model.safetensors", "pool.safetensors")
_MOST_AT_ONCE = 100
"""Parameters or metrics in a call, of which MLflow takes no more than these."""
_LONGEST_VALUE, _LONGEST_KEY = 6000, 100
_CHANGEABLE = ("rounds", *RESULT_NEUTRAL_SETTINGS)
"""Settings that a resume may change. They are tags, because MLflow's parameters cannot change."""


class MlflowTracker(Tracker):
    """Writes one MLflow run per run, also after a resume.

    MLflow never deletes a value, so rounds that it already has are not logged again: repeated
    rounds differ only in their seconds.
    """

    def __init__(self) -> None:
        # Set before mlflow is imported: by default it reports its use over the network and rejects
        # stores of files.
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
        from mlflow import entities
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self._entities, self._connect, self._failure = entities, MlflowClient, MlflowException

    def start(self, experiment: Experiment, path: Path, done: Sequence[Record]) -> None:
        """Start an MLflow run, or reopen that of before a resume; add the rounds that it lacks."""
        store = (experiment.track_to or path).resolve() / "mlflow"
        self._client: Any
        with lock_folder(store, wait=True):
            # Several runs may find the store empty at the same time.
            self._client = self._connect(tracking_uri=store.as_uri())
            # An experiment in MLflow's sense: all runs of a store belong to one.
            found = self._client.get_experiment_by_name("mpfedcl")
            group = found.experiment_id if found else self._client.create_experiment("mpfedcl")
        self._run = self._open_run(str(group), store, path)
        kept = self._client.get_run(self._run).data.params
        settings = _name_settings(experiment)
        parameters = [
            self._entities.Param(name, value)
            for name, value in settings.items()
            if name not in kept and name not in _CHANGEABLE
        ]
        self._log(params=parameters)
        for name in _CHANGEABLE:
            self._client.set_tag(self._run, f"mpfedcl.{name}", settings.get(name, ""))
        self._logged = max(self._steps("round"), default=0)
        self._torn = self._logged + 1
        for record in done:
            self.round(record)

    def round(self, record: Record) -> None:
        """Add a round's metrics."""
        number = record["round"]
        if number <= self._logged:
            return
        now = int(1000 * time.time())
        values = {metric_key(name): value for name, value in round_scalars(record).items()}
        metrics = [
            self._entities.Metric(name, value, now, number)
            for name, value in values.items()
            # The process may have ended while it logged this round.
            if number != self._torn or number not in self._steps(name)
        ]
        self._log(metrics=metrics)
        # Last, as the mark of a complete round.
        self._client.log_metric(self._run, "round", number, now, number)
        self._logged = number

    def finish(self, result: RunResult) -> None:
        """Add the run's files; mark the MLflow run as finished, or as stopped."""
        finished = result.summary is not None
        for name in _FILES + (_RESULTS if finished else ()):
            if (result.path / name).is_file():
                self._client.log_artifact(self._run, str(result.path / name))
        if finished and any((result.path / "models").iterdir()):
            self._client.log_artifacts(self._run, str(result.path / "models"), "models")
        self._client.set_terminated(self._run, "FINISHED" if finished else "KILLED")

    def _open_run(self, group: str, store: Path, path: Path) -> str:
        notes = read_notes(path, "mlflow")
        if notes.get("store") == str(store):
            # If the run was removed, a new one gets all rounds.
            with suppress(self._failure, KeyError):
                self._client.update_run(notes["run"], "RUNNING")
                return notes["run"]
        run: str = self._client.create_run(group, run_name=path.resolve().name).info.run_id
        write_notes(path, "mlflow", {"store": str(store), "run": run})
        return run

    def _steps(self, name: str) -> list[int]:
        return [each.step for each in self._client.get_metric_history(self._run, name)]

    def _log(self, **kinds: Sequence[Any]) -> None:
        for kind, values in kinds.items():
            for begin in range(0, len(values), _MOST_AT_ONCE):
                batch = {kind: values[begin : begin + _MOST_AT_ONCE]}
                self._client.log_batch(self._run, **batch)


def _name_settings(experiment: Experiment) -> dict[str, str]:
    found: dict[str, Any] = {}
    for name, value in experiment.flattened():
        if isinstance(value, dict):
            found |= {metric_key(f"{name}.{key}"): each for key, each in value.items()}
        elif value is not None and value != ():
            found[name] = " ".join(map(str, value)) if isinstance(value, tuple) else value
    return {name: str(value)[:_LONGEST_VALUE] for name, value in found.items()}


def metric_key(name: str) -> str:
    """Return a name that MLflow accepts as a file name; different names stay different."""
    safe = "/".join(
        re.sub(r"[^A-Za-z0-9_.\- ]", "_", part).strip(". ") or "_" for part in name.split("/")
    )[:_LONGEST_KEY]
    if safe == name:
        return name
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{safe}-{digest}"
