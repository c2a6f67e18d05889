"""Two runs of one experiment, held to the same result up to rounding."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.data.client_data import FederatedData
from mpfedcl.data.loading import load_federated_data
from mpfedcl.experiment import Experiment
from mpfedcl.methods import ClosedForm, Method, find_method, prototype_rule
from mpfedcl.models import Mlp
from mpfedcl.prototypes import PrototypePool
from small_experiments import Json, read_records, read_summary


def assert_close_tensors(found: Tensors, wanted: Tensors, tolerance: float, what: str = "") -> None:
    """Hold each tensor to another's numbers; what is no float has to be equal."""
    assert found.keys() == wanted.keys(), what
    for name, value in wanted.items():
        assert found[name].shape == value.shape, (what, name)
        assert found[name].dtype == value.dtype, (what, name)
        if value.is_floating_point():
            assert value.isfinite().all(), (what, name)
            distance = float((found[name] - value).norm())
            assert distance <= tolerance * float(value.norm()), (what, name, distance)
        else:
            assert torch.equal(found[name], value), (what, name)


def load_results(path: Path) -> dict[str, Tensors]:
    """Return the models and the pool of a finished run, by file name."""
    files = [*path.glob("*.safetensors"), *path.glob("models/*")]
    return {str(each.relative_to(path)): load_file(each) for each in files}


def load_pool(path: Path, num_classes: int) -> PrototypePool | None:
    file = path / "pool.safetensors"
    if not file.exists():
        return None
    with safe_open(str(file), "pt") as opened:
        names = tuple(json.loads(opened.metadata()["names"]))
    columns: dict[str, Any] = {**load_file(file)}
    return PrototypePool(**columns, names=names, num_classes=num_classes)


def predict(
    path: Path, results: dict[str, Tensors], method: Method, data: FederatedData
) -> dict[str, Tensor]:
    """Return the labels that each saved model gives the test images, by each rule it has."""
    pool, rule = load_pool(path, data.num_classes), prototype_rule(method)
    labels = {}
    for name, params in results.items():
        if not name.startswith(("model.", "models/")):
            continue
        hidden = [params[each].shape[0] for each in sorted(params) if "hidden" in each]
        sizes = (data.input_size, *hidden[1::2])
        model = (
            method.make_model(data.input_size)
            if isinstance(method, ClosedForm)
            else Mlp(sizes, data.num_classes)
        )
        embeddings, logits = model.apply(params, data.test_inputs)
        labels[f"{name} by classifier"] = logits.argmax(1)
        if pool is not None:
            nearest, _ = rule.reference(pool).nearest(rule.project(embeddings))
            labels[f"{name} by prototype"] = nearest
    return labels


def assert_same_predictions(
    found: Path,
    wanted: Path,
    experiment: Experiment,
    ours: dict[str, Tensors],
    theirs: dict[str, Tensors],
) -> None:
    """Hold a run's models to the labels that another's give the test images."""
    method_class: type[Method] = find_method(experiment.method)
    experiment = experiment.resolved(method_class.defaults)
    data = load_federated_data(experiment)
    method = method_class(experiment, data.num_classes)
    labels = predict(wanted, theirs, method, data)
    assert labels
    for name, predicted in predict(found, ours, method, data).items():
        assert torch.equal(predicted, labels[name]), name


_ROUNDED = ("loss", "loss_per_client", "metrics", "metric")
"""Fields of a record that are computed from values which differ in their last bits."""


def assert_same_records(found: list[Json], wanted: list[Json], tolerance: float) -> None:
    """Hold records to the same predictors, clients and bytes; loss and metrics up to rounding."""
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert _told(ours) == _told(theirs)
        numbers = _list_numbers(theirs)
        close = pytest.approx(numbers, rel=tolerance, abs=tolerance, nan_ok=True)
        assert _list_numbers(ours) == close


def _list_numbers(record: Json) -> dict[str, float]:
    """Return the rounded fields without their nesting, by the path of each value; NaN for null."""
    found: dict[str, float] = {}

    def add(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, each in value.items():
                add(f"{path}/{name}", each)
        else:
            found[path] = math.nan if value is None else value

    add("", {name: record[name] for name in _ROUNDED if name in record})
    return found


def _told(record: Json) -> Json:
    told = {name: each for name, each in record.items() if name not in (*_ROUNDED, "seconds")}
    # How the clients were trained is what differs.
    remarks = {name: each for name, each in record["remarks"].items() if name != "training"}
    return told | {"remarks": remarks}


def assert_equivalent(found: Path, wanted: Path, experiment: Experiment, tolerance: float) -> None:
    """Hold a run to the weights, pool, predictions, predictors and records of another."""
    assert_same_records(read_records(found), read_records(wanted), tolerance)
    ours, theirs = load_results(found), load_results(wanted)
    assert ours.keys() == theirs.keys()
    for name, tensors in theirs.items():
        assert_close_tensors(ours[name], tensors, tolerance, name)
    assert_same_predictions(found, wanted, experiment, ours, theirs)
    summaries = read_summary(found), read_summary(wanted)
    for key in ("accuracy", "accuracy_per_client", "predictors", "bytes", "rejected"):
        assert summaries[0][key] == summaries[1][key], key
