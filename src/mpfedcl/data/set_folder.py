"""The folder of a data set. Nothing here needs torch, so that what is missing is said at once."""

from pathlib import Path

from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.public.fetch.public_sources import FETCH_PLANS
from mpfedcl.experiment.data_folder import find_data_folder
from mpfedcl.experiment.datasets import find_specification
from mpfedcl.experiment.settings import DatasetSettings

LAYOUT = "<domain>.npz files or <domain>/<class>/*.png|jpg folders"


def is_available(name: str, root: Path | None = None) -> bool:
    """Tell whether a data set is in the data folder, or inside the package."""
    if find_specification(name).embedded:
        return True
    try:
        find_set_folder(DatasetSettings(name=name, root=root))
    except InvalidInput:
        return False
    return True


def find_set_folder(dataset: DatasetSettings) -> Path:
    """Return the existing folder of the set that the settings name."""
    folder, origin = find_data_folder(dataset)
    if dataset.name == "folder":
        if dataset.root is None:
            raise InvalidInput(
                "dataset.root is not set; dataset.name 'folder' needs it, the folder that holds "
                f"{LAYOUT} (mnist-sample needs no files)."
            )
        root = folder
    else:
        root = folder / dataset.name
    if not root.exists():
        raise InvalidInput(
            f"dataset.name is {dataset.name!r}, but its folder {root} (from {origin}) does not "
            f"exist; {_say_fetch(dataset)}it must hold {LAYOUT}, at a place that dataset.root or "
            "$MPFEDCL_DATA names (mnist-sample needs no files)."
        )
    if not root.is_dir():
        raise InvalidInput(
            f"{root} (from {origin}) is a file; dataset.name {dataset.name!r} needs a folder with "
            f"{LAYOUT}."
        )
    return root


def _say_fetch(dataset: DatasetSettings) -> str:
    """Name the command that puts a public set into the data folder."""
    if dataset.name not in FETCH_PLANS:
        return ""
    root = f" --root {dataset.root}" if dataset.root is not None else ""
    return f"mpfedcl data fetch {dataset.name}{root} downloads what is public of it, else "
