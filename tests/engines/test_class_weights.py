"""Class weights: scikit-learn's balanced ones, averaged as in torch's weighted cross-entropy."""

from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.utils.class_weight import compute_sample_weight
from tasks import NUM_CLASSES, Task, draw
from torch.func import vmap
from torch.nn.functional import cross_entropy

from mpfedcl import Experiment, InvalidInput, run
from mpfedcl.engines.trainers.base import Trainer, batch_dims, weigh_classes
from mpfedcl.engines.trainers.direct import DirectTrainer
from mpfedcl.engines.trainers.factored import FactoredTrainer
from mpfedcl.engines.trainers.loop import LoopTrainer
from mpfedcl.engines.trainers.stacked import StackedTrainer
from mpfedcl.methods import Batch, FullBatch
from small_experiments import small

lists_of_labels = st.lists(st.integers(0, NUM_CLASSES - 1), min_size=1, max_size=30)


@given(lists_of_labels)
def test_weights_are_those_of_scikit_learn(labels: list[int]) -> None:
    found = weigh_classes(torch.tensor(labels), torch.float64)
    numpy.testing.assert_allclose(found, compute_sample_weight("balanced", labels), rtol=1e-15)
    assert float(found.mean()) == pytest.approx(1)


@given(lists_of_labels, st.integers(0, 5), st.integers(0, 99))
def test_batch_loss_is_that_of_torch_with_the_same_weights(
    labels: list[int], padding: int, seed: int
) -> None:
    real, by_class = torch.tensor(labels), draw(seed, NUM_CLASSES).exp()
    logits = draw(seed + 1, len(labels) + padding, NUM_CLASSES)
    wanted = cross_entropy(logits[: len(labels)], real, weight=by_class)
    full = FullBatch.of(draw(0, len(labels), 2), real, by_class[real])
    padded_labels = torch.cat([real, real[:1].expand(padding)])
    padded = Batch(
        draw(0, len(padded_labels), 2),
        padded_labels,
        torch.arange(len(padded_labels)) < len(labels),
        by_class[padded_labels],
    )
    stacked = Batch(*(part.unsqueeze(0) for part in padded if part is not None))
    torch.testing.assert_close(full.cross_entropy(logits[: len(labels)]), wanted)
    torch.testing.assert_close(padded.cross_entropy(logits), wanted)
    loss = vmap(lambda batch, scores: batch.cross_entropy(scores), (batch_dims(stacked), 0))
    torch.testing.assert_close(loss(stacked, logits.unsqueeze(0)), wanted.unsqueeze(0))


@pytest.mark.parametrize("trainer", [LoopTrainer, DirectTrainer, StackedTrainer, FactoredTrainer])
def test_full_steps_are_those_of_torch(trainer: type[Trainer]) -> None:
    task = Task([9, 14], train__batch_size=1000)
    task.works = [
        replace(work, weights=weigh_classes(work.client.labels, torch.float64))
        for work in task.works
    ]
    made = trainer(task.assembly)
    if isinstance(made, DirectTrainer | FactoredTrainer):
        made.layers = task.layers()
    groups = made.train(task.works, 1, None)
    found = {n: (each, i) for each in groups for i, n in enumerate(each.names)}
    for work in task.works:
        counts = torch.bincount(work.client.labels, minlength=NUM_CLASSES).double()
        assert len(set(counts.tolist())) > 1
        start = {name: value.clone().requires_grad_() for name, value in task.start.items()}
        logits = task.model.apply(start, work.client.inputs)[1]
        loss = cross_entropy(logits, work.client.labels, weight=1 / counts)
        gradients = torch.autograd.grad(loss, list(start.values()))
        trained, index = found[work.client.name]
        assert trained.losses[index] == pytest.approx(loss.item(), rel=1e-12)
        for (name, before), gradient in zip(start.items(), gradients, strict=True):
            wanted = (before - 0.2 * gradient).detach()
            torch.testing.assert_close(trained.params(index)[name], wanted)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("fedgauss", "it takes no steps on a loss"),
        ("fedpcl", "its loss does not use batch.cross_entropy"),
        ("own_methods:PlainCrossEntropy", "its loss does not use batch.cross_entropy"),
    ],
)
def test_methods_that_cannot_weigh_classes_reject_them(
    images: Path, tmp_path: Path, method: str, reason: str
) -> None:
    with pytest.raises(InvalidInput) as refusal:
        run(small(images, method, train__class_weights="balanced"), tmp_path / "run")
    wanted = f"train.class_weights is 'balanced'; with method {method} it must be none: {reason}."
    assert str(refusal.value) == wanted


def test_unknown_weights_are_rejected() -> None:
    with pytest.raises(InvalidInput, match="is 'equal'; it must be 'none' or 'balanced'"):
        Experiment().replace(train__class_weights="equal")
