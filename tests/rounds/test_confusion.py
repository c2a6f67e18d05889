"""Which class is taken for which: counted in the last round, the same in every engine."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from sklearn.metrics import confusion_matrix

from mpfedcl import run
from mpfedcl.core.tensors import Tensors
from mpfedcl.data.client_data import FederatedData
from mpfedcl.data.loading import load_data_and_model
from mpfedcl.experiment import Experiment
from mpfedcl.inference.trained_run import read_pool
from mpfedcl.methods import Method, find_method, prototype_rule
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.evaluation import RoundEvaluation, count_confusions
from small_experiments import METHODS, MeddledEngine, build_federation, read_records, small

Json = dict[str, Any]

pytestmark = pytest.mark.usefixtures("small_models")


def confusion_of(path: Path) -> Json:
    content: Json = json.loads((path / "confusion.json").read_text())
    return content


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-1, 4))))
def test_counts_are_those_of_scikit_learn(pairs: list[tuple[int, int]]) -> None:
    truth = torch.tensor([true for true, _ in pairs], dtype=torch.int64)
    said = torch.tensor([each for _, each in pairs], dtype=torch.int64)
    counts = count_confusions(said, truth, 5)
    assert len(counts) == 5
    if pairs:
        labels = [*range(5), -1]
        expected = confusion_matrix(truth.numpy(), said.numpy(), labels=labels)[:5]
        assert counts == expected.tolist()


@pytest.mark.parametrize("method", METHODS)
def test_the_file_agrees_with_the_models(images: Path, tmp_path: Path, method: str) -> None:
    """Predict anew from the files alone, an image at a time, and count."""
    experiment = small(images, method, dtype="float64", partition__test="matched", rounds=2)
    run(experiment, tmp_path / "run")
    found = confusion_of(tmp_path / "run")
    resolved = experiment.resolved(find_method(method).defaults)
    data, model = load_data_and_model(resolved, torch.device("cpu"))
    rule = find_method(method)(resolved, data.num_classes)
    expected = {}
    for client in data.clients:
        personal = rule.primary_predictor.startswith("personal")
        file = f"models/{client.name}.safetensors" if personal else "model.safetensors"
        embeddings, logits = model.apply(load_file(tmp_path / "run" / file), data.test_inputs)
        said = logits.argmax(1)
        if rule.primary_predictor.endswith("prototype"):
            said = nearest_slowly(tmp_path / "run", rule, data, embeddings)
        counts = numpy.zeros((data.num_classes, data.num_classes), dtype=int)
        for place in client.test.tolist():
            counts[int(data.test_labels[place]), int(said[place])] += 1
        expected[client.name] = counts.tolist()
    assert found["clients"] == expected
    assert found["classes"] == list(data.class_names)
    assert found["predictor"] == rule.primary_predictor
    assert found["round"] == 2
    assert found["unanswered"] == {}


def nearest_slowly(
    path: Path, method: Method, data: FederatedData, embeddings: torch.Tensor
) -> torch.Tensor:
    pool = prototype_rule(method).reference(read_pool(path / "pool.safetensors", data.num_classes))
    said = []
    for vector in prototype_rule(method).project(embeddings):
        distances = [float((vector - prototype).norm()) for prototype in pool.vectors]
        said.append(int(pool.labels[numpy.argmin(distances)]))
    return torch.tensor(said)


@pytest.mark.parametrize("method", METHODS)
def test_the_diagonal_is_the_accuracy(images: Path, tmp_path: Path, method: str) -> None:
    run(small(images, method, rounds=1), tmp_path / "run")
    accuracy = read_records(tmp_path / "run")[-1]["accuracy_per_client"]
    for name, counts in confusion_of(tmp_path / "run")["clients"].items():
        matrix = numpy.array(counts)
        assert 100 * matrix.trace() / matrix.sum() == pytest.approx(accuracy[name])


def test_only_clients_that_were_read_are_counted(images: Path, tmp_path: Path) -> None:
    run(small(images, "local", clients=4, evaluate_clients=2), tmp_path / "run")
    accuracy = read_records(tmp_path / "run")[-1]["accuracy_per_client"]
    read = [name for name, value in accuracy.items() if value is not None]
    assert len(read) == 2
    assert list(confusion_of(tmp_path / "run")["clients"]) == read


def test_only_the_last_round_counts(images: Path, tmp_path: Path) -> None:
    asked: list[bool] = []

    class Watched(MeddledEngine):
        def evaluate(
            self,
            averaged: Tensors | None,
            pool: PrototypePool | None,
            names: Sequence[str],
            *,
            with_confusion: bool = False,
        ) -> RoundEvaluation | None:
            asked.append(with_confusion)
            return super().evaluate(averaged, pool, names, with_confusion=with_confusion)

    federation = build_federation(small(images), Watched)
    federation.run_round(evaluate=True)
    assert federation.confusion == {}
    federation.run_round(evaluate=True, with_confusion=True)
    assert len(federation.confusion) == 3
    federation.run_round(evaluate=False, with_confusion=True)
    assert federation.confusion == {}
    assert asked == [False, True]


def test_images_without_an_answer_have_their_own_place(images: Path, tmp_path: Path) -> None:
    """No cluster is large enough to be sent: the pool is empty and answers nothing."""
    experiment: Experiment = small(images, prototypes__min_cluster_size=10_000)
    run(experiment, tmp_path / "run")
    found = confusion_of(tmp_path / "run")
    counts = {name: numpy.array(each) for name, each in found["clients"].items()}
    assert all(each.sum() == 0 for each in counts.values())
    assert {name: sum(each) for name, each in found["unanswered"].items()} == dict.fromkeys(
        counts, 30
    )
