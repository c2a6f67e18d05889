"""Attacks by another user of the server's machine, and by a stranger with access to its port.

A server and a client of a real federation run as processes, with TLS and keys. The attacker has the
public certificate `ca.pem` and connects to the port on 127.0.0.1. It tries to start a run with its
own app, to take over the server's tasks, to read keys, to join with its own key, and to exhaust
memory with one request. Then an operator with the control secret tries to run another app on the
client. Expected: every attempt fails.
"""

import hashlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import httpx
from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import StartRunRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient

from mpfedcl.network.flower.control import ShowSecret, stop_run
from mpfedcl.network.setup.folders import ServerFolder, write_app
from mpfedcl.network.setup.keys import make_node_key
from outcome import Outcome
from process_federation import SUPERLINK, ProcessFederation

Client = TypeVar("Client", ControlHttpClient, RuntimeHttpClient)
NOBODY = 65534
MARK = "code-was-run"
BODY = 200 * 2**20
WATCH_SECONDS = 15.0
"""So long does an app that would be imported at once have to show it."""
CLIENT = "client-0"


def attack(*, full: bool) -> list[Outcome]:
    """Try all of it on one federation."""
    with _federation() as federation:
        outcomes = [
            _try(name, attempt, federation)
            for name, attempt in {
                "another user: starts a run without the secret": start_run,
                "another user: starts a run with a wrong secret": start_run_with_wrong_secret,
                "another user: takes the server's work": acquire_task,
                "another user: reads keys, secret, memory": read_files,
                "a stranger: takes part with a key of its own": join_with_own_key,
                f"a stranger: a request of {BODY // 2**20} MB": fill_memory,
                "the operator: another app on server and client": ship_code,
            }.items()
        ]
        run = federation.begin("after", "--method", "fedgauss", "--clients", 1)
        code = run.program.wait(120)
    name = "... and afterwards an honest run"
    outcomes.append(Outcome(name, "finishes", "finishes" if code == 0 else "fails", code == 0))
    return outcomes


def start_run(federation: ProcessFederation, secret: str | None = None) -> str:
    """Submit an app that touches a file wherever it is imported."""
    shown = [ShowSecret(secret)] if secret is not None else []
    try:
        with _client(ControlHttpClient, federation, *shown) as client:
            client.StartRun(StartRunRequest(fab=fab_to_proto(_evil_app(federation.root))))
    except httpx.HTTPStatusError as error:
        return f"refused ({error.response.status_code})"
    return "it was started"


def start_run_with_wrong_secret(federation: ProcessFederation) -> str:
    """The same, with a guess."""
    return start_run(federation, "x" * 43)


def acquire_task(federation: ProcessFederation) -> str:
    """Ask for the next run's task as the server's own executor does."""
    try:
        with _client(RuntimeHttpClient, federation) as client:
            wanted = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
            client.AcquireTask(wanted)
    except httpx.HTTPStatusError as error:
        return f"refused ({error.response.status_code})"
    return "it was answered"


def read_files(federation: ProcessFederation) -> str:
    """Read as another user whatever lies in the federation's folder, but what is public."""
    if os.geteuid() != 0:
        return "refused (not tried: only root can become another user)"
    words = ["find", str(federation.folder), "-type", "f", "-readable"]
    found = subprocess.run(
        words, user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, text=True
    )
    open_files = [Path(line).name for line in found.stdout.splitlines()]
    private = [name for name in open_files if name not in ("federation.toml", "README.md")]
    return f"it read {private}" if private else "refused (no file)"


def join_with_own_key(federation: ProcessFederation) -> str:
    """Start a client whose folder has everything but a key that was let in."""
    folder = federation.root / "stranger"
    subprocess.run(["cp", "-r", federation.folder / "clients" / CLIENT, folder], check=True)
    (folder / "node.key").unlink()
    make_node_key(folder / "node.key", federation.root / "stranger.pub")
    program = federation.start("client", folder, "--share", 0)
    try:
        program.wait_for_output(f"The server refuses {CLIENT}: ")
        return "refused (not let in)"
    finally:
        program.interrupt()
        program.wait(60)


def fill_memory(federation: ProcessFederation) -> str:
    """Send a large body to the clients' part, where Flower would read it before the key."""
    process = federation.find_one(SUPERLINK)
    before = process.memory_info().rss
    authority = str(federation.folder / "server" / "ca.pem")
    url = f"https://127.0.0.1:{federation.port}/v1/fleet/push-object"
    headers = {"content-type": "application/protobuf"}
    try:
        code = httpx.post(url, content=bytes(BODY), headers=headers, verify=authority).status_code
    except httpx.TransportError:
        code = 0
    grown = process.memory_info().rss - before
    if grown > BODY // 4 or code == 200:
        return f"the server grew by {grown / 2**20:.0f} MB ({code})"
    return f"refused ({code or 'closed'}, {grown / 2**20:.0f} MB)"


def ship_code(federation: ProcessFederation) -> str:
    """Start a run with the secret, whose app is not the installed one, under our app's name."""
    folder = ServerFolder.open(federation.folder)
    with _client(ControlHttpClient, federation, ShowSecret(folder.read_secret())) as client:
        request = StartRunRequest(fab=fab_to_proto(_evil_app(federation.root)))
        number = client.StartRun(request).run_id
    end = time.monotonic() + WATCH_SECONDS
    while time.monotonic() < end and not _marks(federation):
        time.sleep(0.5)
    stop_run(folder, number)
    return "refused (the app was never unpacked)"


def _try(
    name: str, attempt: Callable[[ProcessFederation], str], federation: ProcessFederation
) -> Outcome:
    seen = attempt(federation)
    if found := _marks(federation):
        seen = f"code was run: {found}"
    return Outcome(name, "refused", seen, seen.startswith("refused"))


@contextmanager
def _federation() -> Iterator[ProcessFederation]:
    """Run a server and a client; others may enter the folder that theirs are in."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        root.chmod(0o755)
        federation = ProcessFederation(root / "f")
        try:
            federation.make("--clients", 1)
            federation.start_server()
            federation.start_clients({CLIENT: ("--share", 0)})
            yield federation
        finally:
            federation.finish()


def _client(kind: type[Client], federation: ProcessFederation, *interceptors: ShowSecret) -> Client:
    authority = (federation.folder / "server" / "ca.pem").read_bytes()
    return kind.from_server_address(
        f"127.0.0.1:{federation.port}",
        insecure=False,
        root_certificates=authority,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr"), *interceptors],
    )


def _evil_app(root: Path) -> Fab:
    """Return an app that is called as ours, and touches a file where it is imported."""
    folder = root / "evil"
    (folder / "mpfedcl").mkdir(parents=True, exist_ok=True)
    write_app(folder)
    code = f"open({str(root / MARK)!r}, 'a').write('x')\nserver_app = client_app = None\n"
    for name in ("__init__", "flower_app"):
        (folder / "mpfedcl" / f"{name}.py").write_text(code)
    content = build_fab_from_disk(folder)
    return Fab(hashlib.sha256(content).hexdigest(), content, {})


def _marks(federation: ProcessFederation) -> list[str]:
    return [each.name for each in federation.root.rglob(MARK)]
