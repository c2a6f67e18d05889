"""Two machines (network namespaces) behind nginx, with a connection that can be cut."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from process_federation import LONG, FaultLog, ProcessFederation, wait_until

_CANNOT = [
    word
    for word, is_missing in {
        "the right to make network namespaces": os.geteuid() != 0,
        "the command ip (iproute2)": shutil.which("ip") is None,
        "nginx": shutil.which("nginx") is None,
    }.items()
    if is_missing
]

pytestmark = [
    pytest.mark.federation,
    pytest.mark.skipif(bool(_CANNOT), reason=f"missing here: {', '.join(_CANNOT)}"),
]

HERE, THERE = f"mpfedcl-{os.getpid()}-s", f"mpfedcl-{os.getpid()}-c"
ADDRESSES = {HERE: "10.78.0.1", THERE: "10.78.0.2"}
ENDS = {HERE: "mpf-s", THERE: "mpf-c"}
INSIDE_THERE = ("ip", "netns", "exec", THERE)

ASK = """
import ssl, sys, urllib.error, urllib.request
context = ssl.create_default_context(cafile=sys.argv[2])
try:
    kind = {"Content-Type": "application/protobuf"}
    request = urllib.request.Request(sys.argv[1], data=b"", headers=kind, method="POST")
    print(urllib.request.urlopen(request, context=context, timeout=60).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"network namespaces cannot be made here: {done.stderr.strip()}")


@contextmanager
def two_machines() -> Iterator[None]:
    try:
        for name in ADDRESSES:
            ip("netns", "add", name)
        first, second = ENDS.values()
        cable = ["type", "veth", "peer", "name", second, "netns", THERE]
        ip("link", "add", first, "netns", HERE, *cable)
        for name, address in ADDRESSES.items():
            ip("-n", name, "address", "add", f"{address}/24", "dev", ENDS[name])
            ip("-n", name, "link", "set", ENDS[name], "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in ADDRESSES:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@contextmanager
def proxy(federation: ProcessFederation) -> Iterator[None]:
    """Run Debian's nginx with the unchanged example configuration of `init`."""
    place = federation.root / "nginx"
    place.mkdir()
    temporary = "".join(
        f"{kind}_temp_path {place / kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (place / "main.conf").write_text(
        f"daemon off;\npid {place}/pid;\nerror_log {place}/error.log;\nuser root;\n"
        "worker_processes 1;\nevents {}\n"
        f"http {{\naccess_log off;\n{temporary}include {federation.folder}/server/nginx.conf;\n}}\n"
    )
    command = ["nginx", "-c", str(place / "main.conf"), "-e", str(place / "error.log")]
    process = subprocess.Popen([*federation.prefix, *command], env=federation.environment())
    try:
        wait_until((place / "pid").is_file, "nginx runs", 30)
        yield
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessFederation]:
    """A server and a client on one machine, a second client on another."""
    root = tmp_path_factory.mktemp("machines")
    with two_machines():
        federation = ProcessFederation(root, port=9800, prefix=("ip", "netns", "exec", HERE))
        try:
            federation.make("--clients", 2, "--host", ADDRESSES[HERE])
            federation.start_server()
            with proxy(federation):
                federation.start_clients({"client-0": ("--share", 0)})
                federation.start_clients({"client-1": ("--share", 1)}, prefix=INSIDE_THERE)
                yield federation
        finally:
            federation.finish()


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("control/list-runs", 404),
        ("control/start-run", 404),
        ("runtime/acquire-task", 404),
        ("fleet/../control/list-runs", 404),
        ("fleet/%2e%2e/control/list-runs", 404),
        ("fleet/pull-messages", 401),
    ],
)
def test_proxy_passes_only_the_fleet_api(apart: ProcessFederation, path: str, code: int) -> None:
    assert ask(apart, INSIDE_THERE, ADDRESSES[HERE], path) == code


def test_local_requests_require_the_secret(apart: ProcessFederation) -> None:
    for path in ("control/list-runs", "control/start-run", "runtime/acquire-task"):
        assert ask(apart, apart.prefix, "127.0.0.1", path) == 401


def ask(federation: ProcessFederation, prefix: tuple[str, ...], address: str, path: str) -> int:
    """Send a request from one of the machines; return the HTTP code of the response."""
    words = [f"https://{address}:9800/v1/{path}", str(federation.folder / "server/ca.pem")]
    done = subprocess.run(
        [*prefix, sys.executable, "-c", ASK, *words],
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_cut_network_costs_only_the_rounds_in_between(
    apart: ProcessFederation, fault_log: FaultLog
) -> None:
    settings = ["--clients", 2, "--rounds", 1000, "--network.round-timeout", 20]
    run = apart.begin("cut", "--method", "fedavg", *settings)
    number = run.wait_for_training("client-1", 2)
    ip("-n", HERE, "link", "set", ENDS[HERE], "down")
    began = time.monotonic()
    # On a busy machine the other client may be late in a round, too.
    record = run.wait_for_record(
        lambda each: each["clients"]["answered"] == ["client-0"], "one is missing", number - 1
    )
    ip("-n", HERE, "link", "set", ENDS[HERE], "up")
    back = time.monotonic()
    run.wait_for_answer("client-1", record["round"])
    now = time.monotonic()
    fault_log.write(
        f"the network cut for {back - began:.0f} s",
        "missing; tries again by itself",
        now - back,
        "its answers in between",
    )
    assert apart.clients["client-1"].is_running
    run.program.interrupt()
    assert run.program.wait() == 130
