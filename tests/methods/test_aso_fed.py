"""ASO-Fed: numbers by hand, and what it is equal to."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from arrivals import arrival, fold, make, one, params_of
from identities import assert_close_tensors, both_engines

from mpfedcl.methods import Context, Server
from mpfedcl.methods.aso_fed import emphasize

PLAIN = {"asofed__beta": 0.0, "asofed__pull": 0.0, "train__momentum": 0.0}


@both_engines
def test_plain_aso_fed_equals_fedasync_with_mixing_by_share(images: Path, engine: str) -> None:
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
    assert_close_tensors(mine, params_of(images, "fedasync", **common | by_share), 1e-11)


def test_aso_fed_with_one_client_equals_local_training(images: Path) -> None:
    common: dict[str, Any] = {"clients": 1, "train__momentum": 0.0}
    mine = params_of(images, "aso-fed", **common | PLAIN)
    assert_close_tensors(mine, params_of(images, "fedavg", **common), 1e-11)


def test_aso_fed_matches_a_hand_computed_step() -> None:
    change = arrival(1 - 0, share=0.25, name="change.w")
    assert float(fold("aso-fed", Server(one(1)), [change]).params["w"]) == 0.75


def test_aso_fed_steps_match_the_recursion() -> None:
    """Three steps of one number against the recursion written out."""
    method, beta = make("aso-fed", asofed__beta=0.25), 0.25

    def apply(*_: Any) -> Any:
        raise AssertionError

    state = method.init_client(one(0))
    _, memory = method.begin(Context(apply, one(0), None, state))
    before, mean = 0.0, 0.0
    for gradient in (2.0, -1.0, 5.0):
        context = Context(apply, one(0), None, state, memory=memory)
        step, memory = method.adjust(one(gradient), one(0), context)
        assert float(step["w"]) == pytest.approx(gradient - before + mean)
        before, mean = gradient, beta * mean + (1 - beta) * gradient
        assert float(memory["mean.w"]) == pytest.approx(mean)
    _, kept = method.finish(one(0), Context(apply, one(0), None, state, memory=memory), 3)
    assert float(kept["last.w"]) == 5


def test_slow_clients_take_larger_steps() -> None:
    method = make("aso-fed", asofed__beta=0.0)

    def stretch(*seconds: float) -> float:
        state = method.init_client(one(0))
        for each in seconds:
            state = method.note_delay(state, each)
        context = Context(lambda *_: (), one(0), None, state)  # type: ignore[arg-type]
        _, memory = method.begin(context)
        context = Context(context.apply, one(0), None, state, memory=memory)
        step, _ = method.adjust(one(1), one(0), context)
        return float(step["w"])

    assert stretch() == 1
    assert stretch(2.0) == 1
    assert stretch(20.0, 40.0) == pytest.approx(math.log(30))


def test_equal_weights_of_the_first_layer_are_unchanged() -> None:
    params = {"b": torch.ones(4), "w": torch.full((2, 4), -0.5), "v": torch.ones(3, 2)}
    assert_close_tensors(emphasize(params), params, 1e-6)
    odd = emphasize({"w": torch.tensor([[0.0, 1.0]])})["w"]
    assert odd[0].tolist() == pytest.approx([0, 2 * math.e / (1 + math.e)])
