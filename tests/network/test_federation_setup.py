"""The folder of a federation: keys, certificates and instructions."""

import contextlib
import shutil
import socket
import ssl
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from mpfedcl.core.errors import InvalidInput
from mpfedcl.network.client.secure_aggregation import read_known_clients
from mpfedcl.network.setup.folders import ClientFolder, ServerFolder, make_federation
from mpfedcl.network.setup.keys import (
    is_private,
    make_authority,
    make_node_key,
    make_server_certificate,
    write_private,
)


def contents(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def keys(root: Path) -> dict[str, bytes]:
    secret = (".key", ".pem", ".pub", ".secret")
    found = {name: each for name, each in contents(root).items() if name.endswith(secret)}
    return {name: each for name, each in found.items() if "known-clients" not in name}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("federation") / "lab"
    make_federation(root, ["a", "b"], "fl.example.org", 9911)
    return root


@pytest.fixture
def lab(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "lab"))


def test_content_of_the_federation_folder(lab: Path) -> None:
    folder = ServerFolder.open(lab)
    assert (folder.host, folder.port, folder.clients) == ("fl.example.org", 9911, ("a", "b"))
    client = ClientFolder.open(lab, "a")
    assert (client.name, client.server) == ("a", "fl.example.org:9911")
    assert ClientFolder.open(lab / "clients/a", None) == client
    assert client.authority.read_bytes() == folder.authority.read_bytes()
    # A client folder contains only its own key: no other client's, and not the server's.
    handed_out = [name for name in contents(lab) if name.startswith("clients/a/")]
    assert [name for name in handed_out if name.endswith((".key", ".secret"))] == [
        "clients/a/node.key"
    ]
    assert len(folder.read_secret()) >= 43  # 256 bits
    for place in (folder.server, client.root):
        assert place.stat().st_mode & 0o777 == 0o700
    for name in contents(lab):
        if name.endswith((".key", ".secret")):
            assert (lab / name).stat().st_mode & 0o777 == 0o600


def test_second_init_adds_clients_and_keeps_keys(lab: Path) -> None:
    before = keys(lab)
    folder = make_federation(lab, ["c", "a"], None, 9800)
    assert folder.clients == ("a", "b", "c")
    assert (folder.host, folder.port) == ("fl.example.org", 9911)
    after = keys(lab)
    assert {name: after[name] for name in before} == before
    assert sorted(set(after) - set(before)) == [
        "clients/c/ca.pem",
        "clients/c/node.key",
        "server/clients/c.pub",
    ]
    assert "clients/c/" in (lab / "README.md").read_text()
    # Each client knows all keys, and none has to be trusted at first sight.
    public = {name: (lab / f"server/clients/{name}.pub").read_text().split() for name in "abc"}
    for name in "abc":
        known = read_known_clients(ClientFolder.open(lab, name).known_clients)
        assert known == {each: " ".join(public[each]).encode() for each in "abc"}


def test_moved_client_folder_gets_no_new_key(lab: Path) -> None:
    """A client folder that was moved to its machine is not created again."""
    public = (lab / "server/clients/a.pub").read_bytes()
    shutil.rmtree(lab / "clients/a")
    make_federation(lab, ["c"], None, 9800)
    assert (lab / "server/clients/a.pub").read_bytes() == public
    assert not (lab / "clients/a").exists()
    assert ServerFolder.open(lab).clients == ("a", "b", "c")


@pytest.mark.parametrize(
    "lost",
    [
        ["federation.toml"],
        ["federation.toml", "server/server.pem"],
        ["federation.toml", "server/server.pem", "server/server.key"],
        ["federation.toml", "server/clients/b.pub"],
        ["federation.toml", "clients/b/node.key", "server/clients/b.pub"],
        ["federation.toml", "README.md", "server/app/pyproject.toml"],
        ["federation.toml", "server/control.secret"],
        ["federation.toml", "server/ca.pem", "server/server.pem", "clients/b/client.toml"],
    ],
)
def test_interrupted_init_is_completed(lab: Path, lost: list[str]) -> None:
    """As if the program had been killed before it wrote these files."""
    complete, before = set(contents(lab)), keys(lab)
    for name in lost:
        (lab / name).unlink()
    kept = {name for name in before if name.endswith((".key", ".pub", ".secret"))} - set(lost)
    make_federation(lab, ["a", "b"], "fl.example.org", 9911)
    assert set(contents(lab)) == complete
    after = keys(lab)
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert after["clients/b/ca.pem"] == after["server/ca.pem"]


def test_nonempty_folders_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(InvalidInput, match="is not empty; it must be a new folder"):
        make_federation(tmp_path, ["a"], None, 9800)
    with pytest.raises(InvalidInput, match="is a file; it must be a new folder"):
        make_federation(tmp_path / "thesis.tex", ["a"], None, 9800)
    assert contents(tmp_path) == {"thesis.tex": b"x"}


@pytest.mark.parametrize(
    "name", ["", "a b", "a/b", "../a", ".a", "-a", "ä", "a" * 65, "a\n", "a;b", "$(x)"]
)
def test_invalid_client_names_are_rejected_on_init(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInput, match="a client's name must be of letters, digits"):
        make_federation(tmp_path / "lab", ["good", name], None, 9800)
    assert not (tmp_path / "lab").exists()


@pytest.mark.parametrize("host", ["", "a b", "ä.org", "a:9800", "::1", "http://a", "a/b"])
def test_invalid_hosts_are_rejected_on_init(tmp_path: Path, host: str) -> None:
    with pytest.raises(InvalidInput, match="it must be a host name or an IPv4 address"):
        make_federation(tmp_path / "lab", ["a"], host, 9800)
    assert not (tmp_path / "lab").exists()


def test_another_host_needs_another_certificate(lab: Path) -> None:
    with pytest.raises(InvalidInput, match="host is 'other'; it must be"):
        make_federation(lab, ["a"], "other", 9800)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "has format None; it must be 1"),
        ("format = 2", "has format 2; it must be 1"),
        ("format = 1", "must have host, port and clients"),
        ("format = 1\nhost = 'a'\nport = 'x'\nclients = []", "must have host, port and clients"),
        ("format = ", "cannot be read"),
    ],
)
def test_damaged_federation_file_is_rejected(lab: Path, content: str, reason: str) -> None:
    (lab / "federation.toml").write_text(content)
    with pytest.raises(InvalidInput, match=reason):
        ServerFolder.open(lab)


def test_non_federation_folders_are_rejected(lab: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"federation\.toml does not exist"):
        ServerFolder.open(tmp_path / "missing")
    with pytest.raises(InvalidInput, match="name is 'c'; it must be one of a, b"):
        ClientFolder.open(lab, "c")
    with pytest.raises(InvalidInput, match="name is None; it must be one of a, b"):
        ClientFolder.open(lab, None)
    with pytest.raises(InvalidInput, match="name is 'b'; this is the folder of 'a'"):
        ClientFolder.open(lab / "clients/a", "b")
    with pytest.raises(InvalidInput, match="is not a client's folder"):
        ClientFolder.open(tmp_path / "missing", None)


HOSTS = ["fl.example.org", "10.1.2.3", "localhost", "127.0.0.1"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority, a server's certificate, and another authority."""
    folder = tmp_path_factory.mktemp("keys")
    make_authority(folder / "ca.pem", folder / "ca.key")
    make_authority(folder / "other.pem", folder / "other.key")
    make_server_certificate(
        folder / "server.pem", folder / "server.key", folder / "ca.pem", folder / "ca.key", HOSTS
    )
    return folder


def shake_hands(place: Path, authority: str, host: str) -> None:
    """Connect a real client to a real server with TLS over a pair of sockets."""
    ours, theirs = socket.socketpair()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(place / "server.pem", place / "server.key")

    def serve() -> None:
        with contextlib.suppress(OSError), server.wrap_socket(theirs, server_side=True) as wrapped:
            wrapped.sendall(b"hello")

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        client = ssl.create_default_context(cafile=str(place / authority))
        with client.wrap_socket(ours, server_hostname=host) as wrapped:
            assert wrapped.recv(5) == b"hello"
    finally:
        ours.close()
        thread.join()
        theirs.close()


@pytest.mark.parametrize("host", HOSTS)
def test_clients_trust_the_server_under_each_of_its_names(place: Path, host: str) -> None:
    shake_hands(place, "ca.pem", host)


@pytest.mark.parametrize("host", ["example.org", "127.0.0.2", "x.fl.example.org"])
def test_certificate_is_invalid_for_other_hosts(place: Path, host: str) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match=r"mismatch|not valid for"):
        shake_hands(place, "ca.pem", host)


def test_certificate_of_another_authority_is_refused(place: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="verify failed"):
        shake_hands(place, "other.pem", "localhost")


def test_server_certificate_cannot_sign_others(place: Path, tmp_path: Path) -> None:
    """A certificate signed by the server's key is not trusted as a server."""
    make_server_certificate(
        tmp_path / "server.pem",
        tmp_path / "server.key",
        place / "server.pem",
        place / "server.key",
        ["localhost"],
    )
    chain = (tmp_path / "server.pem").read_bytes() + (place / "server.pem").read_bytes()
    (tmp_path / "server.pem").write_bytes(chain)
    (tmp_path / "ca.pem").write_bytes((place / "ca.pem").read_bytes())
    with pytest.raises(ssl.SSLCertVerificationError, match="verify failed"):
        shake_hands(tmp_path, "ca.pem", "localhost")


def test_private_keys_are_private_and_the_others_are_not_keys(place: Path) -> None:
    for name in ("ca.key", "server.key", "other.key"):
        assert (place / name).stat().st_mode & 0o777 == 0o600
        assert is_private(place / name)
        assert b"PRIVATE KEY" in (place / name).read_bytes()
    assert b"PRIVATE" not in (place / "ca.pem").read_bytes() + (place / "server.pem").read_bytes()


def test_client_key_is_readable_by_flower(tmp_path: Path) -> None:
    private, public = tmp_path / "node.key", tmp_path / "node.pub"
    make_node_key(private, public)
    assert private.stat().st_mode & 0o777 == 0o600
    assert public.read_text().startswith("ecdsa-sha2-nistp384 ")
    key = load_ssh_private_key(private.read_bytes(), password=None)
    assert key.public_key() == load_ssh_public_key(public.read_bytes())


def test_keys_are_never_replaced(tmp_path: Path) -> None:
    private, public = tmp_path / "node.key", tmp_path / "node.pub"
    make_node_key(private, public)
    before = private.read_bytes(), public.read_bytes()
    public.unlink()
    make_node_key(private, public)
    assert (private.read_bytes(), public.read_bytes()) == before
    with pytest.raises(FileExistsError):
        write_private(private, b"another")
    assert private.read_bytes() == before[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node.key", "node.pub"]


def test_files_readable_by_others_are_detected(tmp_path: Path) -> None:
    write_private(tmp_path / "a", b"x")
    for mode in (0o640, 0o604, 0o660):
        (tmp_path / "a").chmod(mode)
        assert not is_private(tmp_path / "a")
