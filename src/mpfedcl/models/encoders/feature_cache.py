"""The feature cache: each image passes a frozen encoder once ever.

A feature vector is kept under the SHA-256 of the encoder's fingerprint and the image's pixels, so
that other weights, other preprocessing or a changed image can never be mistaken for it. A listing
keeps which vectors a source gave, under a signature of its files, so that a second run of the same
experiment neither opens an image nor imports what would decode it.
"""

import hashlib
import os
import re
import sqlite3
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self, TypeVar

import numpy

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.images import Images
from mpfedcl.core.progress import WaitingBar
from mpfedcl.models.encoders.encoder import Encoder, Features
from mpfedcl.models.encoders.feature_store import (
    FeatureStore,
    Key,
    StoreDescription,
    is_damaged,
    move_damaged_database,
)

FOLDER_VARIABLE = "MPFEDCL_CACHE"
SIZE_VARIABLE = "MPFEDCL_CACHE_SIZE"
DEFAULT_SIZE = 2 * 1024**3
_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
_IMAGES_AT_ONCE = 256
"""Images in a transaction: what a kill can cost, and what is in memory at once."""

_Result = TypeVar("_Result")


def cache_path() -> Path:
    """Return $MPFEDCL_CACHE/features.sqlite, else the same in the user's cache folder."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "mpfedcl"
    folder = Path(os.environ.get(FOLDER_VARIABLE) or usual)
    return folder.expanduser() / "features.sqlite"


def cache_limit() -> int:
    """Return the largest size of the cache in bytes: $MPFEDCL_CACHE_SIZE, else 2 GiB; 0: none."""
    told = os.environ.get(SIZE_VARIABLE) or str(DEFAULT_SIZE)
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", told, re.IGNORECASE)
    if found is None:
        raise InvalidInput(
            f"${SIZE_VARIABLE} is {told!r}; it must be a number of bytes such as 500M or 2G, or 0 "
            "for no cache."
        )
    return int(float(found[1]) * _UNITS[found[2].upper()])


class FeatureCache:
    """Features from the cache where they are there, else from the encoder.

    A cache that cannot be used costs a warning and time, never the run.
    """

    def __init__(
        self,
        path: Path | None = None,
        limit: int | None = None,
        warn: Callable[[str], None] = lambda sentence: print(sentence, file=sys.stderr),
    ) -> None:
        self.path = cache_path() if path is None else path
        self.limit = cache_limit() if limit is None else limit
        self._warn = warn
        self._store: FeatureStore | None = None
        self._usable = self.limit > 0
        self._was_rebuilt = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def encode_source(
        self, encoder: Encoder, signature: str, load: Callable[[], Images]
    ) -> Features:
        """Return the features of a source's images in order; `load` is called only if needed."""
        listing = hashlib.sha256(f"{encoder.fingerprint} {signature}".encode()).digest()
        keys = self._with_store(lambda store: store.read_listing(listing))
        if keys:
            vectors = self._read(keys, listing)
            is_whole = len(vectors) == len(set(keys))
            if is_whole and len({len(vector) for vector in vectors.values()}) == 1:
                return _stack_vectors(keys, vectors)
        images = load()
        keys = _image_keys(images, encoder)
        features = self._encode(encoder, images, keys)
        self._with_store(lambda store: store.write_listing(listing, keys))
        return features

    def encode_images(self, encoder: Encoder, images: Images) -> Features:
        """Return the features of images that are in memory anyway."""
        return self._encode(encoder, images, _image_keys(images, encoder))

    def describe(self) -> StoreDescription:
        """Return what the cache holds; nothing where there is none."""
        empty = StoreDescription(0, 0, {})
        if not self.path.exists():
            return empty
        return self._with_store(lambda store: store.describe()) or empty

    def clear(self) -> None:
        """Drop everything."""
        if self.path.exists():
            self._with_store(lambda store: store.clear())

    def close(self) -> None:
        """Let go of the file; it is opened again when needed."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def _encode(self, encoder: Encoder, images: Images, keys: list[Key]) -> Features:
        """Look each image up and encode what is missing, chunk by chunk."""
        size = encoder.feature_size
        features = numpy.empty((len(images), size), dtype=numpy.float32)
        if self._usable and features.nbytes > self.limit:
            self._warn(
                f"These features need {features.nbytes / 1024**2:,.0f} MiB, and the feature cache "
                f"holds {self.limit / 1024**2:,.0f}; ${SIZE_VARIABLE} lets it hold more."
            )
        with WaitingBar(f"Encoding images, {encoder.name}", len(images)) as bar:
            for first in range(0, len(images), _IMAGES_AT_ONCE):
                chunk = keys[first : first + _IMAGES_AT_ONCE]
                vectors = {k: v for k, v in self._read(chunk).items() if len(v) == 4 * size}
                # The first place of each missing image, in order: equal ones are encoded once.
                places: dict[Key, int] = {}
                for place, key in enumerate(chunk, start=first):
                    if key not in vectors:
                        places.setdefault(key, place)
                bar.advance(len(chunk) - len(places))
                if places:
                    missing = images[list(places.values())]
                    encoded = encoder.encode(missing, on_progress=bar.advance)
                    rows = [vector.astype("<f4").tobytes() for vector in encoded]
                    new = dict(zip(places, rows, strict=True))
                    self._write(encoder, new)
                    vectors |= new
                features[first : first + len(chunk)] = _stack_vectors(chunk, vectors)
        return features

    def _write(self, encoder: Encoder, vectors: dict[Key, bytes]) -> None:
        self._with_store(lambda store: store.write(encoder.fingerprint, encoder.name, vectors))

    def _read(self, keys: list[Key], listing: Key = b"") -> dict[Key, bytes]:
        """Return the vectors that are here; note that they were used."""
        found = self._with_store(lambda store: store.read(keys))
        if found is None:
            return {}
        vectors, stale = found
        if stale:
            self._with_store(lambda store: store.note_use(stale, listing))
        return vectors

    def _with_store(self, action: Callable[[FeatureStore], _Result]) -> _Result | None:
        """Do something with the store; None where it cannot be done."""
        if not self._usable:
            return None
        try:
            if self._store is None:
                self._store = FeatureStore(self.path, self.limit)
            return action(self._store)
        except sqlite3.Error as error:
            if is_damaged(error) and not self._was_rebuilt:
                self._rebuild()
            else:
                self._disable(str(error))
        except OSError as error:
            self._disable(error.strerror or str(error))
        return None

    def _rebuild(self) -> None:
        self._was_rebuilt = True
        self.close()
        try:
            aside = move_damaged_database(self.path)
        except OSError as error:
            self._disable(error.strerror or str(error))
            return
        self._warn(
            f"The feature cache {self.path} was damaged; it is now {aside.name}, and features are "
            "computed again."
        )

    def _disable(self, reason: str) -> None:
        self._usable = False
        self.close()
        self._warn(
            f"The feature cache {self.path} cannot be used ({reason}); features are computed but "
            f"not kept. ${FOLDER_VARIABLE} names another folder for it."
        )


def _image_keys(images: Images, encoder: Encoder) -> list[Key]:
    """Return a key for each image: encoder, shape and pixels."""
    begin = hashlib.sha256(f"{encoder.fingerprint} {images.shape[1:]}".encode())
    keys = []
    for image in images:
        sha = begin.copy()
        sha.update(numpy.ascontiguousarray(image).data)
        keys.append(sha.digest())
    return keys


def _stack_vectors(keys: Sequence[Key], vectors: Mapping[Key, bytes]) -> Features:
    joined = b"".join([vectors[key] for key in keys])
    # A copy: what frombuffer gives cannot be written to, and torch warns of that.
    return numpy.frombuffer(joined, dtype="<f4").reshape(len(keys), -1).astype(numpy.float32)
