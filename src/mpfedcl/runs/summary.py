"""The summary of a finished run, drawn from its records alone."""

import platform
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from typing import Any

import torch

from mpfedcl.methods import TESTS, Method, name_method
from mpfedcl.rounds.metrics import measure_fairness
from mpfedcl.runs.run_files import Summary


def summarize_run(method: Method, records: list[dict[str, Any]]) -> Summary:
    """Return the summary of a finished run, drawn from its records alone."""
    experiment, last = method.experiment, records[-1]
    own, union = method.predictor_on("local_test"), method.predictor_on("global_test")
    return Summary(
        method=experiment.method,
        method_name=name_method(experiment.method, type(method)),
        dataset=experiment.dataset.name,
        seed=experiment.seed,
        rounds=last["round"],
        predictor=own,
        predictor_global=union,
        accuracy=last["accuracy"]["local_test"][own],
        accuracy_global=last["accuracy"]["global_test"][union],
        accuracy_per_client=last["accuracy_per_client"],
        accuracy_spread=last.get("accuracy_spread"),
        fairness=last.get("accuracy_spread")
        or measure_fairness((last["accuracy_per_client"] or {}).values()),
        calibration_error=last.get("calibration_error") or dict.fromkeys(TESTS),
        predictors=last["accuracy"],
        loss=last["loss"],
        bytes=_total(record["bytes"] for record in records),
        seconds=_total(record["seconds"] for record in records),
        parameters_sent=last["sent"]["parameters"],
        prototype_floats_sent=last["sent"]["prototype_floats"],
        rejected=sum(len(record["clients"]["rejected"]) for record in records),
        privacy=last.get("privacy"),
        versions=versions(),
        threads=torch.get_num_threads(),
    )


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    packages = ("mpfedcl", "torch", "numpy", "scikit-learn")
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


@cache
def _version(package: str) -> str:
    # Looked up in the package's files, which takes a while.
    return version(package)


def _total(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    totals: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            totals[name] = totals.get(name, 0) + value
    return {name: round(value, 6) for name, value in totals.items()}
