"""Runs over a network: their directories, their use, and their status file."""

import json
import os
import shlex
from pathlib import Path

import numpy
import pytest
from federations import LoopbackFederation, float64_experiment, is_training, round_of
from flwr.app import Message as FlowerMessage

from mpfedcl import Predictor, run
from mpfedcl.cli.arguments import Run
from mpfedcl.cli.main import parse
from mpfedcl.cli.run import show_result
from mpfedcl.core.errors import RunCutShort
from mpfedcl.inference.trained_run import load_trained_run
from mpfedcl.network.server.status import Status, read_status, stop_file
from mpfedcl.report.document import build_document, run_predictors_table
from mpfedcl.report.html import render_page
from mpfedcl.report.result_folders import find_result_folders
from mpfedcl.report.run import RunRecords, describe_settings
from mpfedcl.report.watch.runs import WatchedRun
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.observer import RunResult
from mpfedcl.runs.plan import plan
from small_experiments import VirtualTime, read_records

pytestmark = pytest.mark.whole


@pytest.mark.parametrize("method", ["mp-fedcl", "fedavg"])
def test_network_run_predicts_like_the_simulation(
    images: Path, tmp_path: Path, method: str
) -> None:
    experiment = float64_experiment(images, method, clients=3)
    federation = LoopbackFederation(experiment, tmp_path)
    federation.serve()
    run(experiment, tmp_path / "simulated")
    form = load_trained_run(federation.path).input_format
    asked = numpy.random.default_rng(0).integers(0, 256, (20, *form.shape)).astype(numpy.uint8)
    ours, theirs = (
        Predictor.load(path).predict(asked) for path in (federation.path, tmp_path / "simulated")
    )
    assert [each.label for each in ours] == [each.label for each in theirs]
    # Clients keep their test images, so there is no threshold, and nothing is called unknown.
    assert {each.unknown for each in ours} == {None}


@pytest.fixture(scope="module")
def finished(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds, in the second of which client-2 is silent until the end."""

    def silence(client: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage | None:
        is_late = not is_training(request) or round_of(request) == 2
        said_hello = str(request.metadata.message_type) == "query"
        return None if client == "client-2" and is_late and not said_hello else reply

    experiment = float64_experiment(images, rounds=2, clients=3, partition__test="matched")
    federation = LoopbackFederation(experiment, tmp_path_factory.mktemp("lab"), silence)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpfedcl.network.server.engine.time", VirtualTime())
        patch.setattr("mpfedcl.network.server.engine.POLL_SECONDS", 1.0)
        federation.serve()
    return federation.path


def test_card_and_report_state_that_clients_have_own_data(finished: Path) -> None:
    card = (finished / "CARD.md").read_text(encoding="utf-8")
    assert "Each client's own images" in card
    document = build_document(find_result_folders([finished]))
    (section,) = document["sections"]
    assert section["title"] == "mp-fedcl on its clients' own data"
    assert section["about"][0].startswith("its clients' own data, over a network; 3 clients; 2 ro")
    watched = WatchedRun(finished, finished)
    watched.refresh(set())
    assert watched.seen["about"].startswith("its clients' own data, over a network, seed")
    for text in (card, render_page(document), json.dumps(watched.seen)):
        assert "Dir(" not in text


def test_commands_in_the_card_reproduce_the_experiment(finished: Path) -> None:
    settings = describe_settings(RunRecords.read(finished))
    card = (finished / "CARD.md").read_text(encoding="utf-8")
    experiment = RunDirectory(finished).read_experiment()
    assert "mpfedcl run" not in settings["command"] + card
    asked = parse(shlex.split(settings["command"])[1:])
    assert plan(asked.settings, over_network=True).experiment.resolved() == experiment
    assert "federation start FEDERATION" in card.split("## Reproduction")[1]


def test_report_shows_why_clients_were_missing(finished: Path) -> None:
    rows = RunRecords.read(finished).described["absences"]["rows"]
    told = [(row["client"], row["what"], row["why"], row["first"]) for row in rows]
    silent = "no answer within 30 s"
    assert told == [
        ("client-2", "did not answer", silent, 2),
        ("client-2", "did not evaluate the last round", silent, 2),
    ]


def test_report_names_primary_metric_and_global_model(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory(finished)
    summary = directory.read_summary() or {}
    result = RunResult(finished, directory.read_experiment(), 0.0, [], None, summary)
    show_result(result, Run())
    shown = capsys.readouterr().out
    reached = summary["predictors"]["local_test"][summary["predictor_global"]]
    notes = run_predictors_table(RunRecords.read(finished))["notes"]
    card = (finished / "CARD.md").read_text(encoding="utf-8")
    for text in (shown, " ".join(notes), card):
        assert "mean over 2 of 3 clients (not evaluated: client-2)" in text
        assert f"The server's model reaches {reached:.1f} % on the same test sets" in text
        assert "mpfedcl predict DIR/clients/NAME IMAGES" in text


def test_status_contains_step_and_process(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    Status(path).write("training", round=3, waiting=["a"])
    said = read_status(path)
    assert said == {"what": "training", "pid": os.getpid(), "round": 3, "waiting": ["a"]}


def test_unchanged_status_is_not_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    status = Status(path)
    status.write("training", round=1)
    written = path.stat().st_ino
    for number in range(50):
        status.write("training", round=1, answered=number)
    assert path.stat().st_ino == written
    # A new step is written at once.
    status.write("done")
    assert read_status(path)["what"] == "done"


def test_unwritable_status_file_does_not_end_the_run(tmp_path: Path) -> None:
    Status(None).write("training")
    Status(tmp_path / "missing" / "status.json").write("training")
    assert not Status(None).stop_requested()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"null"])
def test_unreadable_status_file_is_empty(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "status.json"
    assert read_status(path) == {}
    path.write_bytes(content)
    assert read_status(path) == {}


@pytest.mark.usefixtures("quick_network")
def test_stop_file_stops_after_the_current_round(images: Path, tmp_path: Path) -> None:
    status = tmp_path / "status.json"
    federation = LoopbackFederation(float64_experiment(images, "fedavg"), tmp_path)

    def ask(_client: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if is_training(request):
            stop_file(status).touch()
        return reply

    federation.grid._tamper = ask
    assert federation.serve(status=status).summary is None
    assert read_records(federation.path) == []
    said = read_status(status)
    assert (said["what"], said["round"], said["rounds"]) == ("training", 1, 3)


@pytest.mark.usefixtures("quick_network")
def test_stop_file_stops_a_waiting_run_at_once(images: Path, tmp_path: Path) -> None:
    status = tmp_path / "status.json"
    stop_file(status).touch()
    federation = LoopbackFederation(float64_experiment(images, "fedavg"), tmp_path, count=1)
    with pytest.raises(RunCutShort, match="stopped while waiting for clients"):
        federation.serve(status=status)
    assert read_status(status)["here"] == ["client-0"]
    assert read_status(status)["wanted"] == 3
