"""Where data and the weights of an encoder are looked for. Nothing here needs torch."""

import os
from pathlib import Path

from mpfedcl.experiment.settings import DatasetSettings

WEIGHTS_VARIABLE = "MPFEDCL_WEIGHTS"
SAFETENSORS = (".safetensors",)
TORCH = (".pth", ".pt")
"""How files of weights end."""


def find_data_folder(dataset: DatasetSettings) -> tuple[Path, str]:
    """Return the folder that holds the named sets, and the setting that says so."""
    if dataset.root is not None:
        return dataset.root.expanduser(), "dataset.root"
    if os.environ.get("MPFEDCL_DATA"):
        return Path(os.environ["MPFEDCL_DATA"]).expanduser(), "$MPFEDCL_DATA"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "mpfedcl", "the cache folder"


def encoder_data_folders(dataset: DatasetSettings) -> list[Path]:
    """Return the data folders that weights may lie in or beside."""
    # For one's own images the root is the set itself; weights mostly lie with the other data.
    return [find_data_folder(each)[0] for each in (dataset, DatasetSettings())]


def weights_places(*data_folders: Path) -> list[Path]:
    """Return the folders where weights are looked for: in and beside each data folder."""
    return [
        place / "weights"
        for folder in data_folders
        for place in (folder, (folder / "..").resolve())
    ]


def list_weights(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files of ResNet-18 weights in a folder."""
    return sorted(path for suffix in suffixes for path in folder.glob(f"resnet18*{suffix}"))


def has_weights(dataset: DatasetSettings) -> bool:
    """Tell whether there are weights for an encoder, or somebody says so, sound or not."""
    places = weights_places(*encoder_data_folders(dataset))
    return bool(os.environ.get(WEIGHTS_VARIABLE)) or any(
        list_weights(place, SAFETENSORS + TORCH) for place in places
    )
