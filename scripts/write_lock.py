"""Write requirements.lock and requirements-torch.lock: every package of `.[dev]` with its hashes.

    python scripts/write_lock.py [--wheel torch-...+cpu-....whl]

uv resolves pyproject.toml within constraints.txt for Linux and macOS, and takes the hashes of all
files of a release from the package index. Torch has two builds: that of the index, which on Linux
needs CUDA libraries of several gigabytes, and the CPU build, which the index does not have.
requirements.lock holds the CPU build; the other has a file of its own, because pip would prefer it
wherever both are allowed. The CPU build's hash is read from a downloaded file (`--wheel`), or kept
from the old lock as long as the version stays. The lock names no index; pip uses its own setting.
"""

import argparse
import hashlib
import re
import subprocess
import sys
from pathlib import Path

LOCK = Path("requirements.lock")
TORCH_LOCK = Path("requirements-torch.lock")
TORCH_PACKAGES = re.compile(r"(torch|triton|cuda|nvidia)\b")
# Builds the package itself, which is installed without looking for anything else.
BUILD_BACKEND = "hatchling"
HEADER = """\
# Made by `make lock` from pyproject.toml and constraints.txt. In a new environment:
#   pip install --require-hashes --no-deps -r requirements.lock
#   pip install --no-deps --no-build-isolation .
# This takes the CPU build of torch for Python 3.11 on Linux (x86_64). For the build of the package
# index, also on macOS, begin with:
#   pip install --require-hashes --no-deps -r requirements-torch.lock
"""
TORCH_HEADER = """\
# Made by `make lock`. Torch as the package index has it, with what it needs on Linux.
"""


def resolve() -> list[str]:
    """Return one text per package: its line and its hashes."""
    command = [str(Path(sys.executable).parent / "uv"), "pip", "compile", "--quiet", "--no-config"]
    command += ["--universal", "--python-version", "3.11", "--generate-hashes", "--no-header"]
    command += ["--no-annotate", "--constraints", "constraints.txt", "--extra", "dev"]
    out = subprocess.run(
        [*command, "pyproject.toml", "-"],
        input=BUILD_BACKEND,
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    )
    # POSIX only, as the package is.
    return [each for each in split(out.stdout) if "sys_platform == 'win32'" not in each]


def split(lock: str) -> list[str]:
    """Return the entries of a lock file."""
    return re.split(r"\n(?=\S)", lock.strip())


def cpu_build(release: str, wheels: list[Path]) -> str:
    """Return the entry of torch's CPU build, with the hashes of downloaded files."""
    hashes = {hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels}
    if not hashes and LOCK.exists():
        for entry in split(LOCK.read_text(encoding="utf-8")):
            if entry.startswith(f"{release} "):
                hashes = set(re.findall(r"sha256:([0-9a-f]{64})", entry))
    if not hashes:
        sys.exit(f"no hash of the CPU build of {release} is known: download it and give --wheel.")
    return " \\\n".join([release, *(f"    --hash=sha256:{each}" for each in sorted(hashes))])


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description="Write requirements.lock.")
    parser.add_argument("--wheel", type=Path, action="append", default=[])
    wheels = parser.parse_args().wheel
    entries = resolve()
    torch = [each for each in entries if TORCH_PACKAGES.match(each)]
    usual = [each for each in entries if each not in torch]
    release = next(each for each in torch if each.startswith("torch==")).split()[0]
    usual.append(cpu_build(release, wheels))
    for path, header, found in ((LOCK, HEADER, usual), (TORCH_LOCK, TORCH_HEADER, torch)):
        path.write_text(header + "\n".join(sorted(found)) + "\n", encoding="utf-8")
        print(f"{path}: {len(found)} packages")


if __name__ == "__main__":
    main()
