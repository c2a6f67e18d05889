"""A federation under a privacy budget: nothing bare is in a message, and noise is drawn once."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy
import pytest
from federations import LoopbackFederation, float64_experiment, rewrite
from flwr.app import Message as FlowerMessage

from mpfedcl.core.errors import RunCutShort
from mpfedcl.core.tensors import load_tensors
from mpfedcl.data.loading import load_federated_data
from mpfedcl.experiment import Experiment
from mpfedcl.methods import collect_statistics, find_method
from mpfedcl.network.flower.records import from_records
from mpfedcl.network.message import Message
from mpfedcl.privacy.ledger import read_ledger
from small_experiments import read_records, read_summary

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("quick_network")]

TOLD = {"global_classifier", "global_classifier_estimated", "global_prototype"}


def federation(root: Path, folder: Path, method: str, **changes: Any) -> LoopbackFederation:
    settings = {"privacy__epsilon": 3.0, "rounds": 2, "dtype": "float32", "clients": 3}
    return LoopbackFederation(float64_experiment(root, method, **settings | changes), folder)


def answers(found: LoopbackFederation, kind: str) -> dict[str, list[Message]]:
    by_client: dict[str, list[Message]] = {}
    for name, reply in found.grid.replies:
        assert isinstance(reply, FlowerMessage)
        if reply.metadata.message_type == kind:
            by_client.setdefault(name, []).append(from_records(reply.content))
    return by_client


@pytest.mark.parametrize("method", ["fedgauss", "fedncm", "fedridge", "fedavg", "mp-fedcl"])
def test_no_exact_count_loss_or_reading_leaves_a_client(
    images: Path, tmp_path: Path, method: str
) -> None:
    found = federation(images, tmp_path, method)
    result = found.serve()
    for hello in chain(*answers(found, "query").values()):
        assert hello.values["train"] == []
        assert hello.values["test"] == 0
    for messages in answers(found, "train").values():
        for message in messages:
            assert message.values["num_samples"] == 1
            assert message.values["loss"] is None
    late = [
        each.values["late"]
        for kind in ("train", "evaluate")
        for messages in answers(found, kind).values()
        for each in messages
        if "late" in each.values
    ]
    assert late
    for predictor in late:
        told = {
            name for name, value in predictor["table"]["local_test"].items() if value is not None
        }
        assert told <= TOLD
        assert predictor["is_personal"] is False
    assert "sums" not in json.loads((found.path / "federation.json").read_text())
    assert {tuple(each["train"]) for each in partition_of(found)} == {(0, 0, 0)}
    assert result.summary is not None
    assert all(record["clients"]["rejected"] == {} for record in result.history)
    assert result.summary["privacy"]["spent"] <= 3.0


def partition_of(found: LoopbackFederation) -> list[dict[str, Any]]:
    content = json.loads((found.path / "partition.json").read_text())
    return list(content["clients"].values())


@pytest.mark.parametrize("method", ["fedgauss", "fedncm", "fedridge"])
def test_where_nobody_is_trusted_every_number_that_leaves_is_noisy(
    images: Path, tmp_path: Path, method: str
) -> None:
    changes = {"privacy__model": "local", "privacy__moments": True}
    found = federation(images, tmp_path, method, **changes)
    found.serve()
    experiment = found.experiment.resolved(find_method(method).defaults)
    data = load_federated_data(experiment)
    maker = find_method(method)(experiment, data.num_classes)
    for name, (message,) in answers(found, "train").items():
        client = data.client(name)
        exact = collect_statistics(maker, client.inputs, client.labels)
        assert {f"summed/{each}" for each in exact} | {
            f"prototypes/{each}" for each in ("vectors", "labels", "counts")
        } == set(message.arrays)
        assert len(message.arrays["prototypes/labels"]) == 0
        for field, value in exact.items():
            sent = message.arrays[f"summed/{field}"]
            assert sent.dtype == numpy.float32
            # Not one number is as it was.
            assert not (sent == value.numpy()).any(), field
        assert message.values["processed"] == ["noise"]


@pytest.mark.parametrize("method", ["fedavg", "fedncm"])
def test_a_resumed_federation_sends_and_uses_the_same_noise(
    images: Path, tmp_path: Path, method: str
) -> None:
    noise_model = "local" if method == "fedncm" else "central"
    found = federation(images, tmp_path, method, privacy__model=noise_model)
    found.serve()
    model, ledger = load_tensors(found.path / "model.safetensors"), read_ledger(found.path)
    sent = answers(found, "train")
    last = 1 if method == "fedncm" else 2
    for file in (found.path / "checkpoint").glob(f"round-{last:06d}*"):
        file.unlink()
    (found.path / "summary.json").unlink()
    found.grid.replies.clear()
    found.resume()
    again = load_tensors(found.path / "model.safetensors")
    assert all(numpy.array_equal(again[name], value) for name, value in model.items())
    assert read_ledger(found.path) == ledger
    assert read_summary(found.path)["privacy"] == read_records(found.path)[-1]["privacy"]
    if method == "fedncm":
        for name, (message,) in answers(found, "train").items():
            for field, array in sent[name][0].arrays.items():
                assert numpy.array_equal(message.arrays[field], array)


def without_counts(_: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
    if request.metadata.message_type != "query":
        return reply
    return rewrite(reply, request, lambda values: values | {"train": []})


def test_a_client_that_tells_no_counts_is_refused_without_a_budget(
    images: Path, tmp_path: Path
) -> None:
    experiment = float64_experiment(images, "fedavg", network__patience=0.3)
    with pytest.raises(RunCutShort, match="it does not say how many images it has"):
        LoopbackFederation(experiment, tmp_path, without_counts).serve()


def limited_federation(experiment: Experiment, folder: Path) -> LoopbackFederation:
    config: dict[str, Any] = {"max-epsilon": 4.0}
    return LoopbackFederation(experiment, folder, **config)


def test_a_client_lets_out_no_more_in_its_life_than_its_operator_allows(
    images: Path, tmp_path: Path
) -> None:
    changes = {"privacy__model": "local", "privacy__epsilon": 3.0, "network__patience": 0.3}
    experiment = float64_experiment(images, "fedncm", **changes)
    first = limited_federation(experiment, tmp_path)
    first.serve()
    first.path = tmp_path / "second"
    (record,) = first.serve().history
    assert record["clients"]["answered"] == []
    reasons = set(record["clients"]["rejected"].values())
    assert reasons == {"its privacy budget is spent (--max-epsilon)."}
    ledger = read_ledger(first.state_folder(0))
    assert ledger is not None
    assert ledger.spent == pytest.approx(3.0, abs=1e-3)


@pytest.mark.parametrize(
    "changes",
    [{}, {"privacy__epsilon": 3.0}, {"privacy__epsilon": 5.0, "privacy__model": "local"}],
)
def test_a_client_with_a_limit_takes_part_in_nothing_else(
    images: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    experiment = float64_experiment(images, "fedncm", network__patience=0.3, **changes)
    with pytest.raises(RunCutShort, match="this client takes part with at most 4"):
        limited_federation(experiment, tmp_path).serve()
