"""Keys and certificates over their lives: revoked, rotated, renewed, expired."""

import datetime
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from cryptography import x509
from flwr.supercore.task_identity import TaskIdentity
from superlinks import (
    SUPERLINK_NODE,
    Connect,
    RunningServer,
    connect_fixture,
    echo,
    reply_to,
    run_of,
    running_server,
    wait_for_calls,
)

from certificates import DAY, replace_certificate
from command_results import Refused
from mpfedcl.core.errors import InvalidInput
from mpfedcl.network.audit import AUDIT_FILE, read_audit
from mpfedcl.network.flower import superlink
from mpfedcl.network.flower.client import SuperNode, take_part, warn_about_certificates
from mpfedcl.network.flower.control import admits, list_nodes, register_clients
from mpfedcl.network.flower.transport import FlowerTransport
from mpfedcl.network.setup.folders import ClientFolder, ServerFolder, make_federation
from mpfedcl.network.setup.keys import find_certificate_end
from mpfedcl.network.setup.life_cycle import (
    check_certificates,
    renew_certificates,
    revoke_client,
    revoked_names,
    rotate_client,
)
from mpfedcl.network.transport import AnswerLimit, Message, Reply

pytestmark = pytest.mark.whole
__all__ = ["connect_fixture"]

LIMIT = AnswerLimit(num_arrays=10, array_bytes=10**6, text_bytes=10**6)
REVOKED = "has revoked this client's key; only its operator can hand out a new one"


@pytest.fixture(name="folder")
def folder_fixture(tmp_path: Path) -> ServerFolder:
    return make_federation(tmp_path / "lab", ["a", "b"], None, 9800)


@pytest.fixture(name="lab")
def lab_fixture(tmp_path: Path) -> Iterator[RunningServer]:
    with running_server(tmp_path / "lab", "a", "b") as server:
        register_clients(server.folder)
        yield server


def serial(path: Path) -> int:
    return x509.load_pem_x509_certificate(path.read_bytes()).serial_number


def test_revoked_client_can_come_back_only_with_another_key(folder: ServerFolder) -> None:
    public, key = folder.public_key("a"), folder.root / "clients" / "a" / "node.key"
    before = public.read_text(), key.read_text()
    left = revoke_client(folder, "a")
    assert left.clients == ("b",)
    assert revoked_names(left) == ["a"]
    assert [each.read_text() for each in folder.revoked.iterdir()] == [before[0]]
    with pytest.raises(InvalidInput, match=r"name is 'a'; it must be one of b\."):
        revoke_client(left, "a")
    again = make_federation(folder.root, ["a"], None, 9800)
    assert again.clients == ("a", "b")
    assert public.read_text() != before[0]
    assert key.read_text() != before[1]
    assert revoked_names(again) == []


def test_interrupted_revocation_can_be_repeated(
    folder: ServerFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("mpfedcl.network.setup.life_cycle.write_atomically", interrupt)
        with pytest.raises(KeyboardInterrupt):
            revoke_client(folder, "a")
    assert not folder.public_key("a").exists()
    assert revoke_client(ServerFolder.open(folder.root), "a").clients == ("b",)


@pytest.mark.parametrize("name", ["../server", "", "x"])
def test_unknown_name_is_rejected(folder: ServerFolder, name: str, refused: Refused) -> None:
    for command in ("revoke", "rotate"):
        assert "it must be one of a, b" in refused("federation", command, str(folder.root), name)


def test_connected_client_is_shut_out_at_once(lab: RunningServer, connect: Connect) -> None:
    """Its requests are refused, and its answer to a message sent before does not count."""
    node, other = connect("a"), connect("b")
    number = node.enter(None)
    other.enter(None)
    with run_of(lab) as grid:
        transport = FlowerTransport(grid, lambda name, key: admits(lab.folder, name, key))
        assert transport.connected_nodes() == {number: "a", other.number: "b"}
        # The clients of this test are in the same process and have already identified it.
        TaskIdentity.node_id, TaskIdentity.run_id = SUPERLINK_NODE, grid.run.run_id
        asked = {number: Message({"x": 1})}
        identity = transport.send("round", asked, 60, seconds=60)[number]
        request = node.receive()
        assert request is not None
        reply_to(node, request)
        unanswered = transport.send("round", asked, 60, seconds=60)[number]
        revoke_client(lab.folder, "a")
        # Without any call to the server, because the file alone is enough.
        with pytest.raises(InvalidInput, match=REVOKED):
            node.receive()
        assert transport.connected_nodes() == {other.number: "b"}
        replies: list[Reply] = []
        end = time.monotonic() + 120
        while not replies:
            assert time.monotonic() < end
            replies = transport.receive({identity: LIMIT}, 5.0)
        assert [(each.failure, each.reason) for each in replies] == [
            ("gone", "its key was revoked")
        ]
        register_clients(ServerFolder.open(lab.folder.root))
        assert [each.name for each in list_nodes(lab.folder)] == ["b"]
        replies = []
        while not replies:
            assert time.monotonic() < end
            replies = transport.receive({unanswered: LIMIT}, 5.0)
        assert replies[0].reason == "its key was revoked"
        assert other.receive() is None
        wait_for_calls()
    events = [(each["event"], each.get("client")) for each in read_audit(log_of(lab))]
    assert events == [("refused", "a")]


def log_of(server: RunningServer) -> Path:
    return server.folder.server / AUDIT_FILE


def test_revocation_survives_a_lost_database(tmp_path: Path) -> None:
    """The list of revoked keys is a folder, not only a row in Flower's database."""
    with running_server(tmp_path / "lab", "a", "b") as server:
        revoke_client(server.folder, "a")
        register_clients(ServerFolder.open(server.folder.root))
        key = ClientFolder.open(server.folder.root, "a")
        with pytest.raises(InvalidInput, match=REVOKED):
            take_part(key, server.address, echo, print)


def test_connected_client_comes_back_after_the_database_is_lost(tmp_path: Path) -> None:
    """The new database gives its key another node number."""
    with running_server(tmp_path / "lab", "a") as server:
        register_clients(server.folder)
        folder = ClientFolder.open(server.folder.root, "a")
        node = SuperNode(server.address, folder.key, folder.authority)
        number = node.enter(None)
        (listed,) = list_nodes(server.folder)
        assert listed.node_id == number
        node.leave()
        # Not the number that the server knows, as after a restore.
        assert node.enter(number + 1) == number
        node.close()


def test_only_the_new_key_of_a_rotated_client_is_accepted(
    lab: RunningServer, connect: Connect
) -> None:
    old = connect("a")
    old.enter(None)
    old.leave()
    rotate_client(lab.folder, "a")
    register_clients(lab.folder)
    with pytest.raises(InvalidInput, match=REVOKED):
        old.enter(None)
    new = connect("a")
    number = new.enter(None)
    with run_of(lab) as grid:
        transport = FlowerTransport(grid, lambda name, key: admits(lab.folder, name, key))
        assert transport.connected_nodes() == {number: "a"}


def test_renewed_certificate_has_the_same_key_and_authority(folder: ServerFolder) -> None:
    certificate, authority = folder.server / "server.pem", folder.authority
    kept = (folder.server / "server.key").read_bytes(), authority.read_bytes()
    replace_certificate(folder, days=3)
    assert find_certificate_end(certificate) < now() + 4 * DAY
    renew_certificates(folder, authority=False)
    assert find_certificate_end(certificate) > now() + 700 * DAY
    assert ((folder.server / "server.key").read_bytes(), authority.read_bytes()) == kept


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def test_no_certificate_outlives_its_authority(folder: ServerFolder) -> None:
    replace_certificate(folder, days=100, authority=True)
    renew_certificates(folder, authority=False)
    ends = [find_certificate_end(each) for each in (folder.authority, folder.server / "server.pem")]
    assert ends[0] == ends[1] < now() + 101 * DAY
    replace_certificate(folder, days=-1, authority=True)
    with pytest.raises(InvalidInput, match="has expired; it must be renewed, too"):
        renew_certificates(folder, authority=False)


def test_old_authority_accepts_what_the_renewed_one_has_signed(
    tmp_path: Path, lab: RunningServer
) -> None:
    """Clients can get the new ca.pem at any time before the old one expires."""
    old = tmp_path / "old.pem"
    old.write_bytes(lab.folder.authority.read_bytes())
    renew_certificates(lab.folder, authority=True)
    assert lab.folder.authority.read_bytes() != old.read_bytes()
    assert ClientFolder.open(lab.folder.root, "a").authority.read_bytes() == (
        lab.folder.authority.read_bytes()
    )
    renewed = x509.load_pem_x509_certificate((lab.folder.server / "server.pem").read_bytes())
    for each in (old, lab.folder.authority):
        issuer = x509.load_pem_x509_certificate(each.read_bytes())
        renewed.verify_directly_issued_by(issuer)
    # The running server still has its old certificate, which the new authority accepts.
    host, port = lab.address.split(":")
    ssl.get_server_certificate((host, int(port)), ca_certs=str(lab.folder.authority), timeout=60)


def test_renewal_needs_the_right_key(folder: ServerFolder, tmp_path: Path) -> None:
    other = make_federation(tmp_path / "other", ["x"], None, 9801)
    key = folder.server / "ca.key"
    key.write_bytes((other.server / "ca.key").read_bytes())
    with pytest.raises(InvalidInput, match=r"ca\.key is not the key of .*ca\.pem"):
        renew_certificates(folder, authority=False)
    key.unlink()
    for authority in (False, True):
        with pytest.raises(InvalidInput, match="does not exist; it must be there"):
            renew_certificates(folder, authority=authority)


def test_operators_are_warned_thirty_days_ahead(folder: ServerFolder) -> None:
    assert check_certificates(folder) == []
    replace_certificate(folder, days=31)
    assert check_certificates(folder) == []
    replace_certificate(folder, days=29)
    (warning,) = check_certificates(folder)
    assert f"in 28 days; mpfedcl federation renew {folder.root} renews it." in warning
    replace_certificate(folder, days=-2)
    with pytest.raises(InvalidInput, match=r"server\.pem expired on .*; mpfedcl federation renew"):
        check_certificates(folder)


def test_running_server_uses_a_renewed_certificate(
    folder: ServerFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = folder.server / "server.pem"
    files = {"ssl_certfile": certificate, "ssl_keyfile": folder.server / "server.key"}
    settings = uvicorn.Config("x:y", **files)  # type: ignore[arg-type]
    loaded: list[int] = []

    class Context:
        def load_cert_chain(self, certfile: Path, keyfile: Path) -> None:
            # A real context checks that certificate and key belong together.
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certfile, keyfile)
            loaded.append(serial(Path(certfile)))
            raise SystemExit

    settings.ssl = Context()  # type: ignore[assignment]
    renew = renew_certificates

    def sleep(_: float) -> None:
        renew(folder, authority=False)

    monkeypatch.setattr("mpfedcl.network.flower.superlink.time.sleep", sleep)
    with pytest.raises(SystemExit):
        superlink._reload_certificate(settings)
    assert loaded == [serial(certificate)]


@pytest.fixture(name="expired")
def expired_fixture(tmp_path: Path) -> Iterator[RunningServer]:
    folder = make_federation(tmp_path / "lab", ["a"], None, 9800)
    replace_certificate(folder, days=-1)
    with running_server(tmp_path / "lab", "a") as server:
        yield server


def test_client_ends_at_an_expired_certificate_with_one_line(expired: RunningServer) -> None:
    folder, said = ClientFolder.open(expired.folder.root, "a"), list[str]()
    with pytest.raises(InvalidInput, match=r"the server's certificate has expired; its operator"):
        take_part(folder, expired.address, echo, said.append)
    assert said == []
    # Its own copy of the authority's certificate has expired, not the server's.
    replace_certificate(expired.folder, days=-1, authority=True)
    folder.authority.write_bytes(expired.folder.authority.read_bytes())
    with pytest.raises(InvalidInput, match=r"ca\.pem has expired; the server's operator has a new"):
        take_part(folder, expired.address, echo, said.append)


def test_connected_client_reports_an_expired_certificate_once(expired: RunningServer) -> None:
    said: list[str] = []
    folder = ClientFolder.open(expired.folder.root, "a")
    node = SuperNode(expired.address, folder.key, folder.authority, said.append)
    try:
        with pytest.raises(httpx.ConnectError) as caught:
            node._activate()
        faults = iter([caught.value] * 2)

        def request() -> str:
            for fault in faults:
                raise fault
            return "answered"

        assert node._insist(request) == "answered"
        assert len(said) == 1
        assert "has expired; its operator renews it" in said[0]
    finally:
        node.close()


def test_client_warns_thirty_days_ahead(tmp_path: Path) -> None:
    folder = make_federation(tmp_path / "lab", ["a"], None, 9800)
    replace_certificate(folder, days=10)
    said: list[str] = []
    with running_server(tmp_path / "lab", "a") as server:
        warn_about_certificates(server.address, server.folder.authority, said.append)
    (warning,) = said
    assert "the server's certificate expires on" in warning
    assert "in 9 days" in warning
