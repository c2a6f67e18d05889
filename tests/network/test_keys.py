"""Certificates and keys, tried with Python's own ssl."""

import contextlib
import socket
import ssl
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from mpfedcl.network.setup.keys import (
    is_private,
    make_authority,
    make_node_key,
    make_server_certificate,
    write_private,
)

HOSTS = ["fl.example.org", "10.1.2.3", "localhost", "127.0.0.1"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority, a server's certificate, and an authority that is another."""
    folder = tmp_path_factory.mktemp("keys")
    make_authority(folder / "ca.pem", folder / "ca.key")
    make_authority(folder / "other.pem", folder / "other.key")
    make_server_certificate(
        folder / "server.pem", folder / "server.key", folder / "ca.pem", folder / "ca.key", HOSTS
    )
    return folder


def shake_hands(place: Path, authority: str, host: str) -> None:
    """Let a client connect over TLS to a server, both of them real, over a pair of sockets."""
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
def test_under_no_other_name(place: Path, host: str) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match=r"mismatch|not valid for"):
        shake_hands(place, "ca.pem", host)


def test_nor_by_another_authority(place: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="verify failed"):
        shake_hands(place, "other.pem", "localhost")


def test_the_servers_certificate_vouches_for_nobody(place: Path, tmp_path: Path) -> None:
    """What is signed by the server's own key is no server of this federation."""
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


def test_a_clients_key_is_as_flower_wants_it(tmp_path: Path) -> None:
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


def test_what_others_may_read_is_seen(tmp_path: Path) -> None:
    write_private(tmp_path / "a", b"x")
    for mode in (0o640, 0o604, 0o660):
        (tmp_path / "a").chmod(mode)
        assert not is_private(tmp_path / "a")
