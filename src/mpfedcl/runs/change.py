"""Several files of a run changed at once: after a crash all are the old ones or all the new ones.

The new files are written beside, into one folder, which then gets its name by one rename: that is
the moment of the change. They are moved into place after it. Whoever opens the run moves what a
crash has left to be moved.
"""

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import sync_folder, write_atomically

FOLDER = "change"
_LIST = "change.json"


def is_changing(path: Path) -> bool:
    """Tell whether a change is decided and not done yet."""
    return (path / FOLDER).is_dir()


def change_files(path: Path, written: Mapping[str, bytes], removed: Collection[str] = ()) -> None:
    """Write and remove files of a run, by their place in it. Who calls holds the run's lock."""
    for place in [*written, *removed]:
        if not _lies_inside(path, place):
            raise InvalidInput(f"{place!r} is not in {path}; a name must be that of a file.")
    beside = path / f".{FOLDER}.tmp"
    if beside.exists():
        shutil.rmtree(beside)
    beside.mkdir()
    # Numbered, so that no name of a client meets another file here.
    places = sorted(written)
    for number, place in enumerate(places):
        write_atomically(beside / str(number), written[place])
    told = json.dumps({"written": places, "removed": sorted(removed)})
    write_atomically(beside / _LIST, told.encode())
    beside.rename(path / FOLDER)
    sync_folder(path)
    finish_change(path)


def finish_change(path: Path) -> None:
    """Do what is left of a change that was decided. Who calls holds the run's lock."""
    folder = path / FOLDER
    if not folder.is_dir():
        return
    if (folder / _LIST).is_file():
        try:
            told = json.loads((folder / _LIST).read_bytes())
            written, removed = list(told["written"]), list(told["removed"])
            if not all(_lies_inside(path, place) for place in [*written, *removed]):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise InvalidInput(
                f"{folder / _LIST} is not as mpfedcl writes it; the change cannot be completed."
            ) from None
        for place in removed:
            (path / place).unlink(missing_ok=True)
        for number, place in enumerate(written):
            file = folder / str(number)
            # Not there: moved before the crash.
            if file.is_file():
                (path / place).parent.mkdir(exist_ok=True)
                file.replace(path / place)
                sync_folder((path / place).parent)
        (folder / _LIST).unlink()
    shutil.rmtree(folder)
    sync_folder(path)


def _lies_inside(path: Path, place: str) -> bool:
    """Tell whether a place is in the run's folder: a run may come from a stranger."""
    parts = PurePosixPath(place).parts
    inside = 1 <= len(parts) <= 2 and ".." not in parts and parts[0] != "/"
    return inside and not (path / place).parent.is_symlink()
