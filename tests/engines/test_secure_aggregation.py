"""Secure aggregation in a simulation: same result as a plain run, also with dropouts."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from equivalent_runs import assert_close_tensors
from mpfedcl import resume
from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.loading import load_federated_data
from mpfedcl.engines import InProcessEngine
from mpfedcl.experiment import Experiment
from mpfedcl.methods import built_in_methods, find_method
from mpfedcl.methods.messages import Update
from mpfedcl.models import Cnn, Mlp, Model
from mpfedcl.rounds.assembly import assemble
from mpfedcl.rounds.loop import RoundLoop
from mpfedcl.rounds.secure_aggregation import MaskingCollector
from mpfedcl.runs.observer import NO_CALLBACKS, Observer
from mpfedcl.runs.simulation import run_simulation
from small_experiments import HIDDEN, assert_same_results, read_records, small, tensors_of

pytestmark = pytest.mark.whole

ABLE = [name for name, method in built_in_methods().items() if method.totals_suffice]
FIXED_POINT = 1e-7
"""The mean of 60 samples is exact to 5 clients · 2^-25 / 60."""


def experiment(root: Path, method: str, **changes: Any) -> Experiment:
    settings = {
        "rounds": 3,
        "clients": 5,
        "dtype": "float64",
        "train__lr": 0.1,
        "partition__alpha": 0.5,
        "model__hidden": HIDDEN,
        "encoder__name": "none",
    }
    if method == "fedbn":
        settings |= {"model__name": "cnn", "model__norm": "group"}
    return small(root, method, **settings | changes)


def loop(plan: Experiment) -> RoundLoop:
    plan = plan.resolved(find_method(plan.method).defaults)
    data = load_federated_data(plan)
    model: Model = Mlp((data.input_size, *HIDDEN), data.num_classes)
    if plan.model.name == "cnn":
        model = Cnn((6, 6), data.num_classes, HIDDEN[-1:], has_norm=True)
    assembly = assemble(
        plan,
        model,
        num_classes=data.num_classes,
        input_size=data.input_size,
    )
    return RoundLoop(assembly, InProcessEngine(assembly, data))


def test_methods_that_support_secure_aggregation() -> None:
    some = {"fedavg", "fedgauss", "fedlda", "fedncm", "fedprox", "fedridge", "local", "local-gauss"}
    assert some <= {*ABLE}
    # These methods need updates of single clients, which a total does not have.
    assert not {"fedproto", "mp-fedcl", "fedcof"} & {*ABLE}


@pytest.mark.parametrize(
    ("method", "engine"), [("fedavg", "loop"), *((method, "stacked") for method in ABLE)]
)
def test_secure_aggregation_equals_the_plain_run(images: Path, method: str, engine: str) -> None:
    plain = loop(experiment(images, method, engine=engine))
    secure = loop(experiment(images, method, engine=engine, secure_aggregation=True))
    if find_method(method).trains:
        assert secure.run_round(evaluate=False).loss == pytest.approx(
            plain.run_round(evaluate=False).loss, rel=1e-7
        )
    left, right = secure.run_round(evaluate=True), plain.run_round(evaluate=True)
    assert left.clients == right.clients
    assert left.loss_per_client == {}
    assert left.accuracy is not None
    assert right.accuracy is not None
    predictors = left.accuracy["local_test"], right.accuracy["local_test"]
    # One Gaussian per class if single clients are not known.
    alike = [name for name in predictors[1] if method != "fedgauss" or "personal" in name]
    assert {n: predictors[0][n] for n in alike} == {n: predictors[1][n] for n in alike}
    if method != "fedgauss":
        assert_close_tensors(secure.state.server.params, plain.state.server.params, 1e-5)
    assert_close_tensors(secure.state.server.extra, plain.state.server.extra, 1e-5)


def test_kept_statistics_are_those_of_a_plain_run_that_pools(images: Path) -> None:
    plain = loop(experiment(images, "fedgauss", statistics__keep="pooled"))
    secure = loop(experiment(images, "fedgauss", secure_aggregation=True))
    plain.run_round(evaluate=False)
    secure.run_round(evaluate=False)
    assert secure.client_sums is None
    assert_close_tensors(secure.statistics, plain.statistics, 1e-5)


STAGES = ("advertise", "share", "mask", "confirm", "reveal")


def drops_out(monkeypatch: pytest.MonkeyPatch, vanishes: Callable[[int, str, str], bool]) -> None:
    """Let clients drop out if `vanishes` returns true for the round, the stage and the client."""

    def decide(collector: MaskingCollector, stage: str, client: str) -> bool:
        return vanishes(collector._broadcast.round, stage, client)

    monkeypatch.setattr(MaskingCollector, "drops_out", decide)


@pytest.mark.parametrize("stage", STAGES)
def test_dropouts_are_left_out_of_the_total(
    images: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a client that fails only to confirm or to reveal is still in the total."""
    gone = {"client-1", "client-3"}
    plan = experiment(images, "fedavg", secure_aggregation=True, clients=7)
    drops_out(monkeypatch, lambda _, at, name: at == stage and name in gone)
    secure = loop(plan)
    record = secure.run_round(evaluate=False)
    missing = sorted(gone) if stage not in ("confirm", "reveal") else []
    assert record.clients.missing == missing
    plain = loop(plan.replace(secure_aggregation=False))
    others = [name for name in plain.engine.sizes if name not in missing]
    trained = plain.engine.train(plain.broadcast(), others, keep=[])
    updates = [each.written_out() for each in trained if isinstance(each, Update)]
    total = sum(plain.engine.sizes[name] for name in others)
    for name, value in secure.state.server.params.items():
        parts = [tensors_of(each)[name] * (each.num_samples / total) for each in updates]
        torch.testing.assert_close(value, torch.stack(parts).sum(0), rtol=0, atol=1e-8)


@pytest.mark.parametrize("stage", STAGES)
def test_round_below_the_threshold_is_lost_and_the_run_continues(
    images: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = {"client-1", "client-3", "client-4"}
    plan = experiment(images, "fedavg", secure_aggregation=True)
    drops_out(monkeypatch, lambda number, at, name: (number, at) == (1, stage) and name in gone)
    secure = loop(plan)
    before = {name: value.clone() for name, value in secure.state.server.params.items()}
    lost = secure.run_round(evaluate=False)
    assert lost.unchanged
    (warning,) = lost.remarks["warnings"]
    assert "Round 1: the secure sum was not opened because" in warning
    assert_close_tensors(secure.state.server.params, before, 0)
    again = secure.run_round(evaluate=False)
    assert not again.unchanged
    assert "warnings" not in again.remarks


def test_diverged_model_is_rejected_and_others_are_summed(images: Path) -> None:
    """Check that a value that is not finite is rejected on its client, by name."""
    secure = loop(experiment(images, "fedavg", secure_aggregation=True))
    data = secure.engine._data  # type: ignore[attr-defined]
    data.client("client-2").inputs[:] = float("nan")
    record = secure.run_round(evaluate=False)
    assert "averaged/classifier.bias" in record.clients.rejected["client-2"]
    assert (
        "contains nan; with secure aggregation of 5 clients it must be finite"
        in (record.clients.rejected["client-2"])
    )
    assert record.clients.answered == ["client-0", "client-1", "client-3", "client-4"]
    assert all(bool(v.isfinite().all()) for v in secure.state.server.params.values())


def test_secure_aggregation_with_sampled_clients(images: Path) -> None:
    plan = experiment(images, "fedavg", fraction=0.6)
    plain, secure = loop(plan), loop(plan.replace(secure_aggregation=True))
    for _ in range(2):
        left, right = secure.run_round(evaluate=False), plain.run_round(evaluate=False)
        assert left.clients.answered == right.clients.answered
    assert_close_tensors(secure.state.server.params, plain.state.server.params, FIXED_POINT)


def run(plan: Experiment, path: Path, warnings: Collection[str] | None = None) -> Path:
    observer = Observer(
        on_warning=warnings.append if isinstance(warnings, list) else lambda _: None
    )
    return run_simulation(plan, path, observer, NO_CALLBACKS).path


def test_secure_runs_are_bit_identical_and_name_unavailable_checks(
    images: Path, tmp_path: Path
) -> None:
    """Check that neither random masks nor a stop change the result."""
    plan, warnings = experiment(images, "fedavg", secure_aggregation=True), []  # type: ignore[var-annotated]
    first, second = run(plan, tmp_path / "a", warnings), run(plan, tmp_path / "b")
    assert len(warnings) == 1
    assert warnings[0].startswith("Secure aggregation: the server sees only totals over clients")
    assert_same_results(first, second)
    shorter = run(plan.replace(rounds=2), tmp_path / "c")
    resume(shorter, rounds=3)
    assert_same_results(first, shorter)
    assert read_records(first)[-1]["bytes"]["up"] > read_records(first)[-1]["bytes"]["down"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"method": "mp-fedcl"},
            "method is 'mp-fedcl'; with secure_aggregation it must be one of ",
        ),
        ({"method": "fedcof"}, "method is 'fedcof'; with secure_aggregation it must be one of"),
        (
            {"aggregation__rule": "median"},
            "aggregation.rule is 'median'; with secure_aggregation it must",
        ),
        ({"workers": 2}, "workers is 2; with secure_aggregation it must be 1"),
        ({"statistics__keep": "clients"}, "statistics.keep is 'clients'; with secure_aggregation"),
        (
            {"secure__threshold": 0.5},
            r"secure\.threshold is 0\.5; with secure_aggregation it must be",
        ),
        (
            {"secure__honest_clients": 5, "privacy__epsilon": 3.0},
            r"secure\.honest_clients is 5; it must be at most 4",
        ),
        ({"clients": 2}, "2 clients take part in a round .*it must be at least 3"),
        ({"fraction": 0.4}, "2 clients take part in a round"),
    ],
)
def test_settings_that_exclude_secure_aggregation_are_rejected(
    images: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    plan = experiment(images, "fedavg", secure_aggregation=True)
    with pytest.raises(InvalidInput, match=words):
        run(plan.replace(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("share", [0.4, 1.0, float("nan")])
def test_threshold_out_of_range_is_rejected(share: float) -> None:
    with pytest.raises(InvalidInput, match=r"secure\.threshold is"):
        Experiment(secure={"threshold": share})
