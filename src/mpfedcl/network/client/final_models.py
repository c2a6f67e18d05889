"""What a client keeps of a run that has ended: a run directory of its own, with its own model.

`mpfedcl predict` and `mpfedcl export` open it like any other. It has what the server has sent with
its closing message and what the client knows of its own data; nothing of it leaves the machine.
"""

import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from mpfedcl.core.files import sync_folder
from mpfedcl.core.tensors import Tensors
from mpfedcl.data.client_data import FederatedData
from mpfedcl.experiment import Experiment
from mpfedcl.methods import Method
from mpfedcl.network.evaluation import ClientEvaluation
from mpfedcl.prototypes import PrototypePool
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.run_files import Summary
from mpfedcl.runs.summary import versions

FOLDER = "final"
"""Of the folder that a client has for a run."""


@dataclass(frozen=True)
class FinalState:
    """What a client has after the last round."""

    round: int
    averaged: Tensors | None
    """The server's model; None where some of it stays with each client."""
    pool: PrototypePool | None
    """The prototypes that the server sends; None where it sends none."""
    personal: Tensors
    """The client's own model; empty where it has none."""
    predictors: ClientEvaluation


def keep_final_state(
    folder: Path, state: FinalState, method: Method, experiment: Experiment, data: FederatedData
) -> None:
    """Write the run directory into a run's folder: all of it, or it stays as it was."""
    for each in folder.glob(f".{FOLDER}-*"):
        # What a killed process has left.
        shutil.rmtree(each, ignore_errors=True)
    beside = folder / f".{FOLDER}-{secrets.token_hex(4)}"
    try:
        beside.mkdir(parents=True, mode=0o700)
        _write(RunDirectory(beside), state, method, experiment, data)
        old = folder / f".{FOLDER}-old"
        if (folder / FOLDER).exists():
            (folder / FOLDER).rename(old)
        beside.rename(folder / FOLDER)
        sync_folder(folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _write(
    directory: RunDirectory,
    state: FinalState,
    method: Method,
    experiment: Experiment,
    data: FederatedData,
) -> None:
    name, (counts,) = data.names[0], data.label_counts().tolist()
    directory.write_experiment(experiment)
    shapes = ("input_shape", "encoder", "image_shape")
    directory.write_partition(
        {
            "classes": list(data.class_names),
            "clients": {name: {"train": counts, "test": len(data.test_labels)}},
            "network": True,
            **{each: data.partition[each] for each in shapes if each in data.partition},
        }
    )
    personal = [(name, state.personal)] if state.personal else []
    directory.write_models(state.averaged, state.pool, personal)
    table = state.predictors.table
    own = method.predictor_on("local_test")
    summary = Summary(
        method=experiment.method,
        dataset=experiment.dataset.name,
        seed=experiment.seed,
        rounds=state.round,
        predictor=own,
        predictor_global=method.predictor_on("global_test"),
        accuracy=table["local_test"][own],
        accuracy_per_client={name: table["local_test"][own]},
        predictors=table,
        versions=versions(),
    )
    # Last: without it a run has not ended.
    directory.write_json("summary.json", summary.to_json())
