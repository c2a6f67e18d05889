"""Unauthorized and malicious clients are refused or rejected."""

import shutil
import socket
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tomli_w
from tampering_client import TRICKS

from mpfedcl.network.flower.programs import environment, executor_command, running
from mpfedcl.network.setup.folders import ClientFolder
from mpfedcl.network.setup.keys import make_node_key
from process_federation import (
    CLIENTS,
    LONG,
    SUPERLINK,
    FaultLog,
    ProcessFederation,
    wait_until,
)

pytestmark = pytest.mark.federation


@contextmanager
def own_software(federation: ProcessFederation) -> Iterator[Path]:
    """Take part with a valid key, but with tampered answers."""
    client = ClientFolder.open(federation.folder, "tamperer")
    log = client.root / "own.log"
    with tempfile.TemporaryDirectory() as place:
        values = {
            "name": "tamperer",
            "share": 0,
            "state": str(Path(place) / "memory"),
            "server": client.server,
        }
        client.settings.write_text(tomli_w.dumps(values))
        script = Path(__file__).with_name("tampering_client.py")
        variables = {**federation.environment(), **environment(client.flower_home)}
        with running([sys.executable, str(script), str(client.root)], variables, log):
            yield log


def test_bad_updates_are_rejected(federation: ProcessFederation, fault_log: FaultLog) -> None:
    with own_software(federation) as log:
        wait_until(lambda: "SuperNode ID" in log.read_text(), "it is connected")
        settings = ["--clients", 4, "--partition.alpha", 1, "--rounds", len(TRICKS)]
        run = federation.begin("tampered", "--method", "fedavg", *settings)
        run.finish(2 * LONG)
    for record, trick in zip(run.records(), TRICKS, strict=True):
        clients = record["clients"]
        assert set(CLIENTS) <= set(clients["answered"]), trick
        assert set(clients["answered"]) <= {*CLIENTS, "tamperer"}, trick
        assert ("tamperer" in clients["answered"]) == trick.startswith("an honest"), trick
        assert ("tamperer" in clients["rejected"]) != trick.startswith("an honest"), trick
    reasons = [each["clients"]["rejected"].get("tamperer") for each in run.records()]
    assert reasons[7] == "it failed with RuntimeError"
    for trick, reason in zip(TRICKS, reasons, strict=True):
        if reason:
            fault_log.write(f"a client sends {trick}", f"rejected: {reason}", 0, "its update")


def test_unknown_and_duplicate_keys_are_refused(
    federation: ProcessFederation, tmp_path: Path
) -> None:
    (tmp_path / "unknown").mkdir()
    stranger = _copy_client(federation, tmp_path / "unknown")
    (stranger / "node.key").unlink()
    make_node_key(stranger / "node.key", tmp_path / "node.pub")
    twin = _copy_client(federation, tmp_path)
    programs = [federation.start("client", copy, "--share", 0) for copy in (stranger, twin)]
    for program in programs:
        program.wait_for_output("The server refuses client-0: it does not know")
        program.interrupt()
    assert [program.wait(60) for program in programs] == [0, 0]
    for copy in (stranger, twin):
        assert "SuperNode ID" not in (copy / "supernode.log").read_text()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> ProcessFederation:
    """The folder of another federation, without any running process."""
    other = ProcessFederation(tmp_path_factory.mktemp("other"))
    other.make("--clients", 1)
    return other


def test_certificate_of_another_authority_is_refused(
    federation: ProcessFederation, other: ProcessFederation, tmp_path: Path
) -> None:
    copy = _copy_client(federation, tmp_path)
    shutil.copy(other.folder / "server" / "ca.pem", copy / "ca.pem")
    done = federation.call("client", copy, "--share", 0)
    assert done.returncode == 2
    assert "its certificate must be signed by" in done.stderr
    # The client's process checks it too, in case the server is replaced later.
    _assert_not_trusted(ClientFolder.open(copy, None), f"127.0.0.1:{federation.port}")


def test_certificate_for_another_host_name_is_refused(
    federation: ProcessFederation, tmp_path: Path
) -> None:
    # The federation's own certificate, at an address that it is not valid for.
    copy, server = _copy_client(federation, tmp_path), federation.folder / "server"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server / "server.pem", server / "server.key")
    with socket.create_server(("127.0.0.2", 0)) as listener:
        thread = threading.Thread(target=_accept_tls, args=(listener, context), daemon=True)
        thread.start()
        address = f"127.0.0.2:{listener.getsockname()[1]}"
        done = federation.call("client", copy, "--share", 0, "--server", address)
        assert done.returncode == 2
        assert "127.0.0.2" in done.stderr
        assert "mismatch" in done.stderr
        _assert_not_trusted(ClientFolder.open(copy, None), address)


def test_plain_text_connection_is_refused(federation: ProcessFederation) -> None:
    address = ("127.0.0.1", federation.port)
    with socket.create_connection(address, 60) as connection:
        connection.sendall(b"POST /v1/control/list-runs HTTP/1.1\r\nHost: localhost\r\n\r\n")
        connection.settimeout(60)
        try:
            answer = connection.recv(1000)
        except ConnectionResetError:
            answer = b""
    assert not answer.startswith(b"HTTP")


def test_server_without_tls_is_refused(federation: ProcessFederation, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_answer_without_tls, args=(listener,), daemon=True).start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        copy = _copy_client(federation, tmp_path)
        done = federation.call("client", copy, "--share", 0, "--server", address)
    assert done.returncode == 2
    assert "it must use TLS" in done.stderr


@pytest.mark.parametrize("who", ["client", "server"])
def test_private_key_readable_by_others_is_rejected(other: ProcessFederation, who: str) -> None:
    place = {"client": "clients/client-0/node.key", "server": "server/server.key"}[who]
    (other.folder / place).chmod(0o644)
    words = ["--name", "client-0", "--share", 0] if who == "client" else []
    done = other.call(who, "lab", *words)
    assert done.returncode == 2
    assert "its mode must be 0600" in done.stderr


def test_server_listens_only_on_loopback(federation: ProcessFederation) -> None:
    connections = federation.find_one(SUPERLINK).net_connections("inet")
    listening = {tuple(each.laddr) for each in connections if each.status == "LISTEN"}
    assert listening == {("127.0.0.1", federation.port)}


def _copy_client(federation: ProcessFederation, folder: Path) -> Path:
    copy = folder / "client-0"
    source = federation.folder / "clients" / "client-0"
    copy.mkdir()
    for name in ("ca.pem", "client.toml", "node.key", "policy.toml"):
        shutil.copy(source / name, copy / name)
    return copy


def _assert_not_trusted(client: ClientFolder, server: str) -> None:
    """Start only a client's process: it must detect that this is not its server."""
    values = {"name": "client-0", "share": 0, "state": str(client.memory), "server": server}
    client.settings.write_text(tomli_w.dumps(values))
    log = client.root / "plain.log"
    with running(executor_command(client), environment(client.flower_home), log):
        wait_until(lambda: "CERTIFICATE_VERIFY_FAILED" in log.read_text(), "it does not trust it")
    assert "SuperNode ID" not in log.read_text()


def _accept_tls(listener: socket.socket, context: ssl.SSLContext) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        try:
            with context.wrap_socket(connection, server_side=True):
                time.sleep(0.1)
        except OSError:
            connection.close()


def _answer_without_tls(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(1000)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
