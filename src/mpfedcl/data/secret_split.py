"""A client's own split of its samples, drawn by a secret that no one else knows.

A sample is a test sample if its keyed hash is below the fraction. The hash depends on the content
of that sample and on the secret only: not on the server's settings, not on the labels, and not on
the other samples, so that a sample keeps its part when others come, and copies share theirs.
"""

import hmac
import json
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy
from numpy.typing import NDArray

from mpfedcl.core.errors import InvalidInput, explain_faults
from mpfedcl.data.image_files import ImageFileStore
from mpfedcl.data.npz_archive import ArchiveStore
from mpfedcl.data.samples import JoinedSampleStore, SampleIndex, SampleStore
from mpfedcl.data.tables import TableStore

SECRET_FILE = "split.key"
_SECRET_BYTES = 32
_PART = 2**64
"""Number of values of the part of a hash that is compared."""


def find_secret(folder: Path) -> bytes:
    """Return the secret of a client; the first call creates it, readable by its owner only."""
    path = folder / SECRET_FILE
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Complete before it has its name, so that a crash leaves no short secret.
        new = folder / f".{SECRET_FILE}.{secrets.token_hex(4)}"
        new.touch(mode=0o600, exist_ok=False)
        try:
            new.write_bytes(secrets.token_bytes(_SECRET_BYTES))
            with suppress(FileExistsError):
                path.hardlink_to(new)
        finally:
            new.unlink()
    with explain_faults(path, f"{_SECRET_BYTES} bytes that its owner can read"):
        content, mode = path.read_bytes(), path.stat().st_mode
    if len(content) != _SECRET_BYTES or mode & 0o077:
        raise InvalidInput(
            f"{path} has {len(content)} bytes and mode {mode & 0o777:04o}; it must be the file of "
            f"{_SECRET_BYTES} bytes and mode 0600 that mpfedcl has created."
        )
    return content


def split_by_secret(sample_index: SampleIndex, secret: bytes, fraction: float) -> SampleIndex:
    """Return the data with a test set in every domain; domains that have one keep it."""
    if all(domain.test is not None for domain in sample_index.domains):
        return sample_index
    store = sample_index.store
    limit = round(fraction * _PART)
    tests: NDArray[numpy.bool_] = numpy.fromiter(
        (_hash(secret, content) < limit for content in _contents(store)), bool, len(store)
    )
    domains = tuple(
        domain
        if domain.test is not None
        else replace(
            domain,
            train=domain.train.select(~tests[domain.train.rows]),
            test=domain.train.select(tests[domain.train.rows]),
        )
        for domain in sample_index.domains
    )
    return replace(sample_index, domains=domains)


def _hash(secret: bytes, content: bytes) -> int:
    return int.from_bytes(hmac.digest(secret, content, "sha256")[:8])


def _contents(store: SampleStore) -> Iterator[bytes]:
    """Yield the content of each sample, as it is in its file, before any setting changes it."""
    match store:
        case JoinedSampleStore():
            for each in store.stores:
                yield from _contents(each)
        case ImageFileStore():
            for path in store.paths:
                with explain_faults(path, "a file that can be read"):
                    yield path.read_bytes()
        case ArchiveStore():
            yield from store.contents()
        case TableStore():
            # All cells: a server chooses which columns a run uses.
            for row in store.cells:
                yield json.dumps(row, default=str).encode()
        case _:
            raise AssertionError(f"{type(store).__name__} is no data of a client")
