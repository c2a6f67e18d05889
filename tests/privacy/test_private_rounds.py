"""Rounds under a privacy budget: what is released is what the formulas say, and nothing else."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.loading import load_federated_data
from mpfedcl.gaussian import mechanism, unit_features
from mpfedcl.methods.messages import Update
from mpfedcl.privacy import private_rounds
from mpfedcl.privacy.private_rounds import ALL_CLIENTS
from mpfedcl.rounds.loop import RoundLoop
from mpfedcl.rounds.metrics import MetricTables, measure_fairness
from small_experiments import build_federation, save_images, small, tensors_of

pytestmark = pytest.mark.whole

BUDGET = {"privacy__epsilon": 5.0, "dtype": "float64"}


def federation(root: Path, method: str, **changes: Any) -> RoundLoop:
    return build_federation(small(root, method, **BUDGET | changes))


def updates_of(private: RoundLoop) -> list[Update]:
    """Return what clients would send in the next round."""
    names = sorted(private.engine.sizes)
    found = private.engine.train(private.broadcast(), names, keep=[])
    return [each for each in found if isinstance(each, Update)]


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """Noise of 0, and what it should have been."""
    asked: dict[str, list[float]] = {"model": [], "sums": []}

    def no_noise(sigma: float, shape: torch.Size) -> Tensor:
        asked["model"].append(sigma)
        return torch.zeros(shape, dtype=torch.float64)

    def no_exact_noise(values: Tensor, sigma: float) -> Tensor:
        asked["sums"].append(sigma)
        return values.double()

    monkeypatch.setattr(private_rounds, "draw_noise", no_noise)
    monkeypatch.setattr(private_rounds, "add_exact_noise", no_exact_noise)
    monkeypatch.setattr("mpfedcl.gaussian.mechanism.add_exact_noise", no_exact_noise)
    return asked


def test_model_moves_by_the_clipped_changes_over_the_expected_clients(
    images: Path, silent: dict[str, list[float]]
) -> None:
    clip = 0.01
    private = federation(images, "fedavg", privacy__clip=clip, privacy__noise=7.0)
    start = dict(private.state.server.params)
    updates = updates_of(private)
    private.run_round(evaluate=False)
    for name, begin in start.items():
        changes = [tensors_of(update)[name] - begin for update in updates]
        expected = begin + torch.stack(changes).sum(0) / 3
        assert torch.allclose(private.state.server.params[name], expected, atol=1e-12)
    lengths = [
        float(torch.cat([(tensors_of(update)[n] - b).flatten() for n, b in start.items()]).norm())
        for update in updates
    ]
    # Everybody changed more than that: the clip is what bounds the sensitivity.
    assert lengths == pytest.approx([clip] * 3)
    assert silent["model"] == pytest.approx([7.0 * clip / 3] * len(start), rel=1e-4)


def test_noise_on_the_model_has_the_stated_standard_deviation(images: Path) -> None:
    private = federation(images, "fedavg", privacy__clip=1e-6, privacy__noise=7.0)
    start = dict(private.state.server.params)
    private.run_round(evaluate=False)
    moved = torch.cat([(private.state.server.params[n] - v).flatten() for n, v in start.items()])
    assert float(moved.std()) == pytest.approx(7.0 * 1e-6 / 3, rel=0.2)


def test_clients_are_weighted_equally(images: Path, silent: dict[str, list[float]]) -> None:
    private = federation(images, "fedavg")
    sizes = set(private.engine.sizes.values())
    assert len(sizes) > 1
    updates = updates_of(private)
    private.run_round(evaluate=False)
    name = "classifier.bias"
    mean = torch.stack([tensors_of(update)[name] for update in updates]).mean(0)
    assert torch.allclose(private.state.server.params[name], mean, atol=1e-12)


def test_prototypes_are_means_of_client_sums_scaled_to_norm_1(
    images: Path, silent: dict[str, list[float]]
) -> None:
    private = federation(images, "mp-fedcl", privacy__noise=3.0)
    updates = updates_of(private)
    private.run_round(evaluate=False)
    counts, sums = torch.zeros(3).double(), torch.zeros(3, 4).double()
    for update in updates:
        own = torch.zeros(3, 5).double()
        for vector, label, count in zip(*vars(update.prototypes).values(), strict=True):
            own[label] += count * torch.cat([torch.ones(1), vector]).double()
        own /= own.norm()
        counts, sums = counts + own[:, 0], sums + own[:, 1:]
    assert silent["sums"] == [3.0]
    # With noise of that size nothing of three clients stands out.
    assert private.state.prototypes == {}
    assert private.private is not None
    noisy = {"counts": counts, "sums": sums, "sigma": torch.tensor(0.01)}
    rows = private.private._class_prototypes(noisy, torch.zeros(1).double())
    assert torch.allclose(rows.vectors, sums / counts.unsqueeze(1))
    assert rows.labels.tolist() == [0, 1, 2]


def test_each_round_releases_model_and_prototypes(
    images: Path, silent: dict[str, list[float]]
) -> None:
    private = federation(images, "mp-fedcl", rounds=4)
    for _ in range(4):
        private.run_round(evaluate=False)
    assert private.private is not None
    assert private.private.ledger is not None
    z = private.private.ledger.multiplier
    assert len(silent["sums"]) == 4
    assert private.private.ledger.releases == pytest.approx({z / 2**0.5: 4})
    assert private.private.ledger.spent == pytest.approx(5.0, rel=0.01)


def test_pool_contains_no_client_names(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        private_rounds, "add_exact_noise", lambda values, _sigma: values.double() * 1000
    )
    private = federation(images, "mp-fedcl", privacy__epsilon=100.0)
    private.run_round(evaluate=False)
    assert set(private.state.prototypes) == {ALL_CLIENTS}
    assert private.pool.names == (ALL_CLIENTS,)


@pytest.mark.parametrize("method", ["fedgauss", "fedlda", "fedncm", "fedridge"])
@pytest.mark.parametrize("model", ["central", "local"])
def test_budget_without_noise_gives_the_plain_statistics(
    vectors: Path, method: str, model: str, silent: dict[str, list[float]]
) -> None:
    changes = {"privacy__moments": True, "partition__kind": "iid"}
    private = federation(vectors, method, **changes, privacy__model=model)
    private.run_round(evaluate=False)
    statistics = private.statistics
    assert private.client_sums is None
    assert statistics["counts"].sum() == 120
    # Without random features, whose sums would need more noise.
    data = load_federated_data(small(vectors, method, dtype="float64").resolved())
    total = torch.zeros_like(statistics["sums"])
    for client in data.clients:
        total.index_add_(0, client.labels, unit_features(client.inputs))
    assert torch.allclose(statistics["sums"], total, atol=1e-9)
    assert silent["sums"][0] == private._method.private_sums.sigma  # type: ignore[attr-defined]
    assert len(silent["sums"]) == (1 if model == "central" else 3)


def test_local_noise_is_recorded_with_the_budget(vectors: Path) -> None:
    private = federation(vectors, "fedncm", privacy__model="local", privacy__epsilon=0.5)
    record = private.run_round(evaluate=False)
    assert record.processed == {"private statistics": ["client-0", "client-1", "client-2"]}
    assert record.privacy == {"unit": "record", "epsilon": 0.5, "delta": 1e-5, "spent": 0.5}


def test_client_level_budget_clips_the_sums_of_each_client(
    vectors: Path, silent: dict[str, list[float]]
) -> None:
    private = federation(vectors, "fedncm", privacy__unit="client", privacy__clip=3.0)
    for update in updates_of(private):
        parts = [update.summed[name].double().flatten() for name in ("counts", "sums")]
        assert float(torch.cat(parts).norm()) == pytest.approx(3.0, rel=1e-6)


def test_records_contain_only_noisy_results(images: Path) -> None:
    private = federation(images, "mp-fedcl", privacy__epsilon=50.0)
    record = private.run_round(evaluate=True)
    assert record.loss is None
    assert record.loss_per_client == {}
    assert record.accuracy is not None
    told = {"global_classifier", "global_classifier_estimated", "global_prototype"}
    for table in record.accuracy.values():
        assert {name for name, value in table.items() if value is not None} <= told
        assert table["global_classifier"] is not None
    assert record.privacy is not None
    assert 0 < record.privacy["spent"] < 50


def test_worker_draws_no_noise_and_keeps_no_ledger(images: Path) -> None:
    loop = federation(images, "fedavg")
    record = loop.run_round(evaluate=False)
    assert loop.private is not None
    loop.private.log = None
    assert loop.private.release(2, {}, None) == b""  # type: ignore[arg-type]
    assert loop.private.redact(record, 1).privacy == record.privacy


def test_sampled_clients_are_not_recorded(tmp_path: Path) -> None:
    save_images(tmp_path / "stripes.npz", num_train=160, num_test=40)
    private = federation(tmp_path, "fedavg", clients=20, fraction=0.5, rounds=6, privacy__noise=2.0)
    numbers = []
    for _ in range(6):
        assert private.private is not None
        names = sorted(private.engine.sizes)
        told = private.private.choose(private.state.round + 1, names).decode().split("\n")
        numbers.append(len(told))
        record = private.run_round(evaluate=False)
        assert record.clients.answered == record.clients.missing == []
    # Poisson sampling draws another number each time; the experiment's seed has no say in it.
    assert len(set(numbers)) > 1
    assert private.private is not None
    assert private.private.ledger is not None
    assert private.private.ledger.sampling == 0.5
    assert 0.5 < private.private.ledger.spent < 5


def test_rows_of_many_clients_are_not_recorded(images: Path) -> None:
    private = federation(images, "fedavg", fraction=0.5, privacy__noise=2.0)
    record = private.run_round(evaluate=True)
    assert private.private is not None
    rows = {"accuracy_per_client": {"client-1": 50.0}, "accuracy_spread": measure_fairness([50.0])}
    metrics = MetricTables(local_test={}, global_test={}, per_client={"client-1": {}})
    for measured in (None, metrics):
        many = record.model_copy(update={**rows, "metrics": measured})
        redacted = private.private.redact(many, 1)
        assert redacted.accuracy_per_client == {}
        assert redacted.metrics is None or redacted.metrics.per_client == {}
        assert (redacted.metrics is None) == (measured is None)


def test_round_without_clients_still_releases_noise(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = federation(images, "fedavg", fraction=0.5, privacy__noise=2.0)
    assert private.private is not None
    monkeypatch.setattr(private.private, "choose", lambda *_: b"")
    start = private.state.server.params["classifier.bias"].clone()
    record = private.run_round(evaluate=False)
    assert record.unchanged is False
    assert not torch.equal(private.state.server.params["classifier.bias"], start)


@pytest.mark.parametrize(
    ("method", "changes", "words"),
    [
        (
            "fedcof",
            {},
            "with method fedcof it must be left out: it needs the class means of single clients",
        ),
        ("local", {}, "its clients share no model"),
        ("fedproto", {}, "its clients share no model"),
        ("local-gauss", {}, "its clients share no model"),
        ("mp-fedcl", {"share_model": False}, "its clients share no model"),
        ("fedavg", {"privacy__unit": "record"}, "privacy.unit is 'record'"),
        ("fedavg", {"privacy__model": "local"}, "privacy.model is 'local'"),
        ("fedavg", {"aggregation__rule": "median"}, "aggregation.rule is 'median'"),
        ("fedavg", {"update__clip": 1.0}, "update.clip is 1"),
        ("fedavg", {"fraction": 0.5, "min_clients": 2}, "min_clients is 2"),
        ("fedncm", {"prototypes__min_cluster_size": 3}, "prototypes.min_cluster_size is 3"),
    ],
)
def test_settings_without_a_privacy_guarantee_are_rejected(
    images: Path, method: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        federation(images, method, **changes)


def test_method_whose_server_does_more_than_average_is_rejected(
    images: Path, example_methods: None
) -> None:
    with pytest.raises(InvalidInput, match="its server does not only average"):
        federation(images, "custom_method:Scaffold")


def test_noise_does_not_depend_on_the_seed(images: Path) -> None:
    models = []
    for _ in range(2):
        private = federation(images, "fedavg", seed=3)
        private.run_round(evaluate=False)
        models.append(private.state.server.params["classifier.bias"])
    assert not torch.equal(*models)
    assert mechanism.draw_noise(1.0, [2]).dtype == torch.float64


def test_process_without_a_log_draws_nothing(images: Path) -> None:
    private = federation(images, "fedavg", fraction=0.5, privacy__noise=2.0).private
    assert private is not None
    private.log = None
    assert private.choose(1, ["a"]) == b""
    assert private.ledger is None
    private.begin()


def test_prototypes_without_clients_are_only_noise(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = federation(images, "mp-fedcl", fraction=0.5, privacy__noise=2.0)
    assert private.private is not None
    monkeypatch.setattr(private.private, "choose", lambda *_: b"")
    record = private.run_round(evaluate=False)
    assert record.unchanged is False
    assert "training" not in record.remarks


def test_unnormalized_embeddings_give_unnormalized_prototypes(images: Path) -> None:
    private = federation(images, "mp-fedcl", prototypes__normalize=False).private
    assert private is not None
    noisy = {"counts": torch.ones(3), "sums": torch.full((3, 4), 9.0), "sigma": torch.tensor(0.1)}
    rows = private._class_prototypes(noisy, torch.zeros(1))
    assert rows.vectors.norm(dim=1).tolist() == [18.0] * 3
