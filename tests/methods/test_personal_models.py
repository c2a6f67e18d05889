"""Methods whose clients have a personal model next to the shared one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from identities import (
    after_rounds,
    assert_close_tensors,
    both_engines,
    differ,
    models_of,
    server_of,
)
from torch.nn.functional import cross_entropy

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.data.loading import load_federated_data
from mpfedcl.engines.trainers.base import draw_batches
from mpfedcl.methods import Context, FedAvg
from mpfedcl.models import Mlp
from small_experiments import assert_same_tensors, build_federation, small

STILL: dict[str, Any] = {"train__momentum": 0.0, "train__lr_decay": 1.0}


@both_engines
@pytest.mark.parametrize("weight", [4.0, 16.0])
def test_pfedme_with_one_full_step_equals_fedavg(images: Path, engine: str, weight: float) -> None:
    common: dict[str, Any] = {**STILL, "engine": engine}
    average = after_rounds(images, "fedavg", **common | {"train__lr": 0.09})
    # lr * weight is 1: w_i goes all the way to θ, so that the pull is always 0.
    found = after_rounds(
        images,
        "pfedme",
        **common | {"train__lr": 1 / weight, "pfedme__weight": weight, "pfedme__steps": 1},
    )
    # FedAvg's stack never writes weights out, so that sums are taken in another order there.
    same = assert_same_tensors if engine == "loop" else assert_close_tensors
    same(server_of(found), server_of(average))


@both_engines
def test_pfedme_with_weight_0_leaves_the_global_model_unchanged(images: Path, engine: str) -> None:
    start = server_of(after_rounds(images, "pfedme", 0, engine=engine))
    free = after_rounds(images, "pfedme", engine=engine, pfedme__weight=0.0)
    assert_close_tensors(server_of(free), start)
    still = after_rounds(images, "pfedme", engine=engine, pfedme__mixing=0.0)
    assert_same_tensors(server_of(still), start)
    alone = after_rounds(images, "local", 1, engine=engine, **STILL | {"train__lr": 0.09})
    once = after_rounds(images, "pfedme", 1, engine=engine, pfedme__weight=0.0, pfedme__steps=1)
    for client, model in models_of(once).items():
        assert_close_tensors(model, models_of(alone)[client])


def slow_pfedme(images: Path, *, weight: float, lr: float, own_lr: float, steps: int) -> Tensors:
    """Return the server's model after one round, by the paper's loop."""
    experiment = small(images, "fedavg", dtype="float64", partition__alpha=0.5, train__lr=lr)
    experiment = experiment.resolved({})
    data = load_federated_data(experiment)
    model = Mlp((data.input_size, 8, 4), data.num_classes)
    start = build_federation(experiment).state.server.params
    total = {name: torch.zeros_like(value) for name, value in start.items()}
    everyone = sum(len(client.labels) for client in data.clients)
    for client in data.clients:
        theta = {n: v.clone() for n, v in start.items()}
        local = {n: v.clone() for n, v in start.items()}
        for batch in draw_batches(client, experiment, 1):
            for _ in range(steps):
                leaves = {n: v.clone().requires_grad_() for n, v in theta.items()}
                _, logits = model.apply(leaves, client.inputs[batch])
                loss = cross_entropy(logits, client.labels[batch])
                slopes = torch.autograd.grad(loss, list(leaves.values()))
                for name, slope in zip(leaves, slopes, strict=True):
                    pull = weight * (theta[name] - local[name])
                    theta[name] = theta[name] - own_lr * (slope + pull)
            local = {n: w - lr * weight * (w - theta[n]) for n, w in local.items()}
        for name, value in local.items():
            total[name] += len(client.labels) / everyone * value
    return total


@both_engines
def test_pfedme_matches_a_plain_loop_of_the_paper(images: Path, engine: str) -> None:
    found = after_rounds(images, "pfedme", 1, engine=engine, train__lr=0.02)
    wanted = slow_pfedme(images, weight=15.0, lr=0.02, own_lr=0.09, steps=5)
    assert_close_tensors(server_of(found), wanted, 1e-10)


@both_engines
@pytest.mark.parametrize("method", ["ditto", "fedavg-ft"])
def test_sent_model_equals_fedavg(images: Path, method: str, engine: str) -> None:
    found = after_rounds(images, method, 3, engine=engine)
    average = after_rounds(images, "fedavg", 3, engine=engine)
    assert_close_tensors(server_of(found), server_of(average))
    for client, model in models_of(found).items():
        assert differ(model, models_of(average)[client])


@both_engines
def test_ditto_with_weight_0_equals_local(images: Path, engine: str) -> None:
    free = after_rounds(images, "ditto", 3, engine=engine, ditto__weight=0.0)
    alone = after_rounds(images, "local", 3, engine=engine)
    for client, model in models_of(free).items():
        assert_close_tensors(model, models_of(alone)[client])


def test_larger_ditto_weight_keeps_personal_models_near_the_global_one(images: Path) -> None:
    def distance(weight: float) -> float:
        found = after_rounds(
            images, "ditto", 1, ditto__weight=weight, **STILL | {"train__lr": 0.01}
        )
        start = server_of(after_rounds(images, "ditto", 0))
        models = models_of(found).values()
        return sum(float((m["classifier.bias"] - start["classifier.bias"]).norm()) for m in models)

    assert distance(90.0) < distance(50.0) < 0.7 * distance(0.0)


@both_engines
def test_fine_tuning_moves_only_the_classifier(images: Path, engine: str) -> None:
    start = server_of(after_rounds(images, "fedavg", 1, engine=engine))
    found = after_rounds(images, "fedavg-ft", 2, engine=engine)
    for model in models_of(found).values():
        for name, value in model.items():
            is_head = name.startswith("classifier.")
            assert torch.allclose(value, start[name], atol=1e-12) is not is_head


@both_engines
def test_fedrep_trains_the_classifier_first_and_then_the_base(images: Path, engine: str) -> None:
    """Its two parts against two runs, in each of which only one of them may move."""
    start = server_of(after_rounds(images, "fedrep", 0, engine=engine))
    found = after_rounds(images, "fedrep", 1, engine=engine, fedrep__head_epochs=2)
    # Without epochs of its own the classifier stands still.
    still = after_rounds(images, "fedrep", 1, engine=engine, fedrep__head_epochs=0)
    for client, model in models_of(still).items():
        assert torch.equal(model["classifier.weight"], start["classifier.weight"])
        assert differ(
            {"w": models_of(found)[client]["classifier.weight"]}, {"w": model["classifier.weight"]}
        )
    assert differ(server_of(still), start)
    assert torch.equal(server_of(found)["classifier.weight"], start["classifier.weight"])


class FrozenClassifier(FedAvg):
    """FedAvg that takes its steps with a classifier that stays as received."""

    def after_step(self, params: Tensors, context: Context) -> tuple[Tensors, Tensors]:
        heads = {n: w for n, w in context.start.items() if n in self.layers.classifier}
        return params | heads, context.memory


@both_engines
def test_fedbabu_sends_fedavg_below_a_frozen_classifier(images: Path, engine: str) -> None:
    found = after_rounds(images, "fedbabu", 3, engine=engine)
    settings: dict[str, Any] = {"dtype": "float64", "partition__alpha": 0.5, "train__lr": 0.1}
    experiment = small(images, "fedavg", engine=engine, **settings)
    frozen = build_federation(experiment, method_class=FrozenClassifier)
    start = server_of(frozen)
    for _ in range(3):
        frozen.run_round(evaluate=False)
    assert_close_tensors(server_of(found), server_of(frozen))
    # Up to the rounding of the mean.
    kept = {"classifier.weight": start["classifier.weight"]}
    assert_close_tensors({n: server_of(found)[n] for n in kept}, kept)


@both_engines
def test_fedbabu_fine_tunes_the_whole_received_model(images: Path, engine: str) -> None:
    found = after_rounds(images, "fedbabu", 1, engine=engine)
    usual = after_rounds(images, "fedavg", 1, engine=engine)
    for client, model in models_of(found).items():
        assert_close_tensors(model, models_of(usual)[client])


def plain_fedrod(images: Path, rounds: int) -> tuple[Tensors, dict[str, Tensors]]:
    """Return the server's model and the personal models, by a loop with two separate heads."""
    experiment = small(images, "fedavg", dtype="float64", partition__alpha=0.5, **FAST)
    experiment = experiment.resolved({})
    data = load_federated_data(experiment)
    model = Mlp((data.input_size, 8, 4), data.num_classes)
    w = dict(build_federation(experiment).state.server.params)
    heads = [name for name in w if name.startswith("classifier.")]
    own = {c.name: {n: torch.zeros_like(w[n]) for n in heads} for c in data.clients}
    total, personal = sum(len(client.labels) for client in data.clients), {}
    for number in range(1, rounds + 1):
        mean = {name: torch.zeros_like(value) for name, value in w.items()}
        for client in data.clients:
            sent, head = {n: v.clone() for n, v in w.items()}, own[client.name]
            counts = torch.bincount(client.labels, minlength=data.num_classes).double()
            for rows in draw_batches(client, experiment, number):
                leaves = {n: v.clone().requires_grad_() for n, v in sent.items()}
                z, logits = model.apply(leaves, client.inputs[rows])
                labels = client.labels[rows]
                balanced = cross_entropy(logits + counts.log(), labels)
                slopes = torch.autograd.grad(balanced, list(leaves.values()), retain_graph=True)
                mine = {n: v.clone().requires_grad_() for n, v in head.items()}
                added = z.detach() @ mine["classifier.weight"].T + mine["classifier.bias"]
                loss = cross_entropy(logits.detach() + added, labels)
                moves = torch.autograd.grad(loss, [mine[n] for n in heads])
                lr = experiment.train.learning_rate(number)
                sent = {n: v - lr * s for (n, v), s in zip(sent.items(), slopes, strict=True)}
                head = {n: head[n] - lr * s for n, s in zip(heads, moves, strict=True)}
            own[client.name] = head
            personal[client.name] = sent | {n: sent[n] + head[n] for n in heads}
            mean = {n: v + len(client.labels) / total * sent[n] for n, v in mean.items()}
        w = mean
    return w, personal


FAST: dict[str, Any] = {"train__momentum": 0.0, "train__lr": 0.1}


@both_engines
def test_fedrod_matches_a_plain_loop_with_two_heads(images: Path, engine: str) -> None:
    found = after_rounds(images, "fedrod", 2, engine=engine, **FAST)
    wanted, personal = plain_fedrod(images, 2)
    assert_close_tensors(server_of(found), wanted, 1e-10)
    for client, model in models_of(found).items():
        assert_close_tensors(model, personal[client], 1e-10)


@pytest.mark.parametrize("method", ["pfedme", "ditto", "fedavg-ft", "fedrep", "fedbabu", "fedrod"])
def test_methods_that_need_sgd_reject_adam(images: Path, method: str) -> None:
    with pytest.raises(
        InvalidInput, match=r"train.optimizer is 'adam'; with method .* must be sgd"
    ):
        after_rounds(images, method, 0, train__optimizer="adam")
