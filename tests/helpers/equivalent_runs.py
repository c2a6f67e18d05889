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


def assert_same_records(found: list[Json], wanted: list[Json], tolerance: float) -> None:
    """Hold records to the same predictors, clients and bytes; the loss up to rounding."""
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert _told(ours) == _told(theirs)
        # Probabilities are rounded, so metrics of them are too.
        assert _metrics_of(ours) == pytest.approx(_metrics_of(theirs), rel=1e-4, nan_ok=True)
        assert (ours["loss"] is None) == (theirs["loss"] is None)
        if theirs["loss"] is not None:
            assert abs(ours["loss"] - theirs["loss"]) <= tolerance * abs(theirs["loss"])
        assert ours["loss_per_client"].keys() == theirs["loss_per_client"].keys()
        for name, loss in theirs["loss_per_client"].items():
            found_loss = ours["loss_per_client"][name]
            assert found_loss == loss or abs(found_loss - loss) <= tolerance * abs(loss)


def _metrics_of(record: Json) -> dict[str, float]:
    """Return all metrics of a record by the path to them; NaN is undefined."""

    def flatten(value: Any, name: str) -> dict[str, float]:
        if not isinstance(value, dict):
            return {name: math.nan if value is None else value}
        parts = (flatten(each, f"{name}/{key}") for key, each in value.items())
        return {key: each for part in parts for key, each in part.items()}

    return flatten(record.get("metrics"), "")


def _told(record: Json) -> Json:
    rounded = ("loss", "loss_per_client", "seconds", "metrics")
    told = {name: each for name, each in record.items() if name not in rounded}
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
