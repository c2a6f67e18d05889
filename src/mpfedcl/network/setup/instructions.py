"""What a federation's folder says to people, and to systemd."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpfedcl.network.setup.folders import ClientFolder, ServerFolder


def federation_readme(folder: "ServerFolder") -> str:
    """Return the page of the whole federation."""
    listed = "\n".join(
        f"- `clients/{name}/` goes to the machine of {name}" for name in folder.clients
    )
    return f"""\
# A federation of {len(folder.clients)} clients

The server is `{folder.host}`, port {folder.port}. Every machine needs Python 3.11 or newer and
`pip install 'mpfedcl[flower]'`, all the same version.

- `server/` stays on the server. `server/ca.key` makes certificates: keep it closed, or take it away
  from the server once all clients have been made.
{listed}, over a channel that you trust: `node.key` in it is who that
  client is, and leaves its machine to nobody.

On the server:

    mpfedcl federation server .

On each client's machine, in its folder:

    mpfedcl federation client . --data FOLDER

Then on the server, once or as often as you like:

    mpfedcl federation start . experiment.toml

The server listens on its own machine alone: whoever reaches its port can start runs, without any
key. So that clients elsewhere reach it, put nginx with `server/nginx.conf` in front of it, or an
SSH tunnel or WireGuard between the machines.

More clients later: `mpfedcl federation init . --names NAME` makes `clients/NAME/` to hand out; a
server that is running lets the new key in within seconds.
"""


def client_readme(client: "ClientFolder") -> str:
    """Return the page of one client."""
    return f"""\
# {client.name}

This machine takes part in a federation under the name `{client.name}`. The server is
`{client.server}`.

    pip install 'mpfedcl[flower]'
    mpfedcl federation client . --data FOLDER

FOLDER holds this client's own images: `FOLDER/<class>/*.png|jpg`, or npz files. They stay here.
What leaves this machine is written down in docs/privacy.md of mpfedcl: weights, prototypes, counts
and accuracies.

`node.key` is who this client is: keep it closed (it is made with mode 0600), and do not copy it.
`memory/` is what this client keeps between rounds. `mpfedcl-client.service` is an example for
systemd.
"""


def nginx_configuration(folder: "ServerFolder") -> str:
    """Return an example for nginx: it lets clients through to their part, and nobody further."""
    server = folder.server.resolve()
    return f"""\
# An example for nginx: clients reach the part of the server that is theirs, /v1/fleet/, and nothing
# else. What starts runs (/v1/control/) and what runs them (/v1/runtime/) stays on this machine.
# Copy to /etc/nginx/conf.d/mpfedcl.conf; nginx -t; systemctl reload nginx.
server {{
    # The address under which clients come; the server itself has the same port of 127.0.0.1.
    listen {folder.host}:{folder.port} ssl;
    server_name {folder.host};
    ssl_certificate {server}/server.pem;
    ssl_certificate_key {server}/server.key;
    ssl_protocols TLSv1.2 TLSv1.3;

    # Flower cuts what it sends into pieces of at most 5 MB.
    client_max_body_size 8m;
    client_body_timeout 60s;

    location /v1/fleet/ {{
        proxy_pass https://127.0.0.1:{folder.port};
        proxy_http_version 1.1;
        proxy_ssl_verify on;
        proxy_ssl_trusted_certificate {server}/ca.pem;
        # nginx compares names, not addresses; the certificate is for this one too.
        proxy_ssl_name localhost;
        proxy_read_timeout 300s;
    }}

    location / {{
        return 404;
    }}
}}
"""


def server_systemd_unit() -> str:
    """Return an example unit for the server."""
    return _unit(
        "mpfedcl federation, server", "/opt/mpfedcl/bin/mpfedcl federation server /srv/federation"
    )


def client_systemd_unit(client: "ClientFolder") -> str:
    """Return an example unit for a client."""
    return _unit(
        f"mpfedcl federation, client {client.name}",
        "/opt/mpfedcl/bin/mpfedcl federation client /srv/federation --data /srv/images",
    )


def _unit(description: str, command: str) -> str:
    return f"""\
# An example: change the paths and the user, copy to /etc/systemd/system, systemctl enable --now.
[Unit]
Description={description}
After=network-online.target
Wants=network-online.target

[Service]
ExecStart={command}
User=mpfedcl
# The command itself starts a client again that the server still refuses; it ends for good reasons.
Restart=always
RestartSec=10
# The command ends what it has started, in good order, and then itself: at most 50 seconds.
KillMode=mixed
TimeoutStopSec=60
# It needs the network, its folder and its images, and nothing else.
CacheDirectory=mpfedcl
Environment=XDG_CACHE_HOME=/var/cache
NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectSystem=strict
ProtectHome=read-only
ReadWritePaths=/srv/federation
PrivateTmp=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectControlGroups=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
UMask=0077

[Install]
WantedBy=multi-user.target
"""
