"""The life cycle of keys and certificates: revoke and rotate clients' keys, renew certificates."""

import hashlib
import tomllib

import tomli_w

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import write_atomically
from mpfedcl.network.setup.folders import (
    ServerFolder,
    make_certificate,
    make_client,
    write_known_clients,
)
from mpfedcl.network.setup.keys import (
    describe_end,
    find_certificate_end,
    has_expired,
    make_authority,
)

RENEW = "mpfedcl federation renew"


def revoke_client(folder: ServerFolder, name: str) -> ServerFolder:
    """Remove a client and revoke its key; an interrupted call can be repeated."""
    _check_name(name, {*folder.clients, *(each.stem for each in folder.public_keys())})
    # First, because a running server looks at it.
    _bar_key(folder, name)
    path = folder.root / "federation.toml"
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    values["clients"] = [each for each in values["clients"] if each != name]
    write_atomically(path, tomli_w.dumps(values).encode())
    left = ServerFolder.open(folder.root)
    write_known_clients(left)
    return left


def rotate_client(folder: ServerFolder, name: str) -> None:
    """Revoke a client's key and create another in the client's folder on this machine."""
    _check_name(name, set(folder.clients))
    _bar_key(folder, name)
    make_client(folder, name)
    write_known_clients(folder)


def renew_certificates(folder: ServerFolder, *, authority: bool) -> None:
    """Create a new server certificate, with `authority` also that of the authority (CA).

    Keys are kept, so that the clients' old `ca.pem` accepts both until it expires.
    """
    key = folder.server / "ca.key"
    if not key.is_file():
        raise InvalidInput(
            f"{key} does not exist; it must be there while certificates are renewed: copy it back "
            "from where it is kept."
        )
    if authority:
        make_authority(folder.authority, key)
        for place in (folder.root / "clients").glob("*/client.toml"):
            write_atomically(place.with_name("ca.pem"), folder.authority.read_bytes())
    elif has_expired(find_certificate_end(folder.authority)):
        raise InvalidInput(
            f"{folder.authority} has expired; it must be renewed, too: {RENEW} {folder.root} "
            "--authority, and each client needs the new ca.pem."
        )
    make_certificate(folder)


def check_certificates(folder: ServerFolder) -> list[str]:
    """Return warnings about certificates that expire soon; reject expired ones."""
    again = f"{RENEW} {folder.root}"
    hand_out = f"{again} --authority renews it, and each client needs the new ca.pem"
    warnings = []
    for path, remedy in (
        (folder.authority, hand_out),
        (folder.server / "server.pem", f"{again} renews it"),
    ):
        end = find_certificate_end(path)
        if sentence := describe_end(str(path), end, remedy):
            if has_expired(end):
                raise InvalidInput(sentence)
            warnings.append(sentence)
    return warnings


def revoked_names(folder: ServerFolder) -> list[str]:
    """Return the names of clients without a valid key that had one."""
    names = {each.name.rpartition("@")[0] for each in folder.revoked.glob("*@*.pub")}
    return sorted(names - set(folder.clients))


def _bar_key(folder: ServerFolder, name: str) -> None:
    """Move a client's public key to the revoked ones."""
    path = folder.public_key(name)
    if path.is_file():
        folder.revoked.mkdir(mode=0o700, exist_ok=True)
        number = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        path.replace(folder.revoked / f"{name}@{number}.pub")


def _check_name(name: str, known: set[str]) -> None:
    if name not in known:
        names = ", ".join(sorted(known)) or "a client's, and there are none"
        raise InvalidInput(f"name is {name!r}; it must be one of {names}.")
