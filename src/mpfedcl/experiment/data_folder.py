"""Where data and the weights of an encoder are looked for. Nothing here needs torch."""

import os
from pathlib import Path

from mpfedcl.experiment.settings import DatasetSettings


def find_data_folder(dataset: DatasetSettings) -> tuple[Path, str]:
    """Return the folder that holds the named sets, and the setting that says so."""
    if dataset.root is not None:
        return dataset.root.expanduser(), "dataset.root"
    if os.environ.get("MPFEDCL_DATA"):
        return Path(os.environ["MPFEDCL_DATA"]).expanduser(), "$MPFEDCL_DATA"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "mpfedcl", "the cache folder"
