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
from mpfedcl.experiment import Experiment
from mpfedcl.report.tracking import Tracker, read_notes, round_scalars, write_notes
from mpfedcl.runs.observer import Record, RunResult

_FILES = ("experiment.toml", "partition.json", "rounds.jsonl")
_RESULTS = ("summary.json", "CARD.md", "model.safetensors", "pool.safetensors")
_MOST_AT_ONCE = 100
"""Parameters or metrics in a call, of which MLflow takes no more than these."""
_LONGEST_VALUE, _LONGEST_KEY = 6000, 100


class MlflowTracker(Tracker):
    """Writes one MLflow run per run.

    After a resume all recorded rounds are written again, into a new MLflow run that replaces the
    earlier one: no round is shown twice, and none is missing.
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
        """Start an MLflow run with the settings and all rounds that are over."""
        store = (experiment.track_to or path).resolve() / "mlflow"
        self._client: Any
        with lock_folder(store, wait=True):
            # Several runs may find the store empty at the same time.
            self._client = self._connect(tracking_uri=store.as_uri())
            # An experiment in MLflow's sense: all runs of a store belong to one.
            found = self._client.get_experiment_by_name("mpfedcl")
            group = found.experiment_id if found else self._client.create_experiment("mpfedcl")
        earlier = read_notes(path, "mlflow")
        self._run = self._client.create_run(str(group), run_name=path.resolve().name).info.run_id
        write_notes(path, "mlflow", {"store": str(store), "run": self._run})
        if earlier.get("store") == str(store):
            # It may have been removed.
            with suppress(self._failure, KeyError):
                self._client.delete_run(earlier["run"])
        settings = _name_settings(experiment).items()
        self._log(params=[self._entities.Param(name, value) for name, value in settings])
        for record in done:
            self.round(record)

    def round(self, record: Record) -> None:
        """Add a round's metrics."""
        now, number = int(1000 * time.time()), record["round"]
        metrics = [
            self._entities.Metric(metric_key(name), value, now, number)
            for name, value in round_scalars(record).items()
        ]
        self._log(metrics=metrics)

    def finish(self, result: RunResult) -> None:
        """Add the run's files; mark the MLflow run as finished, or as stopped."""
        finished = result.summary is not None
        for name in _FILES + (_RESULTS if finished else ()):
            if (result.path / name).is_file():
                self._client.log_artifact(self._run, str(result.path / name))
        if finished and any((result.path / "models").iterdir()):
            self._client.log_artifacts(self._run, str(result.path / "models"), "models")
        self._client.set_terminated(self._run, "FINISHED" if finished else "KILLED")

    def _log(self, **kinds: Sequence[Any]) -> None:
        for kind, values in kinds.items():
            for begin in range(0, len(values), _MOST_AT_ONCE):
                batch = {kind: values[begin : begin + _MOST_AT_ONCE]}
                self._client.log_batch(self._run, **batch)


def _name_settings(experiment: Experiment) -> dict[str, str]:
    found: dict[str, Any] = {}
    for name, value in experiment.flattened():
        if value is not None and value != ():
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
