"""Rounds in which only some clients take part."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from recording_engine import watch

from mpfedcl.methods import Method
from mpfedcl.methods.messages import Update
from mpfedcl.prototypes import Prototypes
from small_experiments import build_federation, small


def test_client_that_sends_no_prototypes_has_none_in_the_pool(images: Path) -> None:
    federation, engine = watch(small(images, prototypes__pool_ttl=3))
    federation.run_round(evaluate=False)
    assert "client-1" in federation.pool.names

    def empty_handed(updates: list[Update]) -> list[Update]:
        nothing = Prototypes.empty(4)
        return [replace(u, prototypes=nothing) if u.client == "client-1" else u for u in updates]

    engine.reorder = empty_handed
    federation.run_round(evaluate=False)
    assert "client-1" not in federation.pool.names


def test_only_sampled_clients_download(images: Path) -> None:
    federation, engine = watch(small(images, fraction=0.3))
    record = federation.run_round(evaluate=False)
    assert len(engine.asked[0]) == 1
    assert record.bytes["down"] == engine.broadcasts[0].num_bytes


def test_global_predictors_cover_all_clients_and_personal_ones_the_trained(images: Path) -> None:
    experiment = small(images, fraction=0.3, partition__test="matched")
    record = build_federation(experiment).run_round(evaluate=True)
    assert record.accuracy is not None
    (trained,) = record.clients.answered
    assert record.accuracy_per_client is not None
    personal = record.accuracy["local_test"]["personal_prototype"]
    assert personal == record.accuracy_per_client[trained]
    assert [name for name, v in record.accuracy_per_client.items() if v is not None] == [trained]
    federation = build_federation(experiment.replace(method="fedavg"))
    every = federation.run_round(evaluate=True)
    assert every.accuracy_per_client is not None
    own = [value for value in every.accuracy_per_client.values() if value is not None]
    assert len(own) == 3
    assert every.accuracy is not None
    assert every.accuracy["local_test"]["global_classifier"] == pytest.approx(sum(own) / 3)


def test_clients_that_were_not_sampled_keep_their_personal_models(images: Path) -> None:
    federation, engine = watch(small(images, "fedproto", fraction=0.3))
    for _ in range(4):
        federation.run_round(evaluate=False)
    ever = {name for asked in engine.asked for name in asked}
    assert len(ever) > 1
    assert {name for name, _ in engine.personal_models({})} == ever


def test_client_that_was_not_sampled_uses_the_current_shared_parameters(images: Path) -> None:
    class Personal(Method):
        """FedPer: the classifier stays on the client."""

        def shared(self, parameter: str) -> bool:
            return not parameter.startswith("classifier")

    federation = build_federation(small(images, fraction=0.3), method_class=Personal)
    for _ in range(4):
        federation.run_round(evaluate=False)
    now = federation.shared_parameters
    models = dict(federation.engine.personal_models(now))
    assert len(models) > 1
    behind = [m for m in models.values() if torch.equal(m["hidden.0.bias"], now["hidden.0.bias"])]
    assert len(behind) >= len(models) - 1


def test_personal_models_of_some_clients_are_evaluated(images: Path) -> None:
    # On a shared test set, the primary predictor would be the global model.
    matched = {"partition__test": "matched", "partition__kind": "iid"}
    experiment = small(images, clients=5, evaluate_clients=2, engine="loop", **matched)
    some = build_federation(experiment).run_round(evaluate=True)
    everyone = build_federation(experiment.replace(evaluate_clients=None)).run_round(evaluate=True)
    assert some.accuracy_per_client is not None
    assert everyone.accuracy_per_client is not None
    read = {name for name, value in some.accuracy_per_client.items() if value is not None}
    assert len(read) == 2
    for name in read:
        assert some.accuracy_per_client[name] == everyone.accuracy_per_client[name]
    assert some.accuracy is not None
    assert everyone.accuracy is not None
    values = [some.accuracy_per_client[name] or 0.0 for name in read]
    assert some.accuracy["local_test"]["personal_prototype"] == pytest.approx(sum(values) / 2)
    assert (
        some.accuracy["local_test"]["global_classifier"]
        == everyone.accuracy["local_test"]["global_classifier"]
    )


@pytest.mark.parametrize("engine", ["loop", "auto"])
def test_models_are_kept_only_for_evaluated_clients(images: Path, engine: str) -> None:
    federation = build_federation(small(images, clients=5, evaluate_clients=2, engine=engine))
    federation.run_round(evaluate=False)
    assert dict(federation.engine.personal_models({})) == {}
    federation.run_round(evaluate=True)
    assert len(dict(federation.engine.personal_models({}))) == 2
    federation.run_round(evaluate=True, keep_models=True)
    assert len(dict(federation.engine.personal_models({}))) == 5
