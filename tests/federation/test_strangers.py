"""Who may not take part, and what a client that means harm can do: nothing but be left out."""

import shutil
import socket
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import tomli_w
from meddling_site import TRICKS

from laboratory import LONG, Laboratory, Notebook, until
from mpfedcl.network.flower.programs import environment, running, supernode_command
from mpfedcl.network.setup.folders import ClientFolder
from mpfedcl.network.setup.keys import make_node_key

pytestmark = pytest.mark.federation


@contextmanager
def own_software(laboratory: Laboratory, key: str, name: str) -> Iterator[Path]:
    """Take part with a key and Flower's own program, but with answers of one's own making."""
    client = ClientFolder.open(laboratory.folder, key)
    log, config = client.root / "own.log", client.root / "own.toml"
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        values = {"name": name, "share": 0, "memory": str(Path(place) / "memory")}
        resident = str(Path(place) / "site")
        config.write_text(tomli_w.dumps({**values, "resident": resident}))
        server = f"127.0.0.1:{laboratory.port}"
        script = Path(__file__).with_name("meddling_site.py")
        variables = {**laboratory.environment(), **environment(client.flower_home)}
        for command in (
            [sys.executable, str(script), str(config), resident],
            supernode_command(client, config, server, is_insecure=False),
        ):
            stack.enter_context(running(command, variables, log))
        until(lambda: "SuperNode ID" in log.read_text(), "the meddler is let in")
        yield log


def test_bad_updates_are_rejected_and_the_run_goes_on(
    laboratory: Laboratory, notebook: Notebook
) -> None:
    laboratory.make("--names", "meddler")
    assert laboratory.server is not None
    laboratory.until_said(laboratory.server, "New clients: meddler")
    with own_software(laboratory, "meddler", "meddler"):
        settings = ["--clients", 4, "--partition.alpha", 1, "--rounds", len(TRICKS)]
        course = laboratory.begin("meddled", "--method", "fedavg", *settings)
        assert course.program.wait(2 * LONG) == 0, course.program.said()
    for record, trick in zip(course.records(), TRICKS, strict=True):
        clients = record["clients"]
        assert {"client-0", "client-1", "client-2"} <= set(clients["answered"]), trick
        assert ("meddler" in clients["answered"]) == trick.startswith("an honest"), trick
        assert ("meddler" in clients["rejected"]) != trick.startswith("an honest"), trick
    reasons = [each["clients"]["rejected"].get("meddler") for each in course.records()]
    assert reasons[7] == "it failed with RuntimeError"
    for trick, reason in zip(TRICKS, reasons, strict=True):
        if reason:
            notebook.write(f"a client sends {trick}", f"rejected: {reason}", 0, "its update")


def test_a_client_with_the_name_of_another_is_refused(laboratory: Laboratory) -> None:
    laboratory.make("--names", "impostor")
    assert laboratory.server is not None
    laboratory.until_said(laboratory.server, "New clients: impostor")
    with own_software(laboratory, "impostor", "client-1"):
        course = laboratory.begin("impostor", "--method", "fedavg", "--rounds", 2)
        assert course.program.wait(LONG) == 0, course.program.said()
    refused = course.records()[-1]["remarks"]["refused"]
    assert refused == {
        "impostor": "it calls itself 'client-1', but its key is registered as 'impostor'"
    }
    assert course.records()[-1]["clients"]["answered"] == ["client-0", "client-1", "client-2"]


def test_an_unknown_key_is_refused(laboratory: Laboratory, tmp_path: Path) -> None:
    copy = _copy_client(laboratory, tmp_path)
    (copy / "node.key").unlink()
    make_node_key(copy / "node.key", tmp_path / "node.pub")
    stranger = laboratory.spawn("client", copy, "--share", 0)
    laboratory.until_said(stranger, "The server does not let client-0 in")
    stranger.interrupt()
    assert stranger.wait(60) == 0
    assert "SuperNode ID" not in (copy / "supernode.log").read_text()


def test_the_same_key_twice_is_refused(laboratory: Laboratory, tmp_path: Path) -> None:
    twin = laboratory.spawn("client", _copy_client(laboratory, tmp_path), "--share", 0)
    laboratory.until_said(twin, "The server does not let client-0 in")
    twin.interrupt()
    assert twin.wait(60) == 0


def test_another_authority_is_refused(laboratory: Laboratory, tmp_path: Path) -> None:
    copy, other = _copy_client(laboratory, tmp_path), Laboratory(tmp_path / "other")
    other.make("--clients", 1)
    shutil.copy(other.folder / "server" / "ca.pem", copy / "ca.pem")
    done = laboratory.call("client", copy, "--share", 0)
    assert done.returncode == 2
    assert "its certificate must be vouched for by" in done.stderr
    # Flower's own program refuses it too.
    said = _say_of_supernode(ClientFolder.open(copy, None), f"127.0.0.1:{laboratory.port}")
    assert "SSL/TLS handshake error" in said


def test_another_host_name_is_refused(laboratory: Laboratory, tmp_path: Path) -> None:
    # The federation's own certificate, at an address that it does not name.
    copy, server = _copy_client(laboratory, tmp_path), laboratory.folder / "server"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server / "server.pem", server / "server.key")
    with socket.create_server(("127.0.0.2", 0)) as listener:
        thread = threading.Thread(target=_greet, args=(listener, context), daemon=True)
        thread.start()
        address = f"127.0.0.2:{listener.getsockname()[1]}"
        done = laboratory.call("client", copy, "--share", 0, "--server", address)
        assert done.returncode == 2
        assert "127.0.0.2" in done.stderr
        assert "mismatch" in done.stderr
        assert "SSL/TLS handshake error" in _say_of_supernode(
            ClientFolder.open(copy, None), address
        )


def test_plain_text_is_refused(laboratory: Laboratory) -> None:
    address = ("127.0.0.1", laboratory.port)
    with socket.create_connection(address, 10) as line:
        line.sendall(b"POST /v1/control/list-runs HTTP/1.1\r\nHost: localhost\r\n\r\n")
        line.settimeout(10)
        try:
            answer = line.recv(1000)
        except ConnectionResetError:
            answer = b""
    assert not answer.startswith(b"HTTP")
    done = laboratory.call("client", "lab", "--name", "client-0", "--share", 0, "--insecure")
    assert done.returncode == 2
    assert "it speaks TLS" in done.stderr


def test_a_server_without_tls_is_refused(laboratory: Laboratory) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_answer_plainly, args=(listener,), daemon=True).start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        words = ["--name", "client-0", "--share", 0, "--server", address]
        done = laboratory.call("client", "lab", *words)
    assert done.returncode == 2
    assert "does not speak TLS" in done.stderr


@pytest.mark.parametrize("who", ["client", "server"])
def test_a_private_key_that_others_can_read_is_refused(tmp_path: Path, who: str) -> None:
    laboratory = Laboratory(tmp_path / "open")
    laboratory.make("--clients", 1)
    place = {"client": "clients/client-0/node.key", "server": "server/server.key"}[who]
    (laboratory.folder / place).chmod(0o644)
    words = ["--name", "client-0", "--share", 0] if who == "client" else []
    done = laboratory.call(who, "lab", *words)
    assert done.returncode == 2
    assert "its mode must be 0600" in done.stderr


def test_the_server_listens_on_this_machine_alone(laboratory: Laboratory) -> None:
    mark = f":{laboratory.port:04X}"
    lines = [
        line.split()
        for file in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(file).read_text().splitlines()[1:]
    ]
    # State 0A: listening. The address is 127.0.0.1, written backwards.
    listening = [line[1] for line in lines if line[1].endswith(mark) and line[3] == "0A"]
    assert listening == [f"0100007F{mark}"]


def _copy_client(laboratory: Laboratory, folder: Path) -> Path:
    copy = folder / "client-0"
    source = laboratory.folder / "clients" / "client-0"
    copy.mkdir()
    for name in ("ca.pem", "client.toml", "node.key"):
        shutil.copy(source / name, copy / name)
    return copy


def _say_of_supernode(client: ClientFolder, server: str) -> str:
    """Start Flower's program by itself and return what it says before it ends."""
    config, log = client.root / "plain.toml", client.root / "plain.log"
    config.write_text('name = "client-0"\n')
    command = supernode_command(client, config, server, is_insecure=False)
    # What it starts itself can outlive it, and is ended with its group.
    with running(command, environment(client.flower_home), log) as process:
        assert process.wait(LONG) != 0
    return log.read_text()


def _greet(listener: socket.socket, context: ssl.SSLContext) -> None:
    while True:
        try:
            line, _ = listener.accept()
        except OSError:
            return
        try:
            with context.wrap_socket(line, server_side=True):
                time.sleep(0.1)
        except OSError:
            line.close()


def _answer_plainly(listener: socket.socket) -> None:
    line, _ = listener.accept()
    with line:
        line.recv(1000)
        line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
