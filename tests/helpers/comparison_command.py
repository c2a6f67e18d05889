"""A small comparison as words of the command line, and what it has touched."""

from pathlib import Path
from typing import Any

from small_experiments import flags

METHODS = ("mp-fedcl", "fedavg", "local")
SEEDS = (0, 1)
MATCHED = {"partition__test": "matched"}
"""Every client has a test of its own, so that own and global test set differ."""
RUNS = [f"{method}-seed{seed}" for method in METHODS for seed in SEEDS]


def words(images: Path, out: Path, **changes: Any) -> list[str]:
    chosen = ["--methods", *METHODS, "--seeds", *(str(seed) for seed in SEEDS)]
    return [
        "compare",
        *chosen,
        *flags(images, **MATCHED | changes),
        "--jobs",
        "1",
        "--out",
        str(out),
    ]


def modified(path: Path) -> dict[str, int]:
    return {
        str(each.relative_to(path)): each.stat().st_mtime_ns for each in sorted(path.rglob("*"))
    }
