"""FedAsync, FedAT, ASO-Fed, Sageflow and async-share: numbers by hand, and what they are equal to.

Where FedAvg is the measure its rounds are on the same clock.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from arrivals import CLOCK, EQUAL_SPEEDS, arrival, fold, one, params_of, run

from mpfedcl.errors import InvalidInput
from mpfedcl.messages import Update
from mpfedcl.methods import (
    Asynchronous,
    Batch,
    Context,
    Public,
    Server,
    built_in_methods,
    find_method,
)
from mpfedcl.methods.aso_fed import emphasize
from mpfedcl.methods.fedasync import FedAsync
from mpfedcl.methods.fedat import weigh_tiers
from mpfedcl.methods.sageflow import Sageflow
from mpfedcl.prototypes import Prototypes
from mpfedcl.tensors import Tensors
from small_experiments import assert_same_tensors, save_images, small

ENGINES = pytest.mark.parametrize("engine", ["loop", "stacked"])
ASYNCHRONOUS = sorted(
    name for name, each in built_in_methods().items() if issubclass(each, Asynchronous)
)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    save_images(root / "only.npz")
    return root


def make(method: str, **settings: Any) -> Any:
    found = find_method(method)
    return found(small(Path("nowhere"), method, **settings).resolved(found.defaults), 3)


def assert_close(left: Tensors, right: Tensors, tolerance: float = 1e-12) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("method", ASYNCHRONOUS)
def test_at_its_defaults_a_method_differs_from_fedavg(images: Path, method: str) -> None:
    loop, records = run(images, method, rounds=2)
    public = {"public__size": 1000} if method == "sageflow" else {}
    averaged = params_of(images, "fedavg", rounds=2, **public)
    mine = loop.state.server.params
    assert any(not torch.allclose(mine[n], averaged[n], rtol=1e-6) for n in mine)
    start = run(images, "fedavg", rounds=0, **public)[0].state.server.params
    assert any(not torch.equal(mine[n], start[n]) for n in mine), "it does not move"
    assert all(record.arrivals for record in records)


# FedAsync


@ENGINES
def test_fedasync_one_at_a_time_is_fedavg_with_one_client(images: Path, engine: str) -> None:
    """In the same order: both draw by the same key. To the bit where sums are taken alike."""
    common: dict[str, Any] = {"rounds": 4, "fraction": 0.3, "engine": engine}
    mine = params_of(images, "fedasync", **common, fedasync__mixing=1.0, fedasync__pull=0.0)
    theirs = params_of(images, "fedavg", **common)
    if engine == "loop":
        assert_same_tensors(mine, theirs)
    assert_close(mine, theirs)


def test_fedasync_without_mixing_keeps_the_first_bits(images: Path) -> None:
    start = run(images, "fedasync", rounds=0)[0].state.server.params
    assert_same_tensors(params_of(images, "fedasync", fedasync__mixing=0.0), start)


def test_fedasync_by_hand() -> None:
    server = fold("fedasync", Server(one(0)), [arrival(1, staleness=1)], fedasync__mixing=0.5)
    assert float(server.params["w"]) == pytest.approx(0.353553, abs=1e-6)


def test_the_three_ways_to_count_stale_answers_less() -> None:
    def fades(kind: str, a: float) -> list[float]:
        method: FedAsync = make(
            "fedasync", fedasync__staleness=kind, fedasync__a=a, fedasync__b=4.0
        )
        return [method.fade(staleness) for staleness in (0, 4, 5, 8)]

    assert fades("constant", 0.5) == [1, 1, 1, 1]
    assert fades("polynomial", 0.5) == pytest.approx([1, 5**-0.5, 6**-0.5, 1 / 3])
    assert fades("hinge", 10) == pytest.approx([1, 1, 1 / 11, 1 / 41])
    # A gentle hinge never counts for more than what is fresh.
    assert fades("hinge", 0.1)[2] < 1


@pytest.mark.parametrize("method", ["fedasync", "fedat", "aso-fed"])
def test_the_pull_is_to_what_a_client_was_sent(method: str) -> None:
    section = method.replace("-", "")
    made = make(method, **{f"{section}__pull": 3.0})
    start, weights = one(1.0), {"w": torch.tensor([1.5], dtype=torch.float64, requires_grad=True)}
    batch = Batch(torch.zeros(1, 1), torch.tensor([0]), torch.tensor([True]))
    logits = torch.zeros(1, 3, dtype=torch.float64)
    context = Context(lambda *_: (logits, logits), start, None, {})
    loss = made.loss(weights, batch, context)
    assert float(loss.detach()) == pytest.approx(math.log(3) + 3 / 2 * 0.25)
    (slope,) = torch.autograd.grad(loss, [weights["w"]])
    assert float(slope) == pytest.approx(3 * 0.5)


# FedAT


@ENGINES
def test_fedat_with_one_tier_is_fedavg(images: Path, engine: str) -> None:
    mine, records = run(images, "fedat", fedat__tiers=1, fedat__pull=0.0, engine=engine, **CLOCK)
    theirs, rounds = run(images, "fedavg", engine=engine, **CLOCK)
    if engine == "loop":
        assert_same_tensors(mine.state.server.params, theirs.state.server.params)
    assert_close(mine.state.server.params, theirs.state.server.params)
    assert [r.virtual_seconds for r in records] == [r.virtual_seconds for r in rounds]
    assert [r.bytes for r in records] == [r.bytes for r in rounds]
    assert [r.loss for r in records] == pytest.approx([r.loss for r in rounds])


def test_fedat_with_one_tier_draws_the_same_clients_as_fedavg(images: Path) -> None:
    common: dict[str, Any] = {"fraction": 0.6, "clients": 5, **CLOCK}
    mine = params_of(images, "fedat", fedat__tiers=1, fedat__pull=0.0, **common)
    assert_same_tensors(mine, params_of(images, "fedavg", **common))


def test_tiers_weigh_by_what_their_mirror_images_have_done() -> None:
    assert weigh_tiers([4, 1, 0]) == [0, 0.2, 0.8]
    assert weigh_tiers([2, 2]) == [0.5, 0.5]


def test_fedat_by_hand() -> None:
    """Two tiers that start at 1: the first answer of the fast one makes (T) = (2, 1)."""
    first = fold("fedat", Server(one(3)), [arrival(0, tier=0, num_tiers=2)])
    assert float(first.params["w"]) == pytest.approx(1 / 3 * 0 + 2 / 3 * 3)
    second = fold("fedat", first, [arrival(6, tier=1, num_tiers=2)])
    assert float(second.params["w"]) == pytest.approx((0 + 6) / 2)
    # To the letter, the fast tier's work counts for nothing until the slow one has answered.
    literal = fold("fedat", Server(one(3)), [arrival(0, tier=0, num_tiers=2)], fedat__start=0)
    assert float(literal.params["w"]) == 3


def test_the_tiers_models_are_never_sent(images: Path) -> None:
    loop, records = run(images, "fedat", fedat__tiers=2)
    assert loop.state.server.extra == {}
    assert {name.split(".")[0] for name in loop.state.server.private} == {
        "rounds",
        "tier0",
        "tier1",
    }
    assert records[0].bytes["up"] == 3 * loop.broadcast().num_bytes


# ASO-Fed


PLAIN = {"asofed__beta": 0.0, "asofed__pull": 0.0, "train__momentum": 0.0}


@ENGINES
def test_plain_aso_fed_is_fedasync_by_share(images: Path, engine: str) -> None:
    """One client at a time, all of one size: w + n_k/N (w_k - w_sent)."""
    common: dict[str, Any] = {
        "rounds": 4,
        "fraction": 0.3,
        "engine": engine,
        "train__momentum": 0.0,
        "partition__kind": "iid",
    }
    mine = params_of(images, "aso-fed", **common | PLAIN)
    by_share = {"fedasync__mixing": 1 / 3, "fedasync__pull": 0.0}
    assert_close(mine, params_of(images, "fedasync", **common | by_share), 1e-11)


def test_aso_fed_with_one_client_is_its_training(images: Path) -> None:
    common: dict[str, Any] = {"clients": 1, "train__momentum": 0.0}
    mine = params_of(images, "aso-fed", **common | PLAIN)
    assert_close(mine, params_of(images, "fedavg", **common), 1e-11)


def test_aso_fed_by_hand() -> None:
    change = arrival(1 - 0, share=0.25, name="change.w")
    assert float(fold("aso-fed", Server(one(1)), [change]).params["w"]) == 0.75


def test_aso_fed_recalls_gradients() -> None:
    """Three steps of one number against the recursion written out."""
    method, beta = make("aso-fed", asofed__beta=0.25), 0.25

    def apply(*_: Any) -> Any:
        raise AssertionError

    state = method.init_client(one(0))
    _, memory = method.begin(Context(apply, one(0), None, state))
    before, mean = 0.0, 0.0
    for gradient in (2.0, -1.0, 5.0):
        context = Context(apply, one(0), None, state, memory=memory)
        step, memory = method.adjust_and_remember(one(gradient), one(0), context)
        assert float(step["w"]) == pytest.approx(gradient - before + mean)
        before, mean = gradient, beta * mean + (1 - beta) * gradient
        assert float(memory["mean.w"]) == pytest.approx(mean)
    _, kept = method.finish(one(0), Context(apply, one(0), None, state, memory=memory), 3)
    assert float(kept["last.w"]) == 5


def test_slow_clients_step_farther() -> None:
    method = make("aso-fed", asofed__beta=0.0)

    def stretch(*seconds: float) -> float:
        state = method.init_client(one(0))
        for each in seconds:
            state = method.note_delay(state, each)
        context = Context(lambda *_: (), one(0), None, state)  # type: ignore[arg-type]
        _, memory = method.begin(context)
        context = Context(context.apply, one(0), None, state, memory=memory)
        step, _ = method.adjust_and_remember(one(1), one(0), context)
        return float(step["w"])

    assert stretch() == 1
    assert stretch(2.0) == 1
    assert stretch(20.0, 40.0) == pytest.approx(math.log(30))


def test_equal_weights_of_the_first_layer_stay_as_they_are() -> None:
    params = {"b": torch.ones(4), "w": torch.full((2, 4), -0.5), "v": torch.ones(3, 2)}
    assert_close(emphasize(params), params, 1e-6)
    odd = emphasize({"w": torch.tensor([[0.0, 1.0]])})["w"]
    assert odd[0].tolist() == pytest.approx([0, 2 * math.e / (1 + math.e)])


# Sageflow


OPEN: dict[str, Any] = {
    "sageflow__entropy": 1e6,
    "sageflow__loss_power": 0.0,
    "sageflow__age_power": 0.0,
    "pace__tick": 1000.0,
}


@ENGINES
def test_open_sageflow_in_one_tick_is_fedavg(images: Path, engine: str) -> None:
    common: dict[str, Any] = {"engine": engine, "public__size": 6}
    mine = params_of(images, "sageflow", **common, **OPEN)
    theirs = params_of(images, "fedavg", **common)
    if engine == "loop":
        assert_same_tensors(mine, theirs)
    assert_close(mine, theirs)


def test_stale_versions_count_less() -> None:
    groups = [arrival(3, staleness=3), arrival(0)]
    server = fold("sageflow", Server(one(9)), groups)
    assert float(server.params["w"]) == pytest.approx(3 * 1 / 3)
    fresh = fold("sageflow", Server(one(9)), groups, sageflow__age_power=200.0)
    assert float(fresh.params["w"]) == pytest.approx(0, abs=1e-100)
    half = fold("sageflow", Server(one(9)), [arrival(0)], sageflow__mixing=0.5)
    assert float(half.params["w"]) == 4.5
    assert float(fold("sageflow", Server(one(9)), []).params["w"]) == 9


def judge(method: Sageflow, logit: float, ticks: int = 0) -> float:
    """Return the weight of a model that gives the first class this logit, 5 public images of it."""
    inputs = torch.ones(5, 1, dtype=torch.float64)

    def apply(params: Tensors, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = torch.cat([inputs * params["w"], 0 * inputs], 1)
        return logits, logits

    method.public = Public(apply, inputs, torch.zeros(5, dtype=torch.int64))
    none = Prototypes.empty(1, torch.float64)
    private = {"ticks": torch.tensor(ticks)}
    return method.weigh(Update("a", 10, one(logit), none, 0.1), Server(one(0), private=private))


def test_models_weigh_by_their_public_loss() -> None:
    """Losses 0.5 and 1: with a power of 1 the first weighs twice as much."""
    method = make("sageflow")
    halves = [-math.log(math.exp(loss) - 1) for loss in (0.5, 1.0)]
    weights = [judge(method, logit) for logit in halves]
    assert weights == pytest.approx([20, 10])
    assert [w / sum(weights) for w in weights] == pytest.approx([2 / 3, 1 / 3])
    assert judge(method, 1e4) == pytest.approx(10 / 1e-8)


def test_uncertain_models_are_left_out_after_a_while() -> None:
    method = make("sageflow", sageflow__entropy=0.5, sageflow__warm_up=3)
    assert judge(method, 0.0, ticks=2) == pytest.approx(10 / math.log(2))
    assert judge(method, 0.0, ticks=3) == 0
    assert judge(method, 5.0, ticks=3) > 0


def test_who_is_left_out_is_written_down_and_the_model_stays(images: Path) -> None:
    strict: dict[str, Any] = {
        "sageflow__entropy": 1e-9,
        "sageflow__warm_up": 0,
        "pace__tick": 1000.0,
    }
    loop, records = run(images, "sageflow", **strict)
    start = run(images, "sageflow", rounds=0, **strict)[0].state.server.params
    assert_same_tensors(loop.state.server.params, start)
    assert all(r.arrivals and len(r.arrivals.left_out) == 3 for r in records)
    assert all(r.arrivals and r.arrivals.version == 0 for r in records)
    assert records[0].clients.answered == ["client-0", "client-1", "client-2"]


def test_sageflow_needs_public_images(images: Path) -> None:
    with pytest.raises(InvalidInput, match=r"^public.size is 0; with sageflow it must be"):
        run(images, "sageflow", public__size=0)


# async-share


@ENGINES
def test_async_share_at_equal_speeds_is_fedavg(images: Path, engine: str) -> None:
    common: dict[str, Any] = {"engine": engine, **EQUAL_SPEEDS}
    mine = params_of(images, "async-share", **common)
    assert_close(mine, params_of(images, "fedavg", **common))


def test_in_the_long_run_clients_count_by_their_samples() -> None:
    """Clients that come every tick, every second and every fifth, with 10, 30 and 20 samples."""
    method = make("async-share", async_share__decay=0.999, async_share__staleness=0.0)
    sizes, periods = {"a": 10, "b": 30, "c": 20}, {"a": 1, "b": 2, "c": 5}
    none = Prototypes.empty(1, torch.float64)
    total, server = dict.fromkeys(sizes, 0.0), Server(one(0))
    for tick in range(1, 2001):
        came = [name for name in sizes if tick % periods[name] == 0]
        weights = [method.weigh(Update(n, sizes[n], {}, none, 0.1), server) for n in came]
        for name, weight in zip(came, weights, strict=True):
            total[name] += weight
        samples = sum(sizes[name] for name in came)
        each = arrival(1, samples=samples, share=samples / 60)._replace(names=came, weights=weights)
        server = method.arrive(server, [each])
    shares = [total[name] / sum(total.values()) for name in sizes]
    assert shares == pytest.approx([10 / 60, 30 / 60, 20 / 60], rel=0.01)


def test_all_that_comes_in_a_tick_weighs_1_at_most() -> None:
    """A client that has never come before: its first weight is cut."""
    method = make("async-share")
    server = Server(one(4))
    for _ in range(20):
        server = method.arrive(server, [])
    assert float(server.params["w"]) == 4
    none = Prototypes.empty(1, torch.float64)
    weight = method.weigh(Update("a", 10, {}, none, 0.1), server)
    assert weight > 20
    late = arrival(1, share=0.5)._replace(weights=[weight])
    assert float(method.arrive(server, [late]).params["w"]) == 1
