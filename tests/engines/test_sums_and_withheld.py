"""Sums, withheld updates, weights and private state of methods, on every engine."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mpfedcl import resume, run
from mpfedcl.core.tensors import Tensors
from mpfedcl.data.loading import load_federated_data
from mpfedcl.experiment import Experiment
from mpfedcl.runs.checkpoint import load_checkpoint
from small_experiments import read_records, read_summary, small
from worker_processes import run_together

pytestmark = pytest.mark.usefixtures("example_methods")

SUMS = "statistics_method:ClassSums"
WITHHOLDS = "statistics_method:Withholds"


@pytest.fixture(autouse=True)
def _methods_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)


def server_of(path: Path) -> tuple[Tensors, Tensors, Tensors]:
    checkpoint, problems = load_checkpoint(path / "checkpoint")
    assert checkpoint is not None
    assert problems == []
    server = checkpoint.state.server
    return server.params, server.extra, server.private


def sums_of(experiment: Experiment) -> Tensors:
    """Return the sums over all clients' samples at once."""
    data = load_federated_data(experiment.resolved())
    inputs = torch.cat([client.inputs for client in data.clients]).double()
    labels = torch.cat([client.labels for client in data.clients])
    chosen = torch.nn.functional.one_hot(labels, data.num_classes).double()
    return {"counts": chosen.sum(0), "sums": chosen.T @ inputs}


TWO_PROCESSES = pytest.param("two processes", marks=pytest.mark.whole)


@pytest.mark.parametrize("engine", ["loop", "stacked", "auto", TWO_PROCESSES])
def test_sums_over_clients_equal_the_centralized_ones(
    images: Path, tmp_path: Path, engine: str
) -> None:
    experiment = small(images, SUMS, dtype="float64", rounds=2)
    if engine == "two processes":
        (tmp_path / "settings.toml").write_text(experiment.to_toml())
        (tmp_path / "statistics_method.py").write_text(
            (Path(__file__).parent / "statistics_method.py").read_text()
        )
        run_together(["run", "settings.toml", "--out", "run"], tmp_path, 2)
    else:
        run(experiment.replace(engine=engine), tmp_path / "run")
    _, extra, private = server_of(tmp_path / "run")
    for name, wanted in sums_of(experiment).items():
        torch.testing.assert_close(extra[name], wanted, rtol=1e-12, atol=1e-12)
    assert extra["clients"].tolist() == [3.0, 1.0]
    assert private["rounds"].tolist() == [2.0]
    record = read_records(tmp_path / "run")[-1]
    assert record["loss"] is None
    assert record["loss_per_client"] == dict.fromkeys(["client-0", "client-1", "client-2"])
    assert record["sent"] == {"parameters": 3 + 3 * 36, "prototype_floats": 0}
    assert record["bytes"]["up"] == 3 * 8 * (3 + 3 * 36)
    # Private state is not sent: the broadcast has only the sums and the number of clients. The
    # result of the last round is sent too.
    assert record["bytes"]["down"] == 2 * 3 * (8 * (3 + 3 * 36) + 2 * 4)
    assert read_records(tmp_path / "run")[0]["bytes"]["down"] == 0
    assert read_summary(tmp_path / "run")["accuracy"] is None


def test_model_made_of_sums_is_shared_and_evaluated(images: Path, tmp_path: Path) -> None:
    run(small(images, "statistics_method:Closed", rounds=1), tmp_path / "run")
    (record,) = read_records(tmp_path / "run")
    assert record["clients"]["rejected"] == {}
    assert record["accuracy"]["local_test"]["global_classifier"] is not None
    assert record["accuracy"]["local_test"]["personal_classifier"] is None
    assert server_of(tmp_path / "run")[0]["classifier.bias"].tolist() == [20.0, 20.0, 20.0]


def test_private_state_is_resumed(images: Path, tmp_path: Path) -> None:
    run(small(images, SUMS, rounds=1), tmp_path / "run")
    resume(tmp_path / "run", rounds=3)
    assert server_of(tmp_path / "run")[2]["rounds"].tolist() == [3.0]


@pytest.mark.whole
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_client_that_withholds_is_answered_but_not_averaged(
    images: Path, tmp_path: Path, engine: str
) -> None:
    settings = {"partition__kind": "quantity", "partition__alpha": 1.0, "dtype": "float64"}
    experiment = small(images, WITHHOLDS, clients=6, rounds=1, engine=engine, **settings)
    run(experiment, tmp_path / "run")
    (record,) = read_records(tmp_path / "run")
    sizes = {c.name: len(c.labels) for c in load_federated_data(experiment.resolved()).clients}
    withheld = [name for name, size in sizes.items() if size <= 8]
    assert 0 < len(withheld) < 6
    assert record["withheld"] == withheld
    assert record["clients"]["answered"] == list(sizes)
    assert record["clients"]["rejected"] == {}
    # Clients that do not withhold count by the square of their samples.
    params, _, _ = server_of(tmp_path / "run")
    total = sum(size**2 for name, size in sizes.items() if name not in withheld)
    for name, value in params.items():
        models = {
            client: load_file(tmp_path / "run/models" / f"{client}.safetensors")[name]
            for client in sizes
            if client not in withheld
        }
        wanted = sum(sizes[client] ** 2 / total * each for client, each in models.items())
        torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-12)


def test_model_stays_if_all_clients_withhold(images: Path, tmp_path: Path) -> None:
    run(small(images, WITHHOLDS, rounds=2, train__batch_size=1000), tmp_path / "run")
    params, _, _ = server_of(tmp_path / "run")
    run(small(images, WITHHOLDS, rounds=1, train__batch_size=1000), tmp_path / "once")
    for name, value in server_of(tmp_path / "once")[0].items():
        assert torch.equal(params[name], value)
    assert [record["bytes"]["up"] for record in read_records(tmp_path / "run")] == [0, 0]
