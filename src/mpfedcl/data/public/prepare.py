"""The sets that can be prepared: which domains they have, and how each is read."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy

from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.public import digits, photos
from mpfedcl.data.public.originals import (
    DomainArrays,
    DomainFolders,
    OriginalsFolder,
    is_prepared,
    open_destination,
    write_domain,
)


@dataclass(frozen=True)
class _Recipe:
    """The reader of a domain; it returns None if no file of the domain is there."""

    read: Callable[[OriginalsFolder], DomainArrays | DomainFolders | None]
    looked_for: str


_MNIST = _Recipe(digits.read_mnist, f"{', '.join(digits.MNIST_FILES)} (plain or .gz)")

_RECIPES: dict[str, dict[str, _Recipe]] = {
    "mnist": {"mnist": _MNIST},
    "digit5": {
        "mnist": _MNIST,
        "mnist_m": _Recipe(
            digits.read_mnist_m,
            f"{', '.join(digits.MNIST_M_LABELS)} with the folders mnist_m_train and "
            f"mnist_m_test, or {digits.MNIST_M_ARCHIVES[0]}",
        ),
        "svhn": _Recipe(digits.read_svhn, ", ".join(digits.SVHN_FILES)),
        "synth": _Recipe(
            digits.read_synth,
            f"{', '.join(digits.SYNTH_FILES)}, or {digits.SYNTH_ARCHIVE}",
        ),
        "usps": _Recipe(digits.read_usps, ", ".join(digits.USPS_FILES)),
    },
    "office10": {
        name: _Recipe(
            partial(photos.read_office_domain, domain=name), f"the folder {' or '.join(folders)}"
        )
        for name, folders in photos.OFFICE_FOLDERS.items()
    },
    "domainnet": {
        name: _Recipe(
            partial(photos.read_domainnet_domain, domain=name),
            f"{name}_train.txt, {name}_test.txt and {name}.zip or the folder {name}",
        )
        for name in photos.DOMAINNET_DOMAINS
    },
    "cifar10": {
        "cifar10": _Recipe(
            photos.read_cifar_10,
            f"{', '.join(photos.CIFAR_10_FILES)}, or {photos.CIFAR_10_ARCHIVE}",
        )
    },
    "cifar100": {
        "cifar100": _Recipe(
            photos.read_cifar_100,
            f"{', '.join(photos.CIFAR_100_FILES)}, or {photos.CIFAR_100_ARCHIVE}",
        )
    },
    "femnist": {"femnist": _Recipe(digits.read_femnist, digits.FEMNIST_FILES)},
}


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
    with open_destination(folder) as scratch:
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
            write_domain(folder, scratch, domain, read)
            outcome.prepared[domain] = _describe(read)
    return outcome


def _describe(domain: DomainArrays | DomainFolders) -> str:
    if isinstance(domain, DomainFolders):
        num_images = sum(len(images) for images in domain.classes.values())
        return f"{num_images:,} images of {len(domain.classes)} classes"
    images, clients = domain["x_train"], domain.get("clients_train")
    height, width = images.shape[1:3]
    color = "gray" if images.ndim == 3 else "RGB"
    counts = f"{len(images):,}"
    if "x_test" in domain:
        counts += f" training and {len(domain['x_test']):,} test"
    written = "" if clients is None else f" by {len(numpy.unique(clients)):,} writers"
    return f"{counts} images{written}, {height} x {width} {color}"
