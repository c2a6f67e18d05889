"""The server's executor: a run configuration in, a run directory and a status out."""

from pathlib import Path
from typing import Any

import pytest
from federations import LoopbackFederation, float64_experiment, folder_experiment, stop_after
from flwr.app import Error
from flwr.app import Message as FlowerMessage

from mpfedcl.api import CALLBACKS
from mpfedcl.core.errors import InvalidInput, RunCutShort
from mpfedcl.network.audit import AUDIT_FILE, AuditLog
from mpfedcl.network.flower.server import run_experiment
from mpfedcl.network.flower.transport import FlowerTransport
from mpfedcl.network.server.operations import AuditedTransport, RunRecorder
from mpfedcl.network.server.status import read_status, stop_file
from small_experiments import assert_same_results, read_records

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("quick_network")]


def call(federation: LoopbackFederation, **config: Any) -> None:
    """Execute a run; its configuration has only strings, numbers and booleans."""
    values: dict[str, bool | float | int | str] = {n: str(value) for n, value in config.items()}
    log = AuditLog(federation.folder / AUDIT_FILE)
    transport = AuditedTransport(FlowerTransport(federation.grid), log)
    recorder = RunRecorder(log, federation.folder / "totals.json")
    run_experiment(transport, values, CALLBACKS, recorder)


def test_finished_run_continues_with_more_rounds(images: Path, tmp_path: Path) -> None:
    federation = LoopbackFederation(float64_experiment(images, "fedproto", rounds=1), tmp_path)
    status, out = tmp_path / "status.json", federation.path
    call(federation, experiment=federation.experiment.to_toml(), out=out, status=status)
    assert read_status(status)["what"] == "done"
    assert read_status(status)["path"] == str(out)
    call(federation, resume=out, rounds=2, status=status)
    assert read_status(status)["what"] == "done"
    whole = LoopbackFederation(float64_experiment(images, "fedproto", rounds=2), tmp_path / "whole")
    whole.serve()
    assert_same_results(out, whole.path)


def test_stop_file_stops_a_resumed_run(images: Path, tmp_path: Path) -> None:
    status = tmp_path / "status.json"
    federation = LoopbackFederation(float64_experiment(images, "fedavg"), tmp_path)
    federation.serve(stop_after(1))
    stop_file(status).touch()
    call(federation, resume=federation.path, status=status)
    assert read_status(status)["what"] == "stopped"
    assert len(read_records(federation.path)) == 0


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"experiment": "round = 3"}, "round is not a setting"),
        ({"experiment": "rounds = 'many'"}, "rounds is 'many'; it must be"),
        ({"experiment": "method = 'fedx'"}, "method is 'fedx'; it must be one of"),
        ({"experiment": "rounds = "}, "experiment is not valid TOML"),
        ({"resume": "/missing"}, "resume is '/missing'; it must be a folder that holds a run"),
    ],
)
def test_status_contains_the_error(
    images: Path, tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    status = tmp_path / "status.json"
    with pytest.raises(InvalidInput, match=reason):
        call(LoopbackFederation(float64_experiment(images), tmp_path), **config, status=status)
    assert read_status(status)["what"] == "failed"
    assert reason in read_status(status)["error"]


def test_status_contains_the_reason_of_a_cut_short_run(images: Path, tmp_path: Path) -> None:
    def fail(_client: str, request: FlowerMessage, _reply: FlowerMessage) -> FlowerMessage:
        return FlowerMessage(Error(400, "it has no images"), reply_to=request)

    status = tmp_path / "status.json"
    experiment = float64_experiment(images, network__patience=0.05)
    federation = LoopbackFederation(experiment, tmp_path, fail)
    with pytest.raises(RunCutShort):
        call(federation, experiment=experiment.to_toml(), out=federation.path, status=status)
    assert "client-0: it has no images." in read_status(status)["error"]


def test_client_joins_a_finished_run(tmp_path: Path, clients: Path) -> None:
    experiment = folder_experiment("fedgauss", clients=2)
    federation = LoopbackFederation(experiment, tmp_path, count=0)
    status = tmp_path / "status.json"
    federation.bring(1, "a", clients / "a.npz")
    federation.bring(2, "b", clients / "b.npz")
    federation.serve()
    federation.grid.nodes.clear()
    federation.bring(3, "c", clients / "c.npz")
    call(federation, update=federation.path, client="c", status=status)
    found = read_status(status)
    assert (found["what"], found["change"]["event"]) == ("done", "joined")
    assert found["change"]["clients"] == ["a", "b", "c"]
    with pytest.raises(InvalidInput, match=r"the name is '\.\./x'; it must be"):
        call(federation, update=federation.path, client="../x", status=status)
    assert read_status(status)["what"] == "failed"
