"""Build the wheel, install it without extras into a fresh venv, and use it.

    python scripts/try_wheel.py

A checkout has every extra installed, and so hides an import that a plain installation lacks. The
venv is left in build/wheel/venv. Exits with 1 at the first command that fails.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "wheel"
EXTRAS = ("Crypto", "cryptography", "flwr", "onnx", "opendp", "dp_accounting", "polars", "mlflow")
SMALL = ("--rounds", "2", "--clients", "3", "--model.hidden", "16")
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("run", *SMALL, "--method", "mp-fedcl", "--out", "run"),
    ("run", *SMALL, "--method", "fedavg", "--workers", "2", "--out", "workers"),
    ("compare", *SMALL, "--methods", "fedgauss", "fedavg", "--seeds", "0", "1", "--out", "both"),
    ("tune", *SMALL, "--methods", "fedavg", "--budget", "2", "--out", "search"),
    ("report", "both"),
    ("privacy", "plan", "--epsilon", "1"),
    ("methods",),
)
PROGRAM = f"""\
from importlib.util import find_spec
import mpfedcl

assert "site-packages" in mpfedcl.__file__, mpfedcl.__file__
assert not [name for name in {EXTRAS!r} if find_spec(name)]
experiment = mpfedcl.Experiment(method="fedavg", rounds=2, clients=3)
result = mpfedcl.run(experiment, out="from-python")
assert 0 <= result.accuracy <= 100
assert mpfedcl.load(result.path).frame() is not None
"""


def main() -> int:
    """Build, install, and run each command."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    wheels = FOLDER / "dist"
    try:
        _call(sys.executable, "-m", "build", "--wheel", "--outdir", wheels, ROOT)
        (wheel,) = wheels.glob("*.whl")
        venv.create(FOLDER / "venv", with_pip=True)
        programs = FOLDER / "venv" / "bin"
        constraints = ("-c", ROOT / "constraints.txt")
        _call(programs / "pip", "install", "--quiet", *constraints, wheel)
        _call(programs / "pip", "check")
        with tempfile.TemporaryDirectory() as place:
            for words in COMMANDS:
                _call(programs / "mpfedcl", *words, folder=place)
            _call(programs / "python", "-c", PROGRAM, folder=place)
    except subprocess.CalledProcessError as error:
        print(f"exit code {error.returncode}", file=sys.stderr)
        return 1
    print("the wheel works without extras")
    return 0


def _call(*words: str | Path, folder: str | Path = ROOT) -> None:
    """Run a command elsewhere, so that nothing of the checkout can be imported."""
    given: Sequence[str] = [str(word) for word in words]
    print(f"$ {' '.join(given[:12])}", flush=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run(given, cwd=folder, env={**kept, "OMP_NUM_THREADS": "1"}, check=True)


if __name__ == "__main__":
    sys.exit(main())
