"""How much memory clients with a large model take, and whether it grows from round to round.

`population.py` has ten and a hundred thousand clients.
"""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from measuring import Progress, Result, Table, parse_arguments

_MERGED = "prototypes.pool-size 20"
CASES: dict[str, dict[str, Any]] = {
    "nothing but the imports": {},
    "MNIST model, 1,000 x 20": {"model": "mnist", "clients": 1000, "rounds": 20, "at": [10, 20]},
    f"MNIST model, 1,000 x 20, {_MERGED}": {
        "model": "mnist",
        "clients": 1000,
        "rounds": 20,
        "at": [10, 20],
        "pool": 20,
    },
}
QUICK: dict[str, dict[str, Any]] = {
    "nothing but the imports": {},
    "MNIST model, 40 x 20": {"model": "mnist", "clients": 40, "rounds": 6, "at": [2, 6]},
    f"head, 100 x 20, {_MERGED}": {
        "model": "head",
        "clients": 100,
        "rounds": 3,
        "at": [2, 3],
        "pool": 20,
    },
}
_LONGEST_CASE = 1500


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Run one case in this process and tell what it took."""
    import torch

    from workloads import head_clients, mnist_clients

    torch.set_num_threads(1)
    sizes: dict[int, int] = {}
    began, loaded = time.perf_counter(), None
    if case:
        make = {"mnist": mnist_clients, "head": head_clients}[case["model"]]
        workload = make(case["clients"], 20, num_test=1000)
        federation = workload.federation(
            prototypes__pool_size=case.get("pool"),
            evaluate_clients=case.get("read"),
            evaluate_predictors="all",
        )
        loaded, began = _resident(), time.perf_counter()
        for number in range(1, case["rounds"] + 1):
            # Personal models are read at the end, on 1,000 images: of all clients if not said.
            federation.run_round(evaluate=number == case["rounds"])
            sizes[number] = _resident()
    return {
        "seconds": time.perf_counter() - began,
        "loaded": loaded,
        "resident": sizes,
        "peak": _peak(),
    }


def _resident() -> int:
    """Return the bytes that this process holds now; 0 where the system does not tell."""
    path = Path("/proc/self/statm")
    if not path.exists():
        return 0
    return int(path.read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _peak() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def call_case(case: dict[str, Any]) -> dict[str, Any] | str:
    """Run a case in a fresh process; return what it told, or why there is nothing."""
    command = [sys.executable, __file__, "--case", json.dumps(case)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LONGEST_CASE, check=False
        )
    except subprocess.TimeoutExpired:
        return f"not done within {_LONGEST_CASE} s"
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return f"ended with code {done.returncode}: {lines[-1] if lines else 'killed'}"
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def _tabulate(name: str, case: dict[str, Any], told: dict[str, Any] | str) -> list[str]:
    if isinstance(told, str):
        return [name, told, "", "", "", "", ""]
    if not case:
        return [name, _mib(told["peak"]), "", "", "", "", ""]
    early, late = (told["resident"][str(number)] for number in case["at"])
    return [
        name,
        _mib(told["peak"]),
        _mib(told["loaded"]),
        f"{_mib(early)} (round {case['at'][0]})",
        f"{_mib(late)} (round {case['at'][1]})",
        _mib(told["resident"][str(case["rounds"] - 1)]),
        f"{told['seconds']:.0f} s for {case['rounds']} rounds",
    ]


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f}"


def main() -> None:
    """Measure and write."""
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(run_case(json.loads(sys.argv[2]))))
        return
    arguments = parse_arguments(__doc__)
    cases = dict(QUICK if arguments.quick else CASES)
    progress = Progress()
    result = Result("memory", (__doc__ or "").partition("\n")[0], arguments.quick)
    rows = []
    for name, case in cases.items():
        progress.say(name)
        told = call_case(case)
        rows.append(_tabulate(name, case, told))
        result.data[name] = told
    headers = ["MiB", "peak", "data loaded", "early", "late", "last but one", "time"]
    result.tables.append(Table("Memory, engine auto, 1 thread", headers, rows))
    result.notes.append(
        "A fresh process a case. The last round is evaluated with all personal models on 1,000 "
        "test images, so `late` holds those models' leftovers; `last but one` does not."
    )
    progress.close()
    result.write(arguments.out)


if __name__ == "__main__":
    main()
