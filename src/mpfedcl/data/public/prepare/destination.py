"""The prepared set: domains that are whole or not there."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from mpfedcl.core.files import lock_folder, sync_folder
from mpfedcl.data.samples import DomainImages

SCRATCH = ".preparing"
"""Inside the set's folder, so that a rename out of it never crosses file systems; the reader of
sets passes hidden entries over."""


@dataclass(frozen=True)
class ImageFolders:
    """A domain kept as image files: the files of each class."""

    name: str
    classes: Mapping[str, Sequence[Path]]


@contextmanager
def open_destination(folder: Path) -> Iterator[Path]:
    """Hold the folder of a set and give an empty scratch folder in it."""
    with lock_folder(folder):
        scratch = folder / SCRATCH
        # Whatever an earlier process left there died with it.
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            # A set that came to nothing should read as absent, not as empty.
            with suppress(OSError):
                folder.rmdir()


def is_prepared(folder: Path, domain: str) -> bool:
    """Tell whether a domain is there, in either layout."""
    return (folder / f"{domain}.npz").is_file() or (folder / domain).is_dir()


def write_domain(folder: Path, scratch: Path, domain: DomainImages | ImageFolders) -> None:
    """Write a domain beside its place and rename it into it, in place of what was there."""
    if isinstance(domain, DomainImages):
        beside, place = _write_archive(scratch, domain), folder / f"{domain.name}.npz"
        old = folder / domain.name
    else:
        beside, place = _write_folders(scratch, domain), folder / domain.name
        old = folder / f"{domain.name}.npz"
    # A folder cannot be renamed over another one that holds something, so that it steps aside.
    for number, before in enumerate((old, place)):
        if before.is_dir():
            before.rename(scratch / f"{domain.name}.old.{number}")
    beside.replace(place)
    old.unlink(missing_ok=True)
    sync_folder(folder)


def _write_archive(scratch: Path, domain: DomainImages) -> Path:
    arrays: dict[str, Any] = {
        "x_train": domain.train_images,
        "y_train": domain.train_labels.astype(numpy.uint8),
        "clients_train": domain.train_clients,
        "x_test": domain.test_images,
        "y_test": None if domain.test_labels is None else domain.test_labels.astype(numpy.uint8),
        "clients_test": domain.test_clients,
    }
    beside = scratch / f"{domain.name}.npz"
    with beside.open("wb") as file:
        # Not compressed: disk is spent once, decompression would be spent by every run.
        numpy.savez(file, **{key: array for key, array in arrays.items() if array is not None})
        file.flush()
        os.fsync(file.fileno())
    return beside


def _write_folders(scratch: Path, domain: ImageFolders) -> Path:
    beside = scratch / f"{domain.name}.new"
    for class_name, images in domain.classes.items():
        (beside / class_name).mkdir(parents=True)
        for image in images:
            copy = beside / class_name / image.name
            shutil.copyfile(image, copy)
            with copy.open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(beside / class_name)
    sync_folder(beside)
    return beside
