"""What a federation's folder says to people, to nginx and to systemd: templates, filled in."""

from importlib import resources
from string import Template
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpfedcl.network.setup.folders import ClientFolder, ServerFolder

_COMMAND = "/opt/mpfedcl/bin/mpfedcl federation"


def federation_readme(folder: "ServerFolder") -> str:
    """Return the page of the whole federation."""
    clients = [f"- `clients/{name}/` goes to the machine of {name}" for name in folder.clients]
    return _fill(
        "federation.md",
        num_clients=len(clients),
        clients="\n".join(clients),
        host=folder.host,
        port=folder.port,
    )


def client_readme(client: "ClientFolder") -> str:
    """Return the page of one client."""
    return _fill("client.md", name=client.name, server=client.server)


def nginx_configuration(folder: "ServerFolder") -> str:
    """Return an example for nginx: it lets clients through to their part, and nobody further."""
    return _fill("nginx.conf", host=folder.host, port=folder.port, folder=folder.server.resolve())


def server_systemd_unit() -> str:
    """Return an example unit for the server."""
    return _fill(
        "systemd.service",
        description="mpfedcl federation, server",
        command=f"{_COMMAND} server /srv/federation",
    )


def client_systemd_unit(client: "ClientFolder") -> str:
    """Return an example unit for a client."""
    return _fill(
        "systemd.service",
        description=f"mpfedcl federation, client {client.name}",
        command=f"{_COMMAND} client /srv/federation --data /srv/images",
    )


def _fill(template: str, **values: object) -> str:
    file = resources.files("mpfedcl.network.setup") / "templates" / template
    return Template(file.read_text(encoding="utf-8")).substitute(values)
