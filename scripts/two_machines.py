"""Run one experiment on two machines, each a network namespace, and hold it to one process.

    sudo python scripts/two_machines.py

Two namespaces joined by a virtual cable stand for two machines that share nothing but the network:
a torchrun agent in each, by itself and from examples/slurm.sh. Then one machine is lost, and then
the cable is cut. It needs the right to make namespaces; without it, it says so and ends with exit
code 77.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors.torch import load_file

MACHINES = {f"mpfedcl-{os.getpid()}-a": "10.77.0.1", f"mpfedcl-{os.getpid()}-b": "10.77.0.2"}
SETTINGS = ["--rounds", "3", "--dtype", "float64", "--clients", "6", "--partition.alpha", "1"]
CANNOT = 77
PORT = 29400
LEADER = next(iter(MACHINES.values()))
ENDS = ("mpf-a", "mpf-b")
"""Of the cable; the kernel allows fifteen letters."""
PATIENCE = 300
"""Seconds for a few rounds, on a busy machine too."""
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    # The machines have no name server to ask for each other's names; torchrun asks again and again.
    "RES_OPTIONS": "timeout:1 attempts:1",
}


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
        ip("link", "add", ENDS[0], "netns", first, "type", "veth",
           "peer", "name", ENDS[1], "netns", second)  # fmt: skip
        for (name, address), end in zip(MACHINES.items(), ENDS, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in MACHINES:
            with suppress(FileNotFoundError):
                subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def start_agent(
    number: int, folder: Path, words: list[str], meeting: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Start torchrun on one of the machines; by default the first is told to be the leader."""
    name, address = list(MACHINES.items())[number]
    told = ("--node-rank", str(number), "--master-addr", LEADER, "--master-port", str(PORT))
    agent = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
        *(meeting or told), "--local-addr", address, "-m", "mpfedcl", "run", *words,
    ]  # fmt: skip
    return subprocess.Popen(
        ["ip", "netns", "exec", name, *agent],
        cwd=folder,
        env={**ENVIRONMENT, "GLOO_SOCKET_IFNAME": ENDS[number]},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_alone(folder: Path) -> None:
    """Run the experiment in one process, by the plainest engine."""
    alone = [sys.executable, "-m", "mpfedcl", "run", *SETTINGS, "--engine", "loop"]
    subprocess.run([*alone, "--out", "alone"], cwd=folder, check=True, capture_output=True)


def check_same_result(folder: Path, run: str, how: str) -> None:
    """Hold a run on two machines to that of one process."""
    for file in sorted((folder / "alone").glob("*.safetensors")):
        ours, theirs = load_file(file), load_file(folder / run / file.name)
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-8)
    alone, together = (
        json.loads((folder / each / "summary.json").read_text()) for each in ("alone", run)
    )
    assert alone["predictors"] == together["predictors"]
    print(f"two machines {how} give the same as one process: {alone['accuracy']:.1f} %")


def check_agents(folder: Path) -> None:
    """Two agents that are told who leads, and two that meet and choose."""
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{LEADER}:{PORT}", "--rdzv-id", "1"]
    for run, how, meetings in (
        ("told", "that are told who leads", [[], []]),
        # A namespace has no name of its own by which its agent could know that it is the host.
        (
            "met",
            "that meet by --rdzv-backend c10d",
            [[*rendezvous, "--rdzv-conf", f"is_host={int(n == 0)}"] for n in range(2)],
        ),
    ):
        words = [*SETTINGS, "--out", run]
        agents = [start_agent(n, folder, words, meeting) for n, meeting in enumerate(meetings)]
        said = [agent.communicate(timeout=PATIENCE) for agent in agents]
        assert [agent.returncode for agent in agents] == [0, 0], said
        check_same_result(folder, run, how)


def check_slurm_script(folder: Path) -> None:
    """Run examples/slurm.sh, with stand-ins for Slurm's two commands that it calls."""
    stand_ins = folder / "slurm"
    stand_ins.mkdir()
    starts = "\n".join(
        f"SLURM_NODEID={number} SLURMD_NODENAME={address} GLOO_SOCKET_IFNAME={ENDS[number]} "
        f'ip netns exec {name} "$@" &'
        for number, (name, address) in enumerate(MACHINES.items())
    )
    for command, lines in {
        # Options for srun come first; then what each node runs.
        "srun": f"shift\n{starts}\nwait -n && wait -n",
        "scontrol": f"echo {' '.join(MACHINES.values())} | tr ' ' '\\n'",
        "python": f'exec {sys.executable} "$@"',
    }.items():
        file = stand_ins / command
        file.write_text(f"#!/bin/bash\n{lines}\n")
        file.chmod(0o755)
    slurm = {"JOB_ID": "7", "JOB_NODELIST": "a,b", "NNODES": "2", "CPUS_PER_TASK": "2"}
    env = {
        **ENVIRONMENT,
        **{f"SLURM_{name}": value for name, value in slurm.items()},
        "PATH": f"{stand_ins}:{os.environ['PATH']}",
    }
    script = Path(__file__).parents[1] / "examples" / "slurm.sh"
    for _ in range(2):
        # The second time the run is there: the same command resumes it and finds it complete.
        done = subprocess.run(
            ["bash", str(script), "slurm-run", *SETTINGS],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stderr
    check_same_result(folder, "slurm-run", "by examples/slurm.sh, two processes each,")


def check_lost_machine(folder: Path) -> None:
    """A machine that is lost ends the run; what was done is kept and can be resumed."""
    agents = start_endless(folder, "lost")
    agents[1].kill()
    end_inside(list(MACHINES)[1])
    _, said = agents[0].communicate(timeout=PATIENCE)
    agents[1].communicate()
    assert "a worker was lost" in said, said
    print(f"a lost machine ended the run after round {resume_alone(folder, 'lost')}")


def check_silent_network(folder: Path) -> None:
    """A cable that is cut says nothing to anybody: both ends notice after the timeout."""
    agents = start_endless(folder, "silent")
    began = time.monotonic()
    ip("-n", next(iter(MACHINES)), "link", "set", ENDS[0], "down")
    _, said = agents[0].communicate(timeout=PATIENCE)
    noticed = time.monotonic() - began
    assert "has not answered for 10 s" in said, said
    # The other process ends too; its agent goes on looking for the first for a while.
    while _workers_inside(list(MACHINES)[1]) and time.monotonic() - began < 60:
        time.sleep(0.2)
    both = time.monotonic() - began
    assert both < 60, "the process at the other end still waits"
    agents[1].kill()
    end_inside(list(MACHINES)[1])
    agents[1].communicate()
    done = resume_alone(folder, "silent")
    print(
        f"a silent network was noticed after {noticed:.0f} s (both ends: {both:.0f} s) with "
        f"--worker-timeout 10, in round {done + 1}"
    )


def start_endless(folder: Path, run: str) -> list[subprocess.Popen[str]]:
    """Start a run without end on both machines, and wait for its first rounds."""
    endless = ["--rounds", "100000", "--evaluate-every", "100000", "--worker-timeout", "10"]
    words = [*SETTINGS, *endless, "--out", run]
    agents = [start_agent(number, folder, words) for number in range(2)]
    records = folder / run / "rounds.jsonl"
    for _ in range(10 * PATIENCE):
        if records.exists() and records.read_bytes().count(b"\n") >= 3:
            break
        time.sleep(0.1)
    return agents


def resume_alone(folder: Path, run: str) -> int:
    """Resume a run in one process for one more round; return how many it had done."""
    done = (folder / run / "rounds.jsonl").read_bytes().count(b"\n")
    alone = [sys.executable, "-m", "mpfedcl", "run", "--resume", run, "--workers", "1"]
    subprocess.run([*alone, "--rounds", str(done + 1)], cwd=folder, check=True, capture_output=True)
    return done


def end_inside(name: str) -> None:
    """End what an agent has left behind on a machine, each by its own number."""
    for child in _inside(name):
        with suppress(ProcessLookupError):
            os.kill(child, 9)


def _workers_inside(name: str) -> list[int]:
    """Return the processes of a run on a machine, which their agents have started."""
    found = []
    for process in _inside(name):
        with suppress(OSError):
            words = Path(f"/proc/{process}/cmdline").read_bytes()
            if b"torch.distributed.run" not in words:
                found.append(process)
    return found


def _inside(name: str) -> list[int]:
    listed = subprocess.run(
        ["ip", "netns", "pids", name], check=True, capture_output=True, text=True
    ).stdout
    return [int(each) for each in listed.split()]


def main() -> int:
    """Run all checks."""
    with tempfile.TemporaryDirectory() as name:
        try:
            with machines():
                run_alone(Path(name))
                check_agents(Path(name))
                check_slurm_script(Path(name))
                check_lost_machine(Path(name))
                # Last: it leaves the cable cut.
                check_silent_network(Path(name))
        except NoNamespacesError as error:
            print(f"this machine does not allow network namespaces: {error}", file=sys.stderr)
            return CANNOT
    return 0


if __name__ == "__main__":
    sys.exit(main())
