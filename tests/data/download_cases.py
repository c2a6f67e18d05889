"""A file to download, and the sentence where it cannot be had."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.public import download
from mpfedcl.data.public.download import fetch_file
from mpfedcl.data.public.sources import PublicFile

BODY = bytes(range(256)) * 400
OTHER = BODY[::-1]
PAGE = "http://example.org/where-people-find-it"


@contextmanager
def quick(attempts: int = 3, timeout: float = 5.0) -> Iterator[None]:
    """Retry without pauses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download, "PAUSE", 0.0)
        patch.setattr(download, "ATTEMPTS", attempts)
        patch.setattr(download, "TIMEOUT", timeout)
        yield


def original(*addresses: str, body: bytes = BODY, **settings: Any) -> PublicFile:
    sha256 = hashlib.sha256(body).hexdigest()
    return PublicFile("file.bin", addresses, **{"size": len(body), "sha256": sha256, **settings})


def bring(folder: Path, wanted: PublicFile, **settings: Any) -> bytes:
    with quick(**settings):
        path = fetch_file(wanted, folder, PAGE)
    assert path == folder / "file.bin"
    assert [entry.name for entry in folder.iterdir()] == ["file.bin"]
    return path.read_bytes()


def refusal(folder: Path, wanted: PublicFile, **settings: Any) -> str:
    with quick(**settings), pytest.raises(InvalidInput) as caught:
        fetch_file(wanted, folder, PAGE)
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert not (folder / "file.bin").exists()
    assert PAGE in sentence
    assert str(folder / "file.bin") in sentence
    return sentence
