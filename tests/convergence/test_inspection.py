"""What an engine measures of a client: closed forms, and finite differences as the oracle."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mpfedcl.convergence.objectives import ObjectiveInspector
from mpfedcl.core.tensors import Tensors
from mpfedcl.data.client_data import ClientData, FederatedData
from mpfedcl.engines.trainer import ClientTask
from mpfedcl.experiment import Experiment
from mpfedcl.methods import Batch, Context, Method, find_method
from mpfedcl.methods.messages import Broadcast
from mpfedcl.models import Mlp, Model
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.assembly import assemble
from mpfedcl.rounds.round_loop import RoundLoop
from small_experiments import assemble_federation

CENTRES = {"a": (3.0, 4.0), "b": (-1.0, 0.0)}


class Point(Model):
    """A model that is one point: the embedding of every input."""

    embedding_size = 2

    def init(self, generator: torch.Generator, dtype: torch.dtype) -> Tensors:
        return {"point": torch.zeros(2, dtype=dtype)}

    def apply(self, params: Tensors, inputs: Tensor) -> tuple[Tensor, Tensor]:
        embeddings = params["point"].expand(len(inputs), 2)
        return embeddings, embeddings


class MeanSquare(Method):
    """L_i(w) = |w - mean of the client's samples|²/2, up to a constant."""

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        embeddings, _ = context.apply(params, batch.inputs)
        return batch.mean((embeddings - batch.inputs).square().sum(1) / 2)


def make_points(sizes: dict[str, int]) -> FederatedData:
    none = torch.zeros(0, dtype=torch.int64)
    clients = tuple(
        ClientData(
            name,
            torch.tensor([CENTRES[name]], dtype=torch.float64).repeat(size, 1),
            torch.zeros(size, dtype=torch.int64),
            none,
        )
        for name, size in sizes.items()
    )
    inputs = torch.zeros(1, 2, dtype=torch.float64)
    return FederatedData("points", ("0", "1"), clients, inputs, torch.zeros(1).long(), {})


def found_points(sizes: dict[str, int], **changes: Any) -> RoundLoop:
    common = {
        "dtype": "float64",
        "diagnostics": ("convergence",),
        "engine": "loop",
        "prototypes__normalize": False,
        "train__momentum": 0.0,
        "train__batch_size": 100,
        "train__lr": 0.5,
        "train__lr_decay": 1.0,
    }
    experiment = Experiment(method="fedavg").replace(**common | changes).resolved()
    return assemble_federation(experiment, make_points(sizes), Point(), method_class=MeanSquare)


def test_quadratics_by_hand() -> None:
    # One client has three times the samples of the other.
    federation = found_points({"a": 3, "b": 1})
    record = federation.run_round(evaluate=False)
    assert record.diagnostics is not None
    told = record.diagnostics["convergence"]
    a, b = told["clients"]["a"], told["clients"]["b"]
    # From 0 with η = 1/2: half of the way to each centre; their mean is (2, 3).
    wanted = {
        "objective_before": 12.5,
        "objective_after_one_step": 3.125,
        "objective_after_training": 3.125,
        "objective_after_pool": 3.125,
        # The average is (1, 1.5).
        "objective_after_aggregation": (2**2 + 2.5**2) / 2,
        "gradient_norm": 5.0,
        "stochastic_gradient_norm": 5.0,
        "step": 2.5,
        "smoothness": 1.0,
        "slope": 3.75,
        "embedding_slope": 1.0,
        "embedding_length": 2.5,
        "num_steps": 1,
        "num_samples": 3,
    }
    assert {name: a[name] for name in wanted} == pytest.approx(wanted)
    assert b["gradient_norm"] == pytest.approx(1.0)
    assert b["objective_after_aggregation"] == pytest.approx((2**2 + 1.5**2) / 2)
    assert told["gradient_norm"] == pytest.approx(math.hypot(2, 3))
    assert told["dissimilarity"] == pytest.approx((3 * 25 + 1) / 4 / 13)
    assert told["learning_rate"] == 0.5
    assert told["pool_factor"] == 0
    assert told["constants"]["smoothness"] == pytest.approx(1.0)
    # (η - η²/2) E|∇L_i|² = 3/8 * 19: more than what either b's step or the global one wins.
    assert b["bounds"]["decrease"] == pytest.approx(3 / 8 * 19)
    assert b["holds"]["lemma_1"] is False
    assert a["holds"]["lemma_1"] is True
    assert b["holds"]["falls_in_training"] is True
    assert b["holds"]["falls_to_average"] is False


def test_next_round_begins_where_this_one_ended() -> None:
    federation = found_points({"a": 2, "b": 2}, train__lr_decay=0.5)
    first, second = (federation.run_round(evaluate=False).diagnostics for _ in range(2))
    assert first is not None
    assert second is not None
    assert second["convergence"]["learning_rate"] == 0.25
    for name in CENTRES:
        ended = first["convergence"]["clients"][name]["objective_after_aggregation"]
        assert second["convergence"]["clients"][name]["objective_before"] == ended


def test_batches_are_measured_at_the_start() -> None:
    # Batches of one sample, two epochs: all samples are alike, so is each gradient at the start.
    federation = found_points({"a": 3}, train__batch_size=1, train__epochs=2, train__lr=0.1)
    record = federation.run_round(evaluate=False)
    assert record.diagnostics is not None
    told = record.diagnostics["convergence"]["clients"]["a"]
    assert told["num_steps"] == 6
    assert told["stochastic_gradient_norm"] == pytest.approx(5.0)
    assert told["step"] == pytest.approx(5 * (1 - 0.9**6))
    assert told["objective_after_one_step"] == pytest.approx(12.5 * 0.9**2)


def make_inspection(
    name: str, **changes: Any
) -> tuple[ObjectiveInspector, ClientTask, Tensors, Tensors]:
    """Return an inspector, a client, its parameters after a training, and what follows."""
    experiment = Experiment(method=name, dtype="float64")
    settings = {"prototypes__per_class": 2, "train__batch_size": 4, **changes}
    found = find_method(name)
    experiment = experiment.replace(**settings).resolved(found.defaults)
    assembly = assemble(experiment, Mlp((5, 6, 4), 3), num_classes=3, input_size=5)
    method, model = assembly.method, assembly.model
    key = torch.Generator().manual_seed(3)
    start, trained, averaged = (model.init(key, torch.float64) for _ in range(3))
    inputs = torch.randn(11, 5, generator=key, dtype=torch.float64)
    client = ClientData("a", inputs, torch.arange(11) % 3, torch.zeros(0, dtype=torch.int64))
    work = ClientTask(client, start, method.init_client(start))
    pools = [draw_pool(method, key) for _ in range(2)]
    shared = {n: v for n, v in averaged.items() if method.shared(n)}
    broadcast = Broadcast(2, {n: start[n] for n in shared}, {}, method.reference(pools[0]))
    following = Broadcast(3, shared, {}, method.reference(pools[1]))
    return (
        ObjectiveInspector(assembly, broadcast, following),
        work,
        trained,
        averaged,
    )


def draw_pool(method: Method, key: torch.Generator) -> PrototypePool:
    vectors = torch.randn(12, 4, generator=key, dtype=torch.float64)
    return PrototypePool(
        vectors=method.project(vectors),
        labels=torch.arange(3).repeat(4),
        counts=torch.ones(12, dtype=torch.int64),
        owners=torch.arange(2).repeat_interleave(6),
        names=("a", "b"),
        num_classes=3,
        num_prototypes=method.num_prototypes if method.clustering != "mean" else None,
    )


@pytest.mark.parametrize("name", ["mp-fedcl", "fedavg", "fedprox", "fedproto", "dp-fedcl"])
def test_gradients_against_finite_differences(name: str) -> None:
    inspector, work, trained, _ = make_inspection(name)
    measured, gradient = inspector.inspect(work, trained, {})
    width = 1e-6
    for seed in range(3):
        key = torch.Generator().manual_seed(seed)
        direction = {n: draw_like(value, key) for n, value in work.start.items()}
        objectives = []
        for sign in (1, -1):
            aside = {n: value + sign * width * direction[n] for n, value in work.start.items()}
            objectives.append(inspector.inspect(replace(work, start=aside), aside, {})[0])
        rise = objectives[0].objective_before - objectives[1].objective_before
        slope = sum(float((gradient[n] * direction[n]).sum()) for n in gradient)
        assert slope == pytest.approx(rise / (2 * width), rel=1e-5, abs=1e-7)
    squares = sum(float(value.square().sum()) for value in gradient.values())
    assert measured.gradient_norm == pytest.approx(math.sqrt(squares))


@pytest.mark.parametrize("name", ["mp-fedcl", "fedavg", "fedprox", "fedproto"])
def test_smoothness_is_between_the_gradients_at_both_ends(name: str) -> None:
    inspector, work, trained, _ = make_inspection(name)
    measured, gradient = inspector.inspect(work, trained, {})
    _, at_the_end = inspector.inspect(replace(work, start=trained), trained, {})
    # FedProx pulls back to where the round began, which the second inspection has moved.
    mu = 0.01 if name == "fedprox" else 0.0
    changes = [at_the_end[n] + mu * (trained[n] - work.start[n]) - gradient[n] for n in work.start]
    change = math.sqrt(sum(float(each.square().sum()) for each in changes))
    assert measured.smoothness == pytest.approx(change / measured.step)
    fall = measured.objective_before - measured.objective_after_training
    assert measured.slope == pytest.approx(abs(fall) / measured.step)


def draw_like(value: Tensor, key: torch.Generator) -> Tensor:
    return torch.randn(value.shape, generator=key, dtype=value.dtype)


@pytest.mark.parametrize("name", ["mp-fedcl", "fedavg", "fedprox", "fedproto", "local"])
def test_the_pool_moves_only_losses_that_see_it(name: str) -> None:
    inspector, work, trained, _ = make_inspection(name)
    measured, _ = inspector.inspect(work, trained, {})
    sees_pool = name in ("mp-fedcl", "fedproto")
    changed = measured.objective_after_pool != measured.objective_after_training
    assert changed is sees_pool
    assert math.isnan(measured.objective_after_aggregation) is (name in ("fedproto", "local"))


def test_the_objective_is_the_whole_pool_where_steps_see_a_sample() -> None:
    objectives = []
    for sample in (None, 1):
        inspector, work, trained, _ = make_inspection("mp-fedcl", contrast__sample=sample)
        measured, _ = inspector.inspect(work, trained, {})
        objectives.append((measured.objective_before, measured.objective_after_pool))
    assert objectives[0] == objectives[1]


def test_the_classifier_is_no_part_of_the_embedding() -> None:
    inspector, work, trained, _ = make_inspection("mp-fedcl")
    measured, _ = inspector.inspect(work, trained, {})
    other = {n: v + 5 if n.startswith("classifier") else v for n, v in trained.items()}
    again, _ = inspector.inspect(work, other, {})
    assert again.embedding_slope == measured.embedding_slope
    assert again.step > measured.step
    assert measured.embedding_length <= 1 + 1e-12
    moved = math.sqrt(
        sum(
            float((trained[n] - work.start[n]).square().sum())
            for n in trained
            if not n.startswith("classifier")
        )
    )
    ends = []
    for params in (work.start, trained):
        embeddings, _ = Mlp((5, 6, 4), 3).apply(params, work.client.inputs)
        ends.append(torch.nn.functional.normalize(embeddings, dim=1, eps=1e-12))
    farthest = float((ends[1] - ends[0]).norm(dim=1).max())
    assert measured.embedding_slope == pytest.approx(farthest / moved)


@pytest.mark.parametrize(
    ("name", "changes", "wanted"),
    [
        ("mp-fedcl", {"contrast__weight": 0.5, "contrast__temperature": 0.1}, 2 * 0.5 / 0.1),
        ("mp-fedcl", {"contrast__form": "literal"}, 2 / 0.07),
        ("mp-fedcl", {"contrast__form": "pooled"}, None),
        ("fedavg", {}, 0.0),
        ("local", {}, 0.0),
        ("fedproto", {}, None),
    ],
)
def test_where_lemma_2_speaks(name: str, changes: dict[str, Any], wanted: float | None) -> None:
    experiment = Experiment(method=name).replace(prototypes__per_class=2, **changes)
    method = find_method(name)(experiment, 3)
    pool = draw_pool(method, torch.Generator().manual_seed(0))
    assert method.pool_factor(Broadcast(2, {}, {}, pool)) == pytest.approx(wanted)
    if name == "mp-fedcl":
        # Against an empty pool there was no contrast to speak of.
        empty = PrototypePool.empty(3, 4)
        assert method.pool_factor(Broadcast(1, {}, {}, empty)) is None
