"""The sets that can be prepared: where each domain is found, how it is read, and its writing.

A domain is written completely or not at all.
"""

import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import lock_folder, open_atomically, remove_leftovers
from mpfedcl.data.public import digits, photos
from mpfedcl.data.public.originals import (
    DomainArrays,
    MemberFilter,
    OriginalsFolder,
    Part,
    find_files,
    find_or_unpack,
    to_arrays,
)


@dataclass(frozen=True)
class _Recipe:
    """The reader of a domain; it returns None if no file of the domain is there."""

    read: Callable[[OriginalsFolder], DomainArrays | None]
    looked_for: str


def _from_files(
    files: Sequence[str],
    read: Callable[[list[Path]], Sequence[Part]],
    archive: str | None = None,
    is_wanted: MemberFilter | None = None,
    note: str = "",
) -> _Recipe:
    """Return the recipe of a domain in files that are read into a training and a test part."""
    wanted = is_wanted or (lambda path: path.name in files)

    def find_and_read(source: OriginalsFolder) -> DomainArrays | None:
        if archive is None:
            paths = find_files(source, files)
        else:
            paths = find_or_unpack(source, files, archive, wanted)
        return None if paths is None else to_arrays(*read(paths))

    packed = f", or {archive}" if archive else ""
    return _Recipe(find_and_read, f"{', '.join(files)}{note}{packed}")


def _each(read: Callable[[Path], Part]) -> Callable[[list[Path]], list[Part]]:
    """Return a reader of a training and a test file."""
    return lambda paths: [read(path) for path in paths]


_MNIST = _from_files(digits.MNIST_FILES, digits.read_mnist, note=" (plain or .gz)")

_RECIPES: dict[str, dict[str, _Recipe]] = {
    "mnist": {"mnist": _MNIST},
    "digit5": {
        "mnist": _MNIST,
        "mnist_m": _from_files(
            digits.MNIST_M_FILES,
            _each(digits.read_listed_images),
            "mnist_m.tar.gz",
            lambda path: path.name in digits.MNIST_M_FILES or path.suffix.lower() == ".png",
            " with the folders mnist_m_train and mnist_m_test",
        ),
        "svhn": _from_files(("train_32x32.mat", "test_32x32.mat"), _each(digits.read_svhn)),
        "synth": _from_files(
            ("synth_train_32x32.mat", "synth_test_32x32.mat"),
            _each(digits.read_synth),
            "SynthDigits.zip",
        ),
        "usps": _from_files(("usps.bz2", "usps.t.bz2"), _each(digits.read_usps)),
    },
    "domainnet": {
        name: _Recipe(
            partial(photos.read_domainnet_domain, domain=name),
            f"{name}_train.txt, {name}_test.txt and {name}.zip",
        )
        for name in photos.DOMAINNET_DOMAINS
    },
    "cifar10": {
        "cifar10": _from_files(
            photos.CIFAR_10_FILES,
            partial(photos.read_cifar, num_labels=[10]),
            "cifar-10-binary.tar.gz",
        )
    },
    "cifar100": {
        "cifar100": _from_files(
            photos.CIFAR_100_FILES,
            # A record has one of 20 superclasses before its class.
            partial(photos.read_cifar, num_labels=[20, 100]),
            "cifar-100-binary.tar.gz",
        )
    },
}

_SCRATCH = ".preparing"
"""For the content of archives, inside the set's folder, whose disk has room for data; the reader of
sets passes hidden entries over."""


@dataclass
class Preparation:
    """The outcome for each domain of a set."""

    folder: Path
    prepared: dict[str, str] = field(default_factory=dict)
    """Descriptions of the domains that were written."""
    kept: list[str] = field(default_factory=list)
    """Domains that existed before."""
    missing: dict[str, str] = field(default_factory=dict)
    """The files searched for of each domain that was not found."""


def preparable_domains(name: str) -> tuple[str, ...]:
    """Return the domains of a set that can be prepared."""
    if name not in _RECIPES:
        raise InvalidInput(
            f"{name!r} cannot be prepared; it must be one of {', '.join(_RECIPES)} (for your own "
            "images, --dataset.name folder needs no preparation)."
        )
    return tuple(_RECIPES[name])


def is_prepared(folder: Path, domain: str) -> bool:
    """Return whether a domain exists in either layout."""
    return (folder / f"{domain}.npz").is_file() or (folder / domain).is_dir()


def prepare_set(
    name: str,
    source: Path,
    folder: Path,
    replace: bool = False,
    only: Collection[str] | None = None,
) -> Preparation:
    """Prepare the domains with originals in `source` and write them to the folder of the set.

    A domain that is there already stays as it is unless `replace`; each is written whole or not
    at all, so that a later call can do the rest.
    """
    domains = [domain for domain in preparable_domains(name) if only is None or domain in only]
    if not source.is_dir():
        raise InvalidInput(f"source is {str(source)!r}; it must be a folder with the originals.")
    outcome = Preparation(folder)
    with _open_scratch(folder) as scratch:
        for domain in domains:
            if is_prepared(folder, domain) and not replace:
                outcome.kept.append(domain)
                continue
            recipe = _RECIPES[name][domain]
            try:
                read = recipe.read(OriginalsFolder(source, scratch))
            except OSError as error:
                raise InvalidInput(
                    f"{error.filename or source} cannot be used ({error.strerror or error}); the "
                    "originals must be readable, and the data folder must have room."
                ) from None
            if read is None:
                outcome.missing[domain] = recipe.looked_for
                continue
            _write_domain(folder, domain, read)
            outcome.prepared[domain] = _describe(read)
    return outcome


@contextmanager
def _open_scratch(folder: Path) -> Iterator[Path]:
    """Hold the folder of a set and give an empty scratch folder in it."""
    with lock_folder(folder):
        scratch = folder / _SCRATCH
        # Whatever an earlier process left died with it.
        shutil.rmtree(scratch, ignore_errors=True)
        remove_leftovers(folder)
        scratch.mkdir()
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            # A set that came to nothing should read as absent, not as empty.
            with suppress(OSError):
                folder.rmdir()


def _write_domain(folder: Path, name: str, domain: DomainArrays) -> None:
    """Write a domain in one step, in place of an older one in either layout."""
    with open_atomically(folder / f"{name}.npz") as file:
        # Not compressed: disk is spent once, decompression would be spent by every run.
        numpy.savez(file, **domain)
    shutil.rmtree(folder / name, ignore_errors=True)


def _describe(domain: DomainArrays) -> str:
    images = domain["x_train"]
    height, width = images.shape[1:3]
    color = "gray" if images.ndim == 3 else "RGB"
    counts = f"{len(images):,} training and {len(domain['x_test']):,} test images"
    return f"{counts}, {height} x {width} {color}"
