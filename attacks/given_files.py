"""Malicious files: they try to run code, use gigabytes of memory, or cause a traceback.

Each file is passed to the command that a user would open it with, in a separate process whose
memory is measured. Expected: a one-line error, exit code 2, no code run, less than a gigabyte.
"""

import os
import pickle
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy
from PIL import Image

from outcome import Outcome

SAFE_MEMORY = 10**9
BOMB_BYTES = 2**30
MARK = "code-was-run"
EVIL = f"import pathlib; pathlib.Path({MARK!r}).touch()\n"
EXPECTED = "refused in one sentence"


class _RunsCode:
    """Its pickle calls a function when it is read."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.system, (f"touch {MARK}",)


def attack(*, full: bool) -> list[Outcome]:
    """Open each file."""
    return [_try(f"a file you are given: {name}", make) for name, make in FILES.items()]


def npz_bomb(folder: Path) -> Sequence[str]:
    """Write images of a gigabyte into a megabyte."""
    data = folder / "data"
    data.mkdir()
    with zipfile.ZipFile(data / "bomb.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("x_train.npy", "w", force_zip64=True) as file:
            shape = (BOMB_BYTES // 784, 28, 28)
            form = {"descr": "|u1", "fortran_order": False, "shape": shape}
            numpy.lib.format.write_array_header_1_0(file, form)
            for _ in range(shape[0] * 784 // 2**20 + 1):
                file.write(bytes(2**20))
        for name in ("y_train", "x_test", "y_test"):
            with archive.open(f"{name}.npy", "w") as file:
                numpy.save(file, numpy.zeros(1, dtype=numpy.uint8))
    return ["run", "--rounds", "1", "--dataset.name", "folder", "--dataset.root", str(data)]


def pickled_images(folder: Path) -> Sequence[str]:
    """Write images that are objects, which numpy would unpickle."""
    data = folder / "data"
    data.mkdir()
    odd = numpy.array([_RunsCode()], dtype=object)
    numpy.savez(data / "odd.npz", x_train=odd, y_train=odd, x_test=odd, y_test=odd)
    return ["run", "--rounds", "1", "--dataset.name", "folder", "--dataset.root", str(data)]


def pickled_weights(folder: Path) -> Sequence[str]:
    """Write an encoder's weights that run code."""
    weights = folder / "resnet18.pth"
    weights.write_bytes(pickle.dumps(_RunsCode()))
    return ["run", "--rounds", "1", "--encoder.name", "resnet18", "--encoder.weights", str(weights)]


def run_with_method(folder: Path) -> Sequence[str]:
    """Let a run directory name a method that lies in the current folder."""
    (folder / "evil.py").write_text(EVIL)
    words = [sys.executable, "-m", "mpfedcl", "run", "--method", "fedgauss", "--out", "gift"]
    subprocess.run(words, cwd=folder, check=True, capture_output=True)
    for file in ("experiment.toml", "summary.json"):
        path = folder / "gift" / file
        path.write_text(path.read_text().replace("fedgauss", "evil:Method"))
    Image.new("L", (28, 28)).save(folder / "image.png")
    return ["predict", "gift", "image.png"]


def odd_records(folder: Path) -> Sequence[str]:
    """Write records of rounds that are none."""
    words = [sys.executable, "-m", "mpfedcl", "run", "--method", "fedgauss", "--out", "gift"]
    subprocess.run(words, cwd=folder, check=True, capture_output=True)
    (folder / "gift" / "rounds.jsonl").write_text('[1, 2]\n{"round": "one"}\n"\\ud800"\n')
    return ["report", "gift"]


def nested_settings(folder: Path) -> Sequence[str]:
    """Write settings that are nested without end."""
    (folder / "deep.toml").write_text("rounds = " + "[" * 100_000)
    return ["run", "deep.toml"]


def deep_key(folder: Path) -> Sequence[str]:
    """Write one key of so many parts that a parser takes hours."""
    (folder / "deep.toml").write_text(".".join("a" * 10**6) + " = 1\n")
    return ["run", "deep.toml"]


def endless_settings(folder: Path) -> Sequence[str]:
    """Let settings be a link to a device that never ends."""
    (folder / "endless.toml").symlink_to("/dev/zero")
    return ["run", "endless.toml"]


FILES: dict[str, Callable[[Path], Sequence[str]]] = {
    "1 MB of npz that is 1 GB": npz_bomb,
    "npz with pickled objects": pickled_images,
    "weights that run code": pickled_weights,
    "a run that names a method here": run_with_method,
    "a run with odd records": odd_records,
    "settings nested without end": nested_settings,
    "settings with a key of a million parts": deep_key,
    "settings that are /dev/zero": endless_settings,
}


def _try(name: str, make: Callable[[Path], Sequence[str]]) -> Outcome:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        words = [sys.executable, "-m", "mpfedcl", *make(folder)]
        with (folder / "said").open("wb") as said:
            process = subprocess.Popen(words, cwd=folder, stdout=said, stderr=said)
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = code = os.waitstatus_to_exitcode(status)
        text = (folder / "said").read_text(errors="replace")
        problems = [
            f"exit code {code}" if code != 2 else "",
            "code was run" if list(folder.rglob(MARK)) else "",
            "traceback" if "Traceback" in text else "",
            f"{usage.ru_maxrss / 1e6:.1f} GB" if usage.ru_maxrss * 1024 > SAFE_MEMORY else "",
        ]
        seen = ", ".join(filter(None, problems)) or EXPECTED
        return Outcome(name, EXPECTED, seen, not any(problems))
