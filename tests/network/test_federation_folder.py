"""The folder of a federation: made once, added to, made whole, and never robbed of its keys."""

import shutil
from pathlib import Path

import pytest

from mpfedcl.core.errors import InvalidInput
from mpfedcl.network.setup.folders import ClientFolder, ServerFolder, make_federation


def contents(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def keys(root: Path) -> dict[str, bytes]:
    secret = (".key", ".pem", ".pub", ".secret")
    return {name: each for name, each in contents(root).items() if name.endswith(secret)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("federation") / "lab"
    make_federation(root, ["a", "b"], "fl.example.org", 9911)
    return root


@pytest.fixture
def lab(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "lab"))


def test_what_is_in_it(lab: Path) -> None:
    folder = ServerFolder.open(lab)
    assert (folder.host, folder.port, folder.clients) == ("fl.example.org", 9911, ("a", "b"))
    client = ClientFolder.open(lab, "a")
    assert (client.name, client.server) == ("a", "fl.example.org:9911")
    assert ClientFolder.open(lab / "clients/a", None) == client
    assert client.authority.read_bytes() == folder.authority.read_bytes()
    # A client gets its own key and no other's, and none of the server's.
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


def test_given_again_it_adds_clients_and_touches_no_key(lab: Path) -> None:
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


def test_a_client_that_was_handed_out_is_left_alone(lab: Path) -> None:
    """Its folder has been moved to its machine: nobody makes another key under its name."""
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
def test_what_is_half_made_is_made_whole(lab: Path, lost: list[str]) -> None:
    """As if the program had been killed before it wrote these."""
    complete, before = set(contents(lab)), keys(lab)
    for name in lost:
        (lab / name).unlink()
    kept = {name for name in before if name.endswith((".key", ".pub", ".secret"))} - set(lost)
    make_federation(lab, ["a", "b"], "fl.example.org", 9911)
    assert set(contents(lab)) == complete
    after = keys(lab)
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert after["clients/b/ca.pem"] == after["server/ca.pem"]


def test_other_peoples_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(InvalidInput, match="is not empty; it must be a new folder"):
        make_federation(tmp_path, ["a"], None, 9800)
    with pytest.raises(InvalidInput, match="is a file; it must be a new folder"):
        make_federation(tmp_path / "thesis.tex", ["a"], None, 9800)
    assert contents(tmp_path) == {"thesis.tex": b"x"}


@pytest.mark.parametrize(
    "name", ["", "a b", "a/b", "../a", ".a", "-a", "ä", "a" * 65, "a\n", "a;b", "$(x)"]
)
def test_bad_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInput, match="a client's name must be of letters, digits"):
        make_federation(tmp_path / "lab", ["good", name], None, 9800)
    assert not (tmp_path / "lab").exists()


@pytest.mark.parametrize("host", ["", "a b", "ä.org", "a:9800", "::1", "http://a", "a/b"])
def test_bad_hosts(tmp_path: Path, host: str) -> None:
    with pytest.raises(InvalidInput, match="it must be a host name or an IPv4 address"):
        make_federation(tmp_path / "lab", ["a"], host, 9800)
    assert not (tmp_path / "lab").exists()


def test_another_host_needs_another_certificate(lab: Path) -> None:
    with pytest.raises(InvalidInput, match="host is 'other'; this federation's server is"):
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
def test_a_damaged_folder(lab: Path, content: str, reason: str) -> None:
    (lab / "federation.toml").write_text(content)
    with pytest.raises(InvalidInput, match=reason):
        ServerFolder.open(lab)


def test_folders_that_are_none(lab: Path, tmp_path: Path) -> None:
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
