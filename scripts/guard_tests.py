"""How well tests hold the modules that guard the rest: their branches, and faults put into them.

python scripts/guard_tests.py coverage
python scripts/guard_tests.py mutation [--seconds 600] [--modules guard ...] [--show]

Faults are put in one at a time, each in a process forked from one that has loaded torch, where the
module's own tests run until one fails. Results are kept in build/mutation.json, and are looked
for again only once a module or its tests have changed.
"""

import argparse
import hashlib
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from faults import Fault, find_faults, plant_fault

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "mpfedcl"
RESULTS = ROOT / "build" / "mutation.json"
LOADED = (
    *("hypothesis", "matplotlib.figure", "scipy.stats", "dp_accounting", "opendp.prelude"),
    *("mpfedcl.api", "mpfedcl.cli.main"),
)
"""Loaded once, with all that they need and the modules themselves."""
LONGEST_SECONDS = 30
"""Of one fault's tests, of the processor's time: a fault may make a loop endless."""
LONGEST_WAIT = 600
"""The same by the clock: a fault may wait for what never comes."""


@dataclass(frozen=True)
class Module:
    """A module, and the tests that hold it."""

    name: str
    tests: tuple[str, ...]

    @property
    def path(self) -> Path:
        """Its file."""
        return SOURCE / self.name

    @property
    def dotted(self) -> str:
        """Its name to import it by."""
        return "mpfedcl." + self.name.removesuffix(".py").replace("/", ".")

    @property
    def key(self) -> str:
        """What changes with the module and its tests."""
        files = [self.path, *(ROOT / test for test in self.tests)]
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


MESSAGES = ("tests/network/test_message_bounds.py", "tests/network/test_network_packing.py")
MODULES = (
    Module(
        "rounds/validation.py",
        (
            "tests/rounds/test_validation_bounds.py",
            "tests/rounds/test_validation_outliers.py",
            "tests/rounds/test_validation_prototypes.py",
            "tests/rounds/test_update_validation.py",
            "tests/rounds/test_systems.py",
        ),
    ),
    Module("methods/messages.py", ("tests/methods/test_messages.py",)),
    Module("network/transport.py", MESSAGES),
    Module("network/packing.py", MESSAGES),
    Module("runs/checkpoint.py", ("tests/runs/test_checkpoint.py",)),
)


def find_modules(names: Sequence[str]) -> list[Module]:
    """Return the modules that are named, or all; those of privacy with all tests of that folder."""
    tests = [str(path.relative_to(ROOT)) for path in (ROOT / "tests/privacy").glob("test_*")]
    tests += ["tests/gaussian/test_mechanism.py", "tests/runs/test_budget.py"]
    private = [
        # The tests of the module itself come first, because most faults fail there; the audit
        # takes longest.
        Module(
            f"privacy/{path.name}",
            tuple(sorted(tests, key=lambda each: (path.stem not in each, "audit" in each, each))),
        )
        for path in sorted((SOURCE / "privacy").glob("*.py"))
        if path.name != "__init__.py"
    ]
    found = [*MODULES, *private]
    return [each for each in found if not names or any(name in each.name for name in names)]


def measure_coverage(modules: Sequence[Module]) -> int:
    """Run the modules' tests and print which branches they take."""
    data = ROOT / "build" / "coverage"
    data.parent.mkdir(exist_ok=True)
    tests = list(dict.fromkeys(test for module in modules for test in module.tests))
    files = ",".join(str(module.path) for module in modules)
    common = [sys.executable, "-m", "coverage"]
    environment = {**os.environ, "COVERAGE_FILE": str(data)}
    ran = subprocess.run(
        [*common, "run", "--branch", f"--include={files}", "-m", "pytest", "-q", *tests],
        cwd=ROOT,
        env=environment,
        check=False,
    )
    report = [*common, "report", "--show-missing", "--fail-under=100"]
    told = subprocess.run(report, cwd=ROOT, env=environment, check=False)
    return ran.returncode or told.returncode


def load_faulty(module: Module, fault: Fault) -> None:
    """Put a module with a fault in the place of the one that is loaded, wherever it is used."""
    loaded = sys.modules[module.dotted]
    before = dict(vars(loaded))
    exec(plant_fault(module.path, fault), vars(loaded))
    changed = {id(old): vars(loaded)[name] for name, old in before.items() if name[:2] != "__"}
    for other in [each for name, each in sys.modules.items() if name.startswith("mpfedcl")]:
        for name, value in list(vars(other).items()):
            if name[:2] != "__" and id(value) in changed:
                setattr(other, name, changed[id(value)])


def is_noticed(module: Module, fault: Fault | None) -> bool:
    """Tell whether the module's tests fail with a fault in it; they must not without one."""
    child = os.fork()
    if child == 0:
        os._exit(_run_tests(module, fault))
    end = time.monotonic() + LONGEST_WAIT
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status != 0
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def _run_tests(module: Module, fault: Fault | None) -> int:
    resource.setrlimit(resource.RLIMIT_CPU, (LONGEST_SECONDS, LONGEST_SECONDS))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for handle in (0, 1, 2):
        os.dup2(nowhere, handle)
    os.chdir(ROOT)
    try:
        if fault is not None:
            load_faulty(module, fault)
        # In memory where that can be: a checkpoint waits for the disk.
        memory = Path("/dev/shm")
        with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
            # Loaded before pytest could look into it, which it need not.
            loaded = "ignore::pytest.PytestAssertRewriteWarning"
            options = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={folder}/tests"]
            return int(pytest.main([*options, "-W", loaded, *module.tests]))
    # A fault may break the import of everything.
    except BaseException:
        return 1


def measure_mutation(modules: Sequence[Module], seconds: float, *, show: bool) -> int:
    """Put faults in until the time is up, and print how many were noticed."""
    for name in (*LOADED, *(module.dotted for module in modules)):
        importlib.import_module(name)
    known: dict[str, bool] = json.loads(RESULTS.read_bytes()) if RESULTS.exists() else {}
    end = time.monotonic() + seconds
    scores = [_score(module, known, end) for module in modules]
    print(f"\n{'module':<28}{'faults':>8}{'tried':>8}{'noticed':>9}{'score':>8}")
    for module, score in zip(modules, scores, strict=True):
        print(f"{module.name:<28}{score.line()}")
        for fault in score.missed if show else ():
            print(f"    line {fault.line}: {fault.what}")
    total = Score(
        sum(each.faults for each in scores),
        sum(each.tried for each in scores),
        [fault for each in scores for fault in each.missed],
    )
    print(f"{'all':<28}{total.line()}")
    return 0 if total.tried == total.faults else 3


@dataclass(frozen=True)
class Score:
    """How many faults there are, how many were tried, and which nobody noticed."""

    faults: int
    tried: int
    missed: list[Fault]

    def line(self) -> str:
        """Return the numbers in columns."""
        noticed = self.tried - len(self.missed)
        share = f"{100 * noticed / self.tried:.1f} %" if self.tried else "-"
        return f"{self.faults:>8}{self.tried:>8}{noticed:>9}{share:>8}"


def _score(module: Module, known: dict[str, bool], end: float) -> Score:
    faults = list(find_faults(module.path))
    key = f"{module.name} {module.key}"
    if time.monotonic() < end and f"{key} sound" not in known:
        if is_noticed(module, None):
            raise SystemExit(f"the tests of {module.name} fail without any fault")
        known[f"{key} sound"] = True
    for fault in _left(faults, key, known, end):
        known[f"{key} {fault.number}"] = is_noticed(module, fault)
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(known))
    tried = [fault for fault in faults if f"{key} {fault.number}" in known]
    missed = [fault for fault in tried if not known[f"{key} {fault.number}"]]
    return Score(len(faults), len(tried), missed)


def _left(faults: Sequence[Fault], key: str, known: dict[str, bool], end: float) -> Iterator[Fault]:
    for fault in faults:
        if f"{key} {fault.number}" not in known:
            if time.monotonic() >= end:
                return
            yield fault


def main() -> int:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["coverage", "mutation"])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--modules", nargs="*", default=[])
    parser.add_argument("--show", action="store_true", help="the faults that nobody noticed")
    arguments = parser.parse_args()
    modules = find_modules(arguments.modules)
    if arguments.what == "coverage":
        return measure_coverage(modules)
    return measure_mutation(modules, arguments.seconds, show=arguments.show)


if __name__ == "__main__":
    sys.exit(main())
