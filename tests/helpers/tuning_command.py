"""A small search as words of the command line, and what it has written."""

import json
from pathlib import Path
from typing import Any

from mpfedcl.core.json_files import read_json_file
from mpfedcl.studies.tuning import TuningResult
from small_experiments import Json, flags

METHODS = ("mp-fedcl", "fedavg")
BUDGET = 5
ROUNDS = 4


def words(images: Path, out: Path, **changes: Any) -> list[str]:
    chosen = ["--methods", *METHODS, "--budget", BUDGET, "--jobs", 1, "--out", out]
    settings = flags(images, **{"rounds": ROUNDS} | changes)
    return ["tune", *(str(each) for each in chosen), *settings]


def content(path: Path) -> Json:
    """Return the results of the searches in a folder, by method."""
    return {file.parent.name: json.loads(file.read_text()) for file in path.glob("*/tuning.json")}


def without_seconds(path: Path) -> Json:
    return {
        name: {key: value for key, value in each.items() if key != "seconds"}
        for name, each in content(path).items()
    }


def load(path: Path) -> TuningResult:
    return read_json_file(path / "tuning.json", TuningResult)
