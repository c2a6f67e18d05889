"""The folder of a data set and its domains; no torch, so missing data is reported fast."""

from pathlib import Path

from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.public.sources import FETCH_PLANS
from mpfedcl.experiment.data_folder import find_data_folder
from mpfedcl.experiment.datasets import find_specification
from mpfedcl.experiment.settings import DatasetSettings

LAYOUT = "<domain>.npz files or <domain>/<class>/*.png|jpg folders"


def is_available(name: str, root: Path | None = None) -> bool:
    """Return whether a data set is in the data folder or part of the package."""
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


_LONGEST_NAME = 200


def list_visible_entries(folder: Path) -> list[Path]:
    """Return the entries of a folder in order of name, without hidden ones."""
    found = (entry for entry in folder.iterdir() if not entry.name.startswith("."))
    return sorted(found, key=lambda entry: entry.name)


def check_domain_name(name: str, root: Path | str) -> None:
    """Reject names that cannot be client names, which are used in file names and messages."""
    is_plain = name.isprintable() and "/" not in name and not name.startswith(".")
    if len(name.encode("utf-8", "surrogateescape")) > _LONGEST_NAME or not is_plain:
        raise InvalidInput(
            f"{str(root)!r} has the domain {name!r}; a domain's name must be printable text of at "
            f"most {_LONGEST_NAME} bytes, without slashes and without a dot at its beginning."
        )


def choose_domains(available: list[str], dataset: DatasetSettings, place: str) -> list[str]:
    """Return the domains to read, in order of name."""
    for name in dataset.domains:
        if name not in available:
            raise InvalidInput(
                f"dataset.domains has {name!r}; {place} has the domains {', '.join(available)}."
            )
    return sorted(set(dataset.domains)) or available
