"""Run one experiment on two machines, each a network namespace, and hold it to one process.

    sudo python scripts/two_machines.py

Two namespaces joined by a virtual cable stand for two machines that share nothing but the network:
a torchrun agent in each, the leader's the meeting point. Then the same with a cut cable. It needs
the right to make namespaces; without it, it says so and ends with exit code 77.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors.torch import load_file

MACHINES = {f"mpfedcl-{os.getpid()}-a": "10.77.0.1", f"mpfedcl-{os.getpid()}-b": "10.77.0.2"}
SETTINGS = ["--rounds", "3", "--dtype", "float64", "--clients", "6", "--partition.alpha", "1"]
CANNOT = 77
PORT = 29400


class NoNamespacesError(Exception):
    """This machine does not let us make network namespaces."""


def ip(*words: str) -> None:
    """Call the system's ip command, to set up a machine."""
    try:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise NoNamespacesError("there is no command ip") from None
    except subprocess.CalledProcessError as error:
        raise NoNamespacesError(error.stderr.strip()) from None


@contextmanager
def machines() -> Iterator[None]:
    """Make the two namespaces and the cable between them; remove them afterwards."""
    first, second = MACHINES
    try:
        for name in MACHINES:
            ip("netns", "add", name)
        # The kernel allows fifteen letters for the ends of a cable.
        ip("link", "add", "mpf-a", "netns", first, "type", "veth",
           "peer", "name", "mpf-b", "netns", second)  # fmt: skip
        for (name, address), end in zip(MACHINES.items(), ("mpf-a", "mpf-b"), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in MACHINES:
            with suppress(FileNotFoundError):
                subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def start_agent(number: int, folder: Path, words: list[str]) -> subprocess.Popen[str]:
    """Start torchrun on one of the machines."""
    name, address = list(MACHINES.items())[number]
    leader = next(iter(MACHINES.values()))
    agent = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
        "--node-rank", str(number), "--master-addr", leader, "--master-port", str(PORT),
        "--local-addr", address, "-m", "mpfedcl", "run", *words,
    ]  # fmt: skip
    return subprocess.Popen(
        ["ip", "netns", "exec", name, *agent],
        cwd=folder,
        env={**os.environ, "GLOO_SOCKET_IFNAME": f"mpf-{'ab'[number]}", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def check_same_result(folder: Path) -> None:
    """Two machines give what one process gives."""
    agents = [start_agent(n, folder, [*SETTINGS, "--out", "together"]) for n in range(2)]
    said = [agent.communicate(timeout=180) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    alone = [sys.executable, "-m", "mpfedcl", "run", *SETTINGS, "--engine", "loop"]
    subprocess.run([*alone, "--out", "alone"], cwd=folder, check=True, capture_output=True)
    for file in sorted((folder / "alone").glob("*.safetensors")):
        ours, theirs = load_file(file), load_file(folder / "together" / file.name)
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-8)
    summaries = [
        json.loads((folder / each / "summary.json").read_text()) for each in ("alone", "together")
    ]
    assert summaries[0]["readings"] == summaries[1]["readings"]
    print(f"two machines give the same as one process: {summaries[0]['accuracy']:.1f} %")


def check_lost_machine(folder: Path) -> None:
    """A machine that is lost ends the run; what was done is kept and can be resumed."""
    words = [*SETTINGS, "--rounds", "100000", "--evaluate-every", "100000", "--out", "cut"]
    agents = [start_agent(number, folder, words) for number in range(2)]
    records = folder / "cut" / "rounds.jsonl"
    for _ in range(600):
        if records.exists() and records.read_bytes().count(b"\n") >= 3:
            break
        time.sleep(0.1)
    agents[1].kill()
    # The agent's child lives on in the namespace: end it by its own number.
    for child in _inside(list(MACHINES)[1]):
        os.kill(child, 9)
    _, said = agents[0].communicate(timeout=120)
    agents[1].communicate()
    done = records.read_bytes().count(b"\n")
    assert "a worker was lost" in said, said
    alone = [sys.executable, "-m", "mpfedcl", "run", "--resume", "cut", "--workers", "1"]
    subprocess.run([*alone, "--rounds", str(done + 1)], cwd=folder, check=True, capture_output=True)
    print(f"a lost machine ended the run after round {done}; it was resumed on one")


def _inside(name: str) -> list[int]:
    listed = subprocess.run(
        ["ip", "netns", "pids", name], check=True, capture_output=True, text=True
    ).stdout
    return [int(each) for each in listed.split()]


def main() -> int:
    """Run both checks."""
    with tempfile.TemporaryDirectory() as name:
        try:
            with machines():
                check_same_result(Path(name))
                check_lost_machine(Path(name))
        except NoNamespacesError as error:
            print(f"this machine does not allow network namespaces: {error}", file=sys.stderr)
            return CANNOT
    return 0


if __name__ == "__main__":
    sys.exit(main())
