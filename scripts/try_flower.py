"""Test mpfedcl with another version of Flower.

    python scripts/try_flower.py 1.42                  # the newest 1.42.x
    python scripts/try_flower.py 1.42 -- -x -k resume  # words for pytest

The version goes into build/flower/VERSION, where a venv of its own finds it before the other
packages, which are those of this Python. Packages that it needs in other versions are installed
there too; those that cannot be are named, and the tests run all the same. The tests are those of
the network and a federation of processes. Exits with 1 if any fails.
"""

import argparse
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "flower"
TESTS = (
    ("tests/network", "tests/cli/test_plain_install.py"),
    ("-m", "federation", "tests/federation/test_same_as_simulation.py"),
)
PROGRAM = """\
from importlib.metadata import requires, version
from packaging.requirements import Requirement

for each in map(Requirement, requires("flwr")):
    if each.marker is None or each.marker.evaluate({"extra": ""}):
        found = version(each.name)
        if not each.specifier.contains(found, prereleases=True):
            print(f"{each.name}{each.specifier}", found)
"""


def main(words: Sequence[str] | None = None) -> int:
    """Install the version and run the tests with it."""
    parser = argparse.ArgumentParser(description="Test mpfedcl with another version of Flower.")
    parser.add_argument("version", help="such as 1.42")
    parser.add_argument("words", nargs="*", help="words for pytest")
    given = parser.parse_args(words)
    place = FOLDER / given.version
    python = _make_venv(place)
    if not _install(place, f"flwr=={given.version}.*"):
        print(f"Flower {given.version} cannot be installed", file=sys.stderr)
        return 1
    for line in _ask(python).splitlines():
        wanted, found = line.split()
        if not _install(place, wanted):
            print(f"Flower asks for {wanted}, which cannot be installed; tested with {found}")
    start = [str(python), "-m", "pytest"]
    runs = [subprocess.call([*start, *each, *given.words], cwd=ROOT, env=_env()) for each in TESTS]
    # pytest says 5 if the words select nothing.
    passed = all(code in (0, 5) for code in runs) and 0 in runs
    print(f"Flower {given.version}: {'all tests pass' if passed else 'tests fail'}")
    return 0 if passed else 1


def _make_venv(place: Path) -> Path:
    """Make a venv that falls back on the packages of this Python, and return its Python."""
    venv.create(place / "venv", clear=True, symlinks=True)
    (packages,) = (place / "venv" / "lib").glob("python*/site-packages")
    others = [path for path in sys.path if Path(path).name == "site-packages"]
    lines = [place / "packages", ROOT / "src", *others]
    # Before the others: `site` appends the folders in this order.
    (packages / "first.pth").write_text("".join(f"{line}\n" for line in lines))
    return place / "venv" / "bin" / "python"


def _install(place: Path, requirement: str) -> bool:
    """Install one package without what it needs; return whether that was possible."""
    words = ("install", "--quiet", "--no-deps", "--upgrade", "--target", place / "packages")
    given = [sys.executable, "-m", "pip", *map(str, words), requirement]
    return subprocess.call(given, stderr=subprocess.DEVNULL) == 0


def _ask(python: Path) -> str:
    """Return what Flower needs in other versions, a line for each."""
    return subprocess.run(
        [python, "-c", PROGRAM], check=True, text=True, capture_output=True
    ).stdout


def _env() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    sys.exit(main())
