"""Every built-in method: the same on both engines, and something else than FedAvg."""

import runpy
from pathlib import Path
from typing import Any

import pytest
from identities import after_rounds, assert_close_tensors, differ, models_of, server_of

from mpfedcl.methods import PREDICTORS, TESTS, Method, PredictorKind, built_in_methods
from small_experiments import ONE_EXCHANGE, build_federation, small

pytestmark = pytest.mark.whole

ROOT = Path(__file__).parents[2]
ON_CNN = ("fedbn",)
"""Methods that need normalization layers; test_fedbn.py holds them to the same."""
TRAINING = [n for n, cls in built_in_methods().items() if cls.trains and n not in ON_CNN]
"""Methods whose clients train any model."""
LIKE_FEDAVG = ("fedavg", "mpfed", "proto-inference")
"""FedAvg, and methods that only predict otherwise."""
SAMPLED: dict[str, Any] = {"fraction": 0.7, "prototypes__pool_ttl": 2, "clients": 4}


@pytest.mark.parametrize("method", TRAINING)
def test_stacked_engine_matches_the_loop_engine(images: Path, method: str) -> None:
    looped, stacked = (
        after_rounds(images, method, 3, engine=engine, **SAMPLED) for engine in ("loop", "stacked")
    )
    assert_close_tensors(server_of(stacked), server_of(looped), 1e-9)
    assert_close_tensors(stacked.state.server.extra, looped.state.server.extra, 1e-9)
    assert_close_tensors(stacked.state.server.private, looped.state.server.private, 1e-9)
    assert_close_tensors(stacked.engine.state(), looped.engine.state(), 1e-9)
    assert stacked.engine.remarks()["training"].keys() <= {"stacked", "factored"}


@pytest.mark.parametrize("method", [name for name in TRAINING if name not in LIKE_FEDAVG])
def test_method_differs_from_fedavg_at_its_defaults(images: Path, method: str) -> None:
    # Clients lack classes, and differ in size.
    found, average = (
        after_rounds(images, name, 3, partition__alpha=0.1, clients=6)
        for name in (method, "fedavg")
    )
    others = models_of(average)
    assert differ(server_of(found), server_of(average)) or any(
        differ(model, others[client]) for client, model in models_of(found).items()
    )


@pytest.mark.parametrize("method", built_in_methods().values(), ids=lambda each: each.name)
def test_method_metadata_is_complete(method: type[Method]) -> None:
    assert all((method.name, method.summary, method.paper, method.sends, method.keeps))
    assert len(method.summary) <= 80
    assert not method.summary.endswith(".")
    assert not method.interpretation or method.interpretation.endswith(".")
    primary = method.primary_predictor
    assert {primary, method.primary_predictor_global or primary} <= set(PREDICTORS)
    assert (method.family == "one-shot") == (method.name in ONE_EXCHANGE)


@pytest.mark.parametrize("method", built_in_methods().values(), ids=lambda each: each.name)
def test_every_predictor_has_a_version_with_the_label_prior(method: type[Method]) -> None:
    offered = [PredictorKind.of(name) for name in method.predictors]
    for kind in offered:
        if kind.prior == "none":
            assert PredictorKind(kind.model, kind.rule, "labels") in offered


@pytest.mark.parametrize("method", ["fedavg", "fedpcl", "fedlda", "fedridge", "fedproto"])
def test_label_prior_is_evaluated_for_every_method(images: Path, method: str) -> None:
    changes = {"partition__test": "matched", "dtype": "float64"}
    record = build_federation(small(images, method, **changes)).run_round(
        evaluate=True, with_confusion=True
    )
    assert record.accuracy is not None
    for test in TESTS:
        table = {str(name): value for name, value in record.accuracy[test].items()}
        for name, value in table.items():
            kind = PredictorKind.of(name)
            if kind.prior == "none":
                with_prior = table[PredictorKind(kind.model, kind.rule, "labels").name]
                assert (with_prior is None) == (value is None), name


def test_methods_page_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "write_methods.py"))
    assert (ROOT / "docs" / "methods.md").read_text() == script["write_methods"]()
