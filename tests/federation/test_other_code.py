"""Neither a server's operator nor another local user can run code on a client or the server.

A federation with one client, in a folder that every user of this machine may enter.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from flwr.cli.build import build_fab_from_files
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import ListRunsRequest, StartRunRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab

from mpfedcl.network.flower.control import ShowSecret
from mpfedcl.network.flower.programs import read_address
from mpfedcl.network.setup.folders import REQUEST_KEYS, ServerFolder
from process_federation import LONG, ProcessFederation, wait_until

pytestmark = [
    pytest.mark.federation,
    # Flower's own packer of apps uses a deprecated function of another library.
    pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning"),
]

NOBODY = 65_534


@pytest.fixture(scope="module")
def open_place() -> Iterator[Path]:
    """A folder that all users may enter, like many home folders."""
    place = Path(tempfile.mkdtemp(prefix="mpfedcl-test-"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


@pytest.fixture(scope="module")
def lab(open_place: Path) -> Iterator[ProcessFederation]:
    federation = ProcessFederation(open_place / "federation")
    try:
        federation.make("--names", "client-0")
        federation.start_server()
        federation.start_clients({"client-0": ("--share", 0)})
        yield federation
    finally:
        federation.finish()


def other_app(proof: Path, publisher: str, name: str) -> bytes:
    """Return an app that leaves a proof if any part of it is imported or installed."""
    code = textwrap.dedent(
        f"""
        import os, sys
        with open({str(proof)!r}, "a") as file:
            print(os.getuid(), os.getpid(), sys.argv, file=file)
        from flwr.app import Message, RecordDict
        from flwr.clientapp import ClientApp
        from flwr.serverapp import ServerApp
        server_app, client_app = ServerApp(), ClientApp()

        @server_app.main()
        def main(grid, context):
            # A client imports the app when it gets a message.
            messages = [Message(RecordDict(), each, "query") for each in grid.get_node_ids()]
            grid.send_and_receive(messages, timeout=60)
        """
    ).encode()
    components = {"serverapp": "evil:server_app", "clientapp": "evil:client_app"}
    flower = {
        "publisher": publisher,
        "fab-include": ["**/*.py"],
        "components": components,
        "config": dict.fromkeys(REQUEST_KEYS, ""),
    }
    project = {"name": name, "version": "1.0.0", "description": "x", "license": "Apache-2.0"}
    document = {"project": {**project, "dependencies": []}, "tool": {"flwr": {"app": flower}}}
    files = {"pyproject.toml": tomli_w.dumps(document).encode()}
    # As a separate module, in place of ours, and as a module that Python imports at startup.
    places = ("evil.py", "mpfedcl/__init__.py", "mpfedcl/flower_app.py", "sitecustomize.py")
    return build_fab_from_files({**files, **dict.fromkeys(places, code)})[0]


def submit(lab: ProcessFederation, app: bytes, config: dict[str, str], secret: str | None) -> int:
    folder = ServerFolder.open(lab.folder)
    address, authority = read_address(folder), folder.authority.read_bytes()
    shown = [] if secret is None else [ShowSecret(secret)]
    request = StartRunRequest(
        fab=fab_to_proto(Fab(hashlib.sha256(app).hexdigest(), app, {})),
        override_config=user_config_to_proto(dict(config)),
    )
    with ControlHttpClient.from_server_address(address, False, authority, shown) as client:
        return int(client.StartRun(request).run_id)


def state_of(lab: ProcessFederation, number: int) -> Any:
    folder = ServerFolder.open(lab.folder)
    address, authority = read_address(folder), folder.authority.read_bytes()
    shown = [ShowSecret(folder.read_secret())]
    with ControlHttpClient.from_server_address(address, False, authority, shown) as client:
        return client.ListRuns(ListRunsRequest(run_id=number)).run_dict[number].status


@pytest.mark.parametrize(
    ("publisher", "name"), [("evil", "evil-app"), ("mpfedcl", "mpfedcl-app")], ids=["evil", "ours"]
)
def test_submitted_code_is_never_executed(
    lab: ProcessFederation, open_place: Path, publisher: str, name: str
) -> None:
    """The app is submitted with the secret, once under its own name and once under ours."""
    proof, out = open_place / f"proof-{publisher}", open_place / f"run-{publisher}"
    document = 'method = "fedavg"\nrounds = 1\nclients = 1\n[partition]\nalpha = 10.0\n'
    config = {"experiment": document, "out": str(out)}
    app = other_app(proof, publisher, name)
    number = submit(lab, app, config, ServerFolder.open(lab.folder).read_secret())
    state = wait_until(
        lambda: found if (found := state_of(lab, number)).status == "finished" else None, "it ends"
    )
    if publisher == "evil":
        assert state.sub_status == "failed"
        assert "this server runs only mpfedcl's" in state.details
        assert not out.exists()
    else:
        # The client was asked and has trained with the installed code.
        assert state.sub_status == "completed", state.details
        [record] = map(json.loads, (out / "rounds.jsonl").read_text().splitlines())
        assert record["clients"]["answered"] == ["client-0"]
    assert not proof.exists()
    # The app is not unpacked on any disk either, so it cannot be imported later.
    assert not [str(path) for path in open_place.rglob("evil*")]


def test_submitted_code_leaves_a_proof_if_executed(open_place: Path) -> None:
    """The app leaves its proof if Flower itself installs and imports it."""
    proof, home = open_place / "proof-of-proof", open_place / "home"
    file = open_place / "app.fab"
    file.write_bytes(other_app(proof, "evil", "evil-app"))
    code = (
        "import sys; from pathlib import Path; from flwr.cli.install import install_from_fab;"
        "place = install_from_fab(Path(sys.argv[1]).read_bytes(), skip_prompt=True);"
        "sys.path.insert(0, str(place)); import evil"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)],
        env={**os.environ, "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert proof.exists()
    proof.unlink()
    shutil.rmtree(home)
    file.unlink()


ASK = """
import json, ssl, sys, urllib.error, urllib.request
context = ssl.create_default_context(cafile=sys.argv[2])
codes = {}
for path in sys.argv[3:]:
    kind = {"Content-Type": "application/protobuf"}
    request = urllib.request.Request(sys.argv[1] + path, data=b"", headers=kind, method="POST")
    try:
        codes[path] = urllib.request.urlopen(request, context=context, timeout=60).status
    except urllib.error.HTTPError as error:
        codes[path] = error.code
print(json.dumps(codes))
"""

LOOK = """
import json, os, sys
opened = []
for folder, folders, files in os.walk(sys.argv[1]):
    for name in files:
        path = os.path.join(folder, name)
        for mode in ("rb", "r+b"):
            try:
                open(path, mode).close()
                opened.append([mode, os.path.relpath(path, sys.argv[1])])
            except OSError:
                pass
try:
    open(os.path.join(sys.argv[1], "new"), "x")
    opened.append(["x", "new"])
except OSError:
    pass
print(json.dumps(sorted(opened)))
"""


def as_nobody(code: str, *words: object) -> Any:
    """Run Python as the user `nobody`."""
    drop = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    python = shutil.which("python3", path="/usr/bin:/bin")
    assert python is not None
    done = subprocess.run(
        [*drop, python, "-c", code, *map(str, words)],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


needs_root = pytest.mark.skipif(
    os.geteuid() != 0
    or not shutil.which("setpriv")
    or not shutil.which("python3", path="/usr/bin"),
    reason="needs root, setpriv and a Python that all users may run, to become another user",
)


@needs_root
def test_other_users_cannot_read_keys_secrets_or_models(lab: ProcessFederation) -> None:
    assert as_nobody(LOOK, lab.folder) == [["rb", "README.md"], ["rb", "federation.toml"]]


@needs_root
def test_other_users_cannot_start_or_control_runs(lab: ProcessFederation, open_place: Path) -> None:
    """Requests use the public certificate, without the secret."""
    public = open_place / "ca.pem"
    shutil.copy(lab.folder / "server/ca.pem", public)
    parts = ("control/start-run", "control/stop-run", "control/list-runs", "control/register-node")
    more = ("runtime/acquire-task", "runtime/push-messages", "runtime/push-task-output")
    place = f"https://127.0.0.1:{lab.port}"
    paths = [f"/v1/{part}" for part in (*parts, *more)] + ["/docs", "/openapi.json", "/v1/fleet"]
    paths.append("/v1/fleet/activate-node")
    assert as_nobody(ASK, place, public, *paths) == dict.fromkeys(paths, 401)


def test_only_the_server_listens(lab: ProcessFederation) -> None:
    """Clients listen on no port, and the server on one."""
    listening = [
        tuple(each.laddr)
        for process in lab.processes()
        for each in process.net_connections("inet")
        if each.status == "LISTEN"
    ]
    assert listening == [("127.0.0.1", lab.port)]


def test_secret_is_not_visible_in_processes_and_logs(lab: ProcessFederation) -> None:
    """All users can read the command lines of all processes; logs are often shared."""
    secret = ServerFolder.open(lab.folder).read_secret()
    for process, (command, _) in lab.processes().items():
        assert secret not in command, process
        assert secret not in str(process.environ()), process
    for log in lab.root.rglob("*.log"):
        assert secret not in log.read_text(errors="replace"), log
    done = lab.call("start", "lab", "--method", "fedavg", "--rounds", 1, "--out", lab.root / "last")
    assert done.returncode == 0, done.stderr
    assert secret not in done.stdout + done.stderr
