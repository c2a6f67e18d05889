"""Adaptive Federated Dropout: scores, parts that are kept, and draws."""

from pathlib import Path
from typing import Any

import pytest
import torch
from identities import both_engines, differ, server_of
from server_side_runs import federate
from tiny_method_inputs import make_method

from mpfedcl import resume, run
from mpfedcl.core.tensors import Tensors
from mpfedcl.methods import Server, Tally
from mpfedcl.methods._partial_model import draw_weighted
from mpfedcl.methods.afd import Afd
from mpfedcl.models import Mlp
from small_experiments import HIDDEN, assert_same_run, assert_same_tensors, build_federation, small

MODEL = Mlp((5, 6, 4), 3).init(torch.Generator(), torch.float64)


class Told:
    """A server that is told what losses its clients' parts came to."""

    def __init__(self, **changes: Any) -> None:
        settings = {"afd__share": 0.5, "afd__scores": "client", **changes}
        self.method = make_method("afd", **settings)
        self.server: Server = self.method.init_server(MODEL)
        self.round = 0

    def hear(self, *losses: float) -> list[Tensors]:
        """Run a round of clients 0, 1, ... with these losses; return their parts."""
        self.round += 1
        names = [f"client-{number}" for number in range(len(losses))]
        units = {name: self.method.masks(self.server, name, self.round) for name in names}
        weights = [1.0] * len(losses)
        tally = Tally(names, [1] * len(losses), weights, losses, 1.0, {}, {}, units)
        self.server = self.method.reduce(self.server, dict(self.server.params), tally)
        return list(units.values())

    def scores(self, who: str, layer: str = "hidden.0") -> Tensors:
        return {"scores": self.server.private[f"{who}/scores/{layer}"]}


@both_engines
def test_training_all_units_equals_fedavg(images: Path, engine: str) -> None:
    found = federate(images, "afd", afd__share=1, engine=engine)
    assert_same_tensors(server_of(found), server_of(federate(images, engine=engine)))


@both_engines
def test_rounds_without_scores_equal_fed_dropout(images: Path, engine: str) -> None:
    """In the first two rounds nothing is known yet that a part could have lowered."""
    for rounds in (1, 2):
        found = federate(images, "afd", rounds, engine=engine, afd__scores="client")
        wanted = federate(images, "fed-dropout", rounds, engine=engine)
        assert_same_tensors(server_of(found), server_of(wanted))


def test_defaults_differ_from_fedavg_and_fed_dropout(images: Path) -> None:
    found = server_of(federate(images, "afd", 4))
    for other in ("fedavg", "fed-dropout"):
        assert differ(found, server_of(federate(images, other, 4)))


def test_all_clients_train_the_same_part_by_default(images: Path) -> None:
    federation = build_federation(small(images, "afd"))
    for number in (1, 2, 3):
        names, server = list(federation.engine.sizes), federation.state.server
        assert isinstance(federation._method, Afd)
        first, *others = [federation._method.masks(server, name, number) for name in names]
        assert others
        for each in others:
            assert_same_tensors(each, first)
        federation.run_round(evaluate=False)


def test_no_unit_is_scored_if_the_loss_never_falls() -> None:
    told = Told()
    for loss in (1.0, 1.0, 2.0, 2.5):
        told.hear(loss)
    assert not told.scores("client-0")["scores"].any()
    assert [name for name in told.server.private if "/part/" in name] == []


def test_scores_match_hand_computed_values() -> None:
    told = Told()
    told.hear(2.0, 1.0)
    # Client 0 does better by a quarter, client 1 worse: losses of two clients do not compare.
    (good, bad) = told.hear(1.5, 1.2)
    wanted = 0.25 * good["hidden.0"].double()
    torch.testing.assert_close(told.scores("client-0")["scores"], wanted)
    assert not told.scores("client-1")["scores"].any()
    # The part that lowered the loss comes again; the other is drawn anew.
    (again, other) = told.hear(0.75, 1.2)
    assert_same_tensors(again, good)
    assert differ(other, bad)
    torch.testing.assert_close(told.scores("client-0")["scores"], 3 * wanted)
    # Until it fails.
    (still, _) = told.hear(0.8, 1.2)
    assert_same_tensors(still, good)
    assert "client-0/part/hidden.0" not in told.server.private
    torch.testing.assert_close(told.scores("client-0")["scores"], 3 * wanted)
    # Nor does that change the part: as many units as it has are all that have a score.
    assert_same_tensors(told.hear(0.9, 1.2)[0], good)


def test_scores_of_unsampled_clients_are_kept() -> None:
    told = Told()
    told.hear(2.0, 2.0)
    told.hear(1.0, 1.0)
    before = {n: v for n, v in told.server.private.items() if n.startswith("client-1/")}
    told.hear(3.0)
    after = {n: v for n, v in told.server.private.items() if n.startswith("client-1/")}
    assert_same_tensors(before, after)


def test_common_scores_give_all_clients_the_same_part() -> None:
    told = Told(afd__scores="common")
    (one, other) = told.hear(2.0, 4.0)
    assert_same_tensors(one, other)
    # The mean falls from 3 to 2.
    (kept, _) = told.hear(3.0, 1.0)
    wanted = kept["hidden.1"].double() / 3
    torch.testing.assert_close(told.scores("all clients", "hidden.1")["scores"], wanted)
    assert_same_tensors(told.hear(1.0, 1.0)[1], kept)


def test_units_are_drawn_in_proportion_to_their_scores() -> None:
    scores = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    for seed in range(50):
        key = torch.Generator().manual_seed(seed)
        assert draw_weighted(scores, 1, key).tolist() == [True, False, False]
    # Three times the score, three times as often.
    scores, key = torch.tensor([3.0, 1.0], dtype=torch.float64), torch.Generator().manual_seed(0)
    found = sum(bool(draw_weighted(scores, 1, key)[0]) for _ in range(2000))
    assert abs(found - 1500) < 80


@pytest.mark.whole
def test_scores_are_never_sent_and_survive_an_interruption(images: Path, tmp_path: Path) -> None:
    experiment = small(images, "afd", rounds=4, fraction=0.7, model__hidden=HIDDEN)
    run(experiment, tmp_path / "whole")
    result = run(experiment.replace(rounds=3), tmp_path / "stopped")
    resume(tmp_path / "stopped", rounds=4)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")
    record = result.history[0]
    # Two clients, a bit for each of 24 and of 12 units.
    assert record["bytes"]["down"] - record["bytes"]["up"] == 2 * (3 + 2)


@both_engines
def test_federation_keeps_parts_that_lower_the_loss(images: Path, engine: str) -> None:
    experiment = small(images, "afd", dtype="float64", engine=engine, afd__scores="client")
    federation = build_federation(experiment)
    losses: dict[str, float] = {}
    for number in range(1, 5):
        assert isinstance(federation._method, Afd)
        parts = {
            name: federation._method.masks(federation.state.server, name, number)
            for name in federation.engine.sizes
        }
        record = federation.run_round(evaluate=False)
        for name, loss in (record.loss_per_client or {}).items():
            assert loss is not None
            kept = federation.state.server.private.get(f"{name}/part/hidden.0")
            assert (kept is not None) == (name in losses and loss < losses[name])
            if kept is not None:
                assert torch.equal(kept, parts[name]["hidden.0"])
            losses[name] = loss
