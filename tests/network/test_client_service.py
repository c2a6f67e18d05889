"""The client service: real processes, a real socket, and bytes alone."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Listener
from pathlib import Path

import numpy
import pytest
import tomli_w
from federations import LoopbackFederation, float64_experiment, folder_experiment, save_pictures
from flwr.app import Message as FlowerMessage

from command_processes import CommandProcess, environment
from mpfedcl.errors import InvalidInput
from mpfedcl.network.client import service
from mpfedcl.network.client.service import (
    ServiceFailed,
    _answer,
    _from_bytes,
    _to_bytes,
    call_service,
)
from mpfedcl.network.message import FORMAT, Kind, Message, MessageError
from mpfedcl.network.packing import Introduction
from small_experiments import assert_same_results

pytestmark = pytest.mark.whole


def echo(kind: Kind, message: Message) -> Message:
    return Message({"kind": kind, **message.values}, message.arrays)


def ask(
    request: bytes, answer: Callable[[Kind, Message], Message] = echo
) -> tuple[object, Message]:
    return _from_bytes(_answer(request, answer))


def test_what_is_asked_and_answered_crosses_as_it_was() -> None:
    arrays = {
        "averaged/a b": numpy.arange(6.0).reshape(2, 3),
        "prototypes/labels": numpy.zeros(0, "i8"),
    }
    head, found = ask(_to_bytes({"kind": "round"}, Message({"x": [1, None, "ü"]}, arrays)))
    assert head == {}
    assert found.values == {"kind": "round", "x": [1, None, "ü"]}
    assert found.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found.arrays[name].dtype == array.dtype
        assert numpy.array_equal(found.arrays[name], array)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (InvalidInput("one sentence."), "one sentence."),
        (MessageError("round is None"), "round is None"),
        (OSError("/secret/path is full"), "it failed with OSError"),
        (MemoryError(), "it failed with MemoryError"),
    ],
)
def test_failures_come_as_sentences(error: Exception, said: str) -> None:
    def fail(kind: Kind, message: Message) -> Message:
        raise error

    head, _ = ask(_to_bytes({"kind": "hello"}, Message({})), fail)
    assert head == {"failed": said}


@pytest.mark.parametrize("request_bytes", [b"", b"garbage", b"PK\x03\x04", b"\x80\x04K\x01."])
def test_garbage_is_answered_too(request_bytes: bytes) -> None:
    head, _ = ask(request_bytes)
    assert isinstance(head, dict)
    assert head["failed"].startswith("it failed with ")


def test_an_answer_that_cannot_be_packed_does_not_end_the_service() -> None:
    head, _ = ask(
        _to_bytes({"kind": "hello"}, Message({})), lambda *_: Message({"loss": float("nan")})
    )
    assert head == {"failed": "it failed with ValueError"}


def test_objects_do_not_cross() -> None:
    objects = Message({}, {"x": numpy.array([print], dtype=object)})
    with pytest.raises(ValueError, match="allow_pickle=False"):
        _from_bytes(_to_bytes({}, objects))


def test_nobody_there(tmp_path: Path) -> None:
    assert call_service(tmp_path / "service", "hello", Message({}), 60) is None
    (tmp_path / "file").write_text("no socket")
    assert call_service(tmp_path / "file", "hello", Message({}), 60) is None
    # What a process leaves behind that was killed.
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "service"))
    assert (tmp_path / "service").is_socket()
    assert call_service(tmp_path / "service", "hello", Message({}), 60) is None


def test_it_goes_while_it_is_asked(tmp_path: Path) -> None:
    listener = Listener(str(tmp_path / "service"), family="AF_UNIX")

    def hang_up() -> None:
        with listener, listener.accept() as connection:
            connection.recv_bytes()

    thread = threading.Thread(target=hang_up)
    thread.start()
    assert call_service(tmp_path / "service", "hello", Message({}), 60) is None
    thread.join()


# The process itself


def listens(place: Path) -> bool:
    """Tell whether somebody listens: the file of a socket is there a moment before."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as found:
        found.connect(str(place))
        return True
    return False


def serve(words: list[str]) -> None:
    """Be `python -m mpfedcl.network.client.service`."""
    sys.argv[1:] = words
    service.main()


@contextlib.contextmanager
def running_service(folder: Path, **config: object) -> Iterator[tuple[Path, CommandProcess]]:
    """Run a client service as a process of its own."""
    file, place = folder / "node.toml", folder / "service"
    file.write_text(tomli_w.dumps(config))
    process = CommandProcess([file, place], folder, program=serve)
    try:
        deadline = time.monotonic() + 60
        while not listens(place) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        yield place, process
    finally:
        process.kill()
        process.communicate()


def test_a_run_is_the_same_with_a_service_that_is_killed(images: Path, tmp_path: Path) -> None:
    """One client service is a process that stays, until it is killed in the midst of the run."""
    # The process has the model that users have, so that this run has it too.
    experiment = float64_experiment(images, "fedavg", rounds=3)
    memory = str(tmp_path / "with" / "memory-0")
    config = {"name": "client-0", "share": 0, "data": str(images), "memory": memory}
    with running_service(tmp_path, **config) as (place, process):
        federation = LoopbackFederation(experiment, tmp_path / "with")
        asked: list[str] = []

        def kill(client: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
            if client == "client-0":
                asked.append(str(request.metadata.message_type))
                if len(asked) == 3:
                    process.send_signal(signal.SIGKILL)
                    process.wait()
            return reply

        federation.grid._tamper = kill
        federation.join(0, running_service=str(place))
        federation.serve()
    assert asked == ["query", "train", "train", "train", "evaluate"]
    alone = LoopbackFederation(experiment, tmp_path / "without")
    alone.serve()
    assert_same_results(federation.path, alone.path)


def test_a_service_refuses_in_words_and_survives_strangers(tmp_path: Path) -> None:
    data = save_pictures(tmp_path / "own", "cat", "dog")
    config = {"name": "north", "data": str(data), "memory": str(tmp_path / "memory")}
    with running_service(tmp_path, **config) as (place, process):
        with pytest.raises(ServiceFailed, match="format is None; it must be of type int"):
            call_service(place, "hello", Message({}), 60)
        for garbage in (b"", b"garbage", os.urandom(1000)):
            with Client(str(place), family="AF_UNIX") as connection:
                connection.send_bytes(garbage)
                assert b"failed" in connection.recv_bytes()
        # Somebody hangs up before the answer has come.
        with Client(str(place), family="AF_UNIX") as connection:
            connection.send_bytes(b"garbage")
        hello = Message({"format": FORMAT, "experiment": folder_experiment().to_toml()})
        answer = call_service(place, "hello", hello, 60)
        assert answer is not None
        assert Introduction.from_message(answer).classes == ("cat", "dog")
        assert process.poll() is None


def test_settings_that_cannot_be_end_it_with_a_sentence(tmp_path: Path) -> None:
    with running_service(tmp_path, name="../a", data="x") as (_, process):
        _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "Traceback" not in said
    assert said.count("\n") == 1


@pytest.mark.skipif(not shutil.which("setpriv"), reason="needs Linux and setpriv")
def test_who_is_left_behind_by_a_client_that_was_killed_is_ended(tmp_path: Path) -> None:
    """Flower's processes can hang when they lose their client: here one that ignores everything."""
    data = save_pictures(tmp_path / "own", "cat", "dog")
    file, place, home = tmp_path / "node.toml", tmp_path / "service", tmp_path / "flower"
    config = {"name": "north", "data": str(data), "memory": str(tmp_path / "memory")}
    file.write_text(tomli_w.dumps(config))
    client = (
        "import os, sys, time; from pathlib import Path;"
        "from mpfedcl.network import processes; from mpfedcl.network.flower import programs;"
        "file, place, home, log = map(Path, sys.argv[1:]);"
        "variables = programs.environment(home);"
        "processes.start(programs.service_command(file, place), variables, log);"
        "time.sleep(300)"
    )
    deaf = (
        "import signal, time; [signal.signal(each, signal.SIG_IGN) for each in (2, 15)];"
        "print(1, flush=True); time.sleep(300)"
    )

    def run(code: str, *words: Path, home: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", code, *map(str, words)],
            env=environment(FLWR_HOME=str(home)),
            stdout=subprocess.PIPE,
        )

    # The client's own program stands outside, as it does in life.
    program = run(client, file, place, home, tmp_path / "log", home=tmp_path)
    helper, stranger = run(deaf, home=home), run(deaf, home=tmp_path / "another")
    try:
        for each in (helper, stranger):
            assert each.stdout is not None
            assert each.stdout.readline() == b"1\n"
        deadline = time.monotonic() + 60
        while not place.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        program.kill()
        assert helper.wait(60) == -signal.SIGKILL
        assert stranger.poll() is None
    finally:
        for each in (program, helper, stranger):
            each.kill()
            each.communicate()
