"""Small tables, written and opened."""

from pathlib import Path
from typing import Any

from mpfedcl.data.sample_index import open_data_set
from mpfedcl.data.samples import SampleIndex
from mpfedcl.experiment.settings import DatasetSettings


def save_table(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def open_table(root: Path, **settings: Any) -> SampleIndex:
    return open_data_set(DatasetSettings(name="table", root=root, **{"label": "y"} | settings))
