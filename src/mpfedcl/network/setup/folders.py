"""The folder of a federation: clients, certificates, keys, and instructions for each machine.

DIR/federation.toml                    address and clients
DIR/README.md                          instructions
DIR/server/                            certificate, key and secret, the clients' public keys
DIR/clients/<name>/                    the files for that client's machine
"""

import contextlib
import re
import secrets
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any, Self

import tomli_w
from pydantic import TypeAdapter, ValidationError

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import write_atomically
from mpfedcl.network.client.policy import ClientPolicy

REQUEST_KEYS = ("experiment", "out", "resume", "rounds", "status", "update", "client")
"""The keys of a request to the server's executor; an empty text is a key that is not given.
experiment: a TOML document. out, resume: the run directory on the server. rounds: of a run that is
resumed. status: the status file. update: a finished one-shot run that the client named `client`
joins, or replaces its data in."""
FORMAT = 1
LOOPBACK = ("localhost", "127.0.0.1")
_SHORTEST_SECRET = 32
_COMMAND = "/opt/mpfedcl/bin/mpfedcl federation"
_METRICS = 9464
"""Port of the metrics of a server in a container."""
_SERVER_CONTAINER = """\
    # Only this machine reaches them. Clients of other machines: nginx.conf, SSH or WireGuard.
    ports: ["127.0.0.1:{port}:{port}", "127.0.0.1:{metrics}:{metrics}"]
    healthcheck:
      test: [CMD, python, -c, "from urllib.request import *; urlopen({health!r})"]
      interval: 30s
      timeout: 10s
      start_period: 60s"""


@dataclass
class ServerFolder:
    """The server's side of a federation folder."""

    root: Path
    host: str
    """The server's name or address as seen by clients."""
    port: int
    clients: tuple[str, ...]

    def __post_init__(self) -> None:
        self.server = self.root / "server"
        """The files for the server's machine."""
        self.authority = self.server / "ca.pem"
        """The CA certificate."""
        self.secret = self.server / "control.secret"
        """File with the secret that allows starting runs."""
        self.app = self.server / "app"
        """The app that Flower requires with a run; it contains no code."""
        self.flower_home = self.server / "flower"
        """FLWR_HOME of this federation."""
        self.status = self.server / "status.json"
        """The status file."""
        self.revoked = self.server / "revoked"
        """The public keys that are never admitted again."""
        self.totals = self.server / "totals.json"
        """Counters over all runs, for metrics."""

    @classmethod
    def open(cls, root: Path) -> Self:
        """Read the folder of a federation."""
        values = _read(root / "federation.toml", "a federation made by mpfedcl federation init")
        try:
            return cls(root, str(values["host"]), int(values["port"]), tuple(values["clients"]))
        except (KeyError, TypeError, ValueError):
            raise InvalidInput(
                f"{root / 'federation.toml'} must have host, port and clients."
            ) from None

    def public_key(self, client: str) -> Path:
        """Return a client's public key."""
        return self.server / "clients" / f"{client}.pub"

    def public_keys(self) -> list[Path]:
        """Return the files with the public keys of all clients."""
        return sorted((self.server / "clients").glob("*.pub"))

    def make_secret(self) -> None:
        """Create the secret of the control API, unless it exists."""
        from mpfedcl.network.setup.keys import write_private

        with contextlib.suppress(FileExistsError):
            write_private(self.secret, f"{secrets.token_urlsafe(32)}\n".encode())

    def read_secret(self) -> str:
        """Return the secret of the control API."""
        return read_secret(self.secret)


@dataclass
class ClientFolder:
    """The client's side; the only folder on the client's machine."""

    root: Path
    name: str
    server: str
    """host:port"""

    def __post_init__(self) -> None:
        self.authority = self.root / "ca.pem"
        """The CA certificate."""
        self.key = self.root / "node.key"
        self.known_clients = self.root / "known-clients.pub"
        """The public keys of all clients; secure aggregation trusts no others."""
        self.memory = self.root / "memory"
        """The client's state between rounds."""
        self.policy = self.root / "policy.toml"
        """What the client's operator allows."""
        self.flower_home = self.root / "flower"
        self.settings = self.root / "node.toml"
        """The operator's settings at the last start."""
        self.log = self.root / "supernode.log"

    @classmethod
    def open(cls, path: Path, name: str | None) -> Self:
        """Find a client's folder: `path` itself, or the subfolder of a federation's folder."""
        root = path
        if not (path / "client.toml").is_file() and name is not None:
            root = path / "clients" / name
        if not (root / "client.toml").is_file():
            known = sorted(each.name for each in (path / "clients").glob("*") if each.is_dir())
            if known:
                raise InvalidInput(f"name is {name!r}; it must be one of {', '.join(known)}.")
            raise InvalidInput(
                f"{path} is not a client's folder; it must be DIR/clients/NAME as mpfedcl "
                "federation init made it, or DIR with --name NAME."
            )
        values = _read(root / "client.toml", "a client's folder")
        found = str(values.get("name", ""))
        if name is not None and name != found:
            raise InvalidInput(f"name is {name!r}; this is the folder of {found!r}.")
        return cls(root, found, str(values.get("server", "")))


@dataclass(frozen=True)
class ClientSettings:
    """The operator's settings of a client; only the name is sent to the server."""

    name: str
    state: Path
    """Folder for the state between rounds."""
    data: Path | None = None
    """The client's own images or vectors; with `share`, the data folder."""
    share: int | None = None
    """For a trial: this part of the experiment's data set instead of own data."""
    encoder: str | None = None
    """The client's own encoder, such as onnx:PATH, instead of the server's choice."""
    encoder_weights: Path | None = None
    policy: ClientPolicy = field(default_factory=ClientPolicy)
    """What the client allows, whatever the server asks for."""
    device: str = "cpu"
    key: Path | None = None
    """The client's private key, which signs its part in secure aggregation."""
    known_clients: Path | None = None
    """The public keys of the clients that this one sums its updates with."""
    server: str = ""
    """The server's address, host:port."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file that `write` has written."""
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        try:
            return TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            name = ".".join(map(str, first["loc"]))
            raise InvalidInput(
                f"{path} is not as mpfedcl writes it: {name}: {first['msg']}. Start it again."
            ) from None

    def write(self, path: Path) -> None:
        """Write the settings to a file for the client's process."""
        values = TypeAdapter(type(self)).dump_python(self, mode="json", exclude_none=True)
        write_atomically(path, tomli_w.dumps(values).encode())


def read_secret(path: Path) -> str:
    """Return the secret in a file; reject a short one."""
    try:
        secret = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        raise InvalidInput(
            f"{path} does not exist; the first start of the server creates it."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(
            f"{path} cannot be read ({error}); only the user who runs the server can start runs."
        ) from None
    if len(secret) < _SHORTEST_SECRET:
        raise InvalidInput(
            f"{path} has {len(secret)} characters; it must have at least {_SHORTEST_SECRET}: "
            "delete the file, and the server creates a new secret."
        )
    return secret


def make_federation(root: Path, names: Sequence[str], host: str | None, port: int) -> ServerFolder:
    """Create a federation's folder, or add clients to one; existing keys are never replaced."""
    # Imported here, because clients do not need `cryptography`.
    from mpfedcl.network.setup.keys import make_authority

    existing = ServerFolder.open(root) if (root / "federation.toml").is_file() else None
    if root.exists() and not root.is_dir():
        raise InvalidInput(f"{root} is a file; it must be a new folder, or a federation's.")
    # An interrupted call leaves these, and the same call completes the folder.
    parts = {"server", "clients", "README.md"}
    if existing is None and root.exists() and {each.name for each in root.iterdir()} - parts:
        raise InvalidInput(f"{root} is not empty; it must be a new folder, or a federation's.")
    if host is not None and not re.fullmatch(r"[A-Za-z0-9.-]{1,253}", host):
        raise InvalidInput(
            f"host is {host!r}; it must be a host name or an IPv4 address, without port."
        )
    if existing is not None and host not in (None, existing.host):
        raise InvalidInput(
            f"host is {host!r}; it must be {existing.host!r}, as in the server's certificate: make "
            "a new federation, or leave it out."
        )
    known = existing.clients if existing else ()
    for name in names:
        _check_client_name(name)
    clients = tuple(sorted({*known, *names}))
    folder = existing or ServerFolder(root, host or LOOPBACK[1], port, clients)
    folder = ServerFolder(root, folder.host, folder.port, clients)
    for part in (folder.server / "clients", folder.app, folder.flower_home, root / "clients"):
        part.mkdir(parents=True, exist_ok=True)
    # Databases and logs will be created in it.
    folder.server.chmod(0o700)
    folder.make_secret()
    if not folder.authority.is_file():
        make_authority(folder.authority, folder.server / "ca.key")
    if not (folder.server / "server.pem").is_file():
        make_certificate(folder)
    for name in clients:
        # A client folder that was moved to its machine must not get a new key.
        if (folder.root / "clients" / name / "node.key").is_file() or name not in known:
            make_client(folder, name)
    write_known_clients(folder)
    write_app(folder.app)
    listed = "\n".join(f"- `clients/{each}/` goes to the machine of {each}" for each in clients)
    address = {"host": folder.host, "port": folder.port}
    _write_page(
        root / "README.md", "federation.md", num_clients=len(clients), clients=listed, **address
    )
    _write_page(
        folder.server / "mpfedcl-server.service",
        "systemd.service",
        description="mpfedcl federation, server",
        command=f"{_COMMAND} server /srv/federation",
    )
    _write_container(
        folder.server,
        service="server",
        folder="..",
        command=f"[server, /srv/federation, --bind, 0.0.0.0, --log-json, --metrics-port, "
        f'"{_METRICS}", --metrics-bind, 0.0.0.0]',
        more=_SERVER_CONTAINER.format(
            port=folder.port, metrics=_METRICS, health=f"http://127.0.0.1:{_METRICS}/healthz"
        ),
    )
    # nginx passes only the clients' API.
    place = folder.server.resolve()
    _write_page(folder.server / "nginx.conf", "nginx.conf", folder=place, **address)
    # Last, because it marks the folder as complete.
    values = {"format": FORMAT, "host": folder.host, "port": folder.port, "clients": list(clients)}
    write_atomically(root / "federation.toml", tomli_w.dumps(values).encode())
    return folder


def write_known_clients(folder: ServerFolder) -> None:
    """Write the public keys of all clients into the clients' folders on this machine."""
    found = {each: folder.public_key(each) for each in folder.clients}
    # Without the comment that a key of the operator's own may have.
    lines = [
        [*file.read_text(encoding="utf-8").split()[:2], name]
        for name, file in found.items()
        if file.is_file()
    ]
    keys = "".join(" ".join(line) + "\n" for line in lines).encode()
    for place in (folder.root / "clients" / name for name in folder.clients):
        if place.is_dir():
            write_atomically(place / "known-clients.pub", keys)


def write_app(folder: Path) -> None:
    """Write the Flower app, which only refers to the installed package."""
    flower = {
        "publisher": "mpfedcl",
        # Flower requires these names; our executors load neither.
        "components": dict.fromkeys(("serverapp", "clientapp"), "mpfedcl.flower_app:main"),
        "config": dict.fromkeys(REQUEST_KEYS, ""),
    }
    content = {
        "project": {
            "name": "mpfedcl-app",
            "version": "1.0.0",
            "description": "mpfedcl over Flower",
            "license": "Apache-2.0",
            "dependencies": ["mpfedcl[flower]"],
        },
        "tool": {"flwr": {"app": flower}},
    }
    write_atomically(folder / "pyproject.toml", tomli_w.dumps(content).encode())


def make_certificate(folder: ServerFolder) -> None:
    """Create the server's certificate; it replaces an existing one and keeps its key."""
    from mpfedcl.network.setup.keys import make_server_certificate

    make_server_certificate(
        folder.server / "server.pem",
        folder.server / "server.key",
        folder.authority,
        folder.server / "ca.key",
        list(dict.fromkeys([folder.host, *LOOPBACK])),
    )


def make_client(folder: ServerFolder, name: str) -> None:
    """Create a client's folder and its key, unless it has one that was not revoked."""
    from mpfedcl.network.setup.keys import make_node_key

    place = folder.root / "clients" / name
    place.mkdir(exist_ok=True)
    place.chmod(0o700)
    client = ClientFolder(place, name, f"{folder.host}:{folder.port}")
    if not (client.key.is_file() and folder.public_key(name).is_file()):
        # Without its public key here, the key of a client that comes back was revoked.
        if any(folder.revoked.glob(f"{name}@*")):
            client.key.unlink(missing_ok=True)
        make_node_key(client.key, folder.public_key(name))
    write_atomically(client.authority, folder.authority.read_bytes())
    _write_page(place / "README.md", "client.md", name=name, server=client.server)
    _write_page(
        place / "mpfedcl-client.service",
        "systemd.service",
        description=f"mpfedcl federation, client {name}",
        command=f"{_COMMAND} client /srv/federation --data /srv/images",
    )
    if not client.policy.is_file():
        ClientPolicy().write(client.policy)
    _write_container(
        place,
        service="client",
        folder=".",
        command="[client, /srv/federation, --data, /srv/images, --log-json]",
        more="      - /srv/images:/srv/images:ro",
    )
    values = {"format": FORMAT, "name": name, "server": client.server}
    write_atomically(place / "client.toml", tomli_w.dumps(values).encode())


def _write_container(place: Path, **values: object) -> None:
    """Write the examples for containers, unless they exist: operators edit them in place."""
    if not (place / "compose.yaml").is_file():
        _write_page(place / "Containerfile", "Containerfile")
        # Keys must not get into an image or to its builder.
        write_atomically(place / ".dockerignore", b"*\n!Containerfile\n!*.whl\n")
        _write_page(place / "compose.yaml", "compose.yaml", **values)


def _write_page(path: Path, template: str, **values: object) -> None:
    """Write a page from a template."""
    file = resources.files("mpfedcl.network.setup") / "templates" / template
    content = Template(file.read_text(encoding="utf-8")).substitute(values)
    write_atomically(path, content.encode())


def _check_client_name(name: str) -> None:
    """Reject names that are unsafe as folder or argument."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise InvalidInput(
            f"names has {name!r}; a client's name must be of letters, digits, '-', '_' and '.', "
            "begin with a letter or digit, and have at most 64 characters."
        )


def _read(path: Path, what: str) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidInput(f"{path} does not exist; the folder must be {what}.") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}.") from None
    if values.get("format") != FORMAT:
        raise InvalidInput(f"{path} has format {values.get('format')!r}; it must be {FORMAT}.")
    return values
