"""CMFL: which clients upload, and how their updates are averaged."""

from pathlib import Path

import pytest
import torch
from identities import both_engines, differ, server_of
from server_side_runs import Changes, PlainFedAvg, federate

from mpfedcl import Experiment, resume, run
from mpfedcl.methods import Server, Tally
from mpfedcl.methods.cmfl import Cmfl, agreement
from small_experiments import (
    HIDDEN,
    assert_same_run,
    assert_same_tensors,
    build_federation,
    read_records,
    small,
)


@both_engines
def test_threshold_zero_is_fedavg(images: Path, engine: str) -> None:
    found = federate(images, "cmfl", cmfl__threshold=0, engine=engine)
    wanted = federate(images, engine=engine, method_class=PlainFedAvg)
    assert_same_tensors(server_of(found), server_of(wanted))


@both_engines
def test_no_client_uploads_above_the_largest_relevance(images: Path, engine: str) -> None:
    settings: Changes = {
        "cmfl__threshold": 1.5,
        "cmfl__schedule": "constant",
        "dtype": "float64",
    }
    federation = build_federation(small(images, "cmfl", engine=engine, **settings))
    assert federation.run_round(evaluate=False).withheld == []
    begun, last = server_of(federation), federation.state.server.extra
    for _ in range(2):
        record = federation.run_round(evaluate=False)
        assert record.withheld == record.clients.answered == ["client-0", "client-1", "client-2"]
        assert (record.bytes["up"], record.sent["parameters"]) == (0, 0)
        assert_same_tensors(server_of(federation), begun)
        # The next round is compared with the last round that changed the model.
        assert_same_tensors(federation.state.server.extra, last)


@both_engines
def test_only_relevant_updates_are_averaged(images: Path, engine: str) -> None:
    settings: Changes = {"clients": 6, "cmfl__threshold": 0.65, "cmfl__schedule": "constant"}
    settings |= {"partition__alpha": 0.1, "dtype": "float64"}
    federation = build_federation(small(images, "cmfl", engine=engine, **settings))
    federation.run_round(evaluate=False)
    begun, last = server_of(federation), federation.state.server.extra
    record = federation.run_round(evaluate=False, keep_models=True)
    models = dict(federation.engine.personal_models({}))
    size = sum(value.numel() for value in begun.values())
    agreeing = []
    for client, model in models.items():
        same = 0
        for name, value in model.items():
            ours, theirs = (value - begun[name]).flatten().tolist(), last[name].flatten().tolist()
            for a, b in zip(ours, theirs, strict=True):
                same += (a > 0) - (a < 0) == (b > 0) - (b < 0)
        if same / size >= 0.65:
            agreeing.append(client)
    assert 0 < len(agreeing) < 6
    assert record.withheld == sorted(models.keys() - {*agreeing})
    sizes = federation.engine.sizes
    total = sum(sizes[client] for client in agreeing)
    for name, value in server_of(federation).items():
        wanted = torch.stack([sizes[n] / total * models[n][name] for n in agreeing]).sum(0)
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)
    # Only uploads count.
    assert record.bytes["up"] == 8 * size * len(agreeing)
    assert record.bytes["down"] == 6 * (2 * 8 * size)
    zeros = sum(int((value == 0).sum()) for value in last.values())
    assert record.remarks["cmfl"] == {"threshold": 0.65, "zeros": zeros / size}


def test_threshold_falls_with_the_rounds(images: Path) -> None:
    federation = build_federation(small(images, "cmfl", rounds=4))
    told = [federation.run_round(evaluate=False).remarks["cmfl"] for _ in range(4)]
    assert [each["threshold"] for each in told] == pytest.approx(
        [0.8, 0.8 / 2**0.5, 0.8 / 3**0.5, 0.4]
    )
    assert told[0]["zeros"] is None


def test_agreement_counts_equal_signs() -> None:
    last = {"a": torch.tensor([1.0, -2.0, 3.0]), "b": torch.tensor([[-4.0]])}
    assert agreement(last, last) == 1
    assert agreement({name: -value for name, value in last.items()}, last) == 0
    assert agreement({"a": torch.tensor([5.0, 1.0, 0.0]), "b": last["b"]}, last) == 0.5
    still = {"a": torch.tensor([0.0, -2.0, 3.0]), "b": last["b"]}
    # Over all numbers at once, and two zeros agree.
    assert agreement(still, still) == 1
    assert agreement(last, still) == 0.75


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_parameters_that_no_client_changes_have_no_sign(num_workers: int) -> None:
    # The mean of equal values differs from them in the last bit for most of these.
    params = {"w": torch.randn(5000, generator=torch.Generator().manual_seed(0))}
    sizes = [397.0, 411, 389, 402, 401, 399, 400]
    method = Cmfl(Experiment(method="cmfl").resolved(), 10)
    parts = []
    for worker in range(num_workers):
        folded = torch.zeros_like(params["w"])
        for size in sizes[worker::num_workers]:
            folded.add_(params["w"], alpha=size)
        parts.append(folded)
    mean = torch.stack(parts).sum(0) / sum(sizes)
    assert (mean != params["w"]).any()
    mean[0] += 1e-4
    names = [f"client-{number}" for number in range(7)]
    tally = Tally(names, [], [], [], 1.0, {}, {})
    change = method.reduce(Server(params), {"w": mean}, tally).extra["w"]
    assert change.nonzero().squeeze(1).tolist() == [0]


def test_defaults_differ_from_fedavg(images: Path) -> None:
    settings: Changes = {"clients": 6, "partition__alpha": 0.1}
    found, wanted = (federate(images, name, 2, **settings) for name in ("cmfl", "fedavg"))
    assert differ(server_of(found), server_of(wanted))


@pytest.mark.whole
def test_last_global_update_survives_an_interruption(images: Path, tmp_path: Path) -> None:
    settings: Changes = {"clients": 6, "partition__alpha": 0.1, "model__hidden": HIDDEN}
    experiment = small(images, "cmfl", rounds=3, **settings)
    run(experiment, tmp_path / "whole")
    run(experiment.replace(rounds=2), tmp_path / "stopped")
    resume(tmp_path / "stopped", rounds=3)
    left, right = (read_records(tmp_path / name)[-1] for name in ("whole", "stopped"))
    assert left["withheld"] == right["withheld"] != []
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")
