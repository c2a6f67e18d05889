"""A file to download, and the sentence where it cannot be had."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.public.download import RetryPolicy, fetch_file
from mpfedcl.data.public.sources import PublicFile

BODY = bytes(range(256)) * 400
OTHER = BODY[::-1]
PAGE = "http://example.org/where-people-find-it"


class Naps:
    """Sleeps that are written down and not slept."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def retries(**settings: Any) -> RetryPolicy:
    return RetryPolicy(**{"attempts": 3, "timeout": 5.0, "sleep": Naps(), **settings})


def original(*addresses: str, body: bytes = BODY, **settings: Any) -> PublicFile:
    sha256 = hashlib.sha256(body).hexdigest()
    return PublicFile("file.bin", addresses, **{"size": len(body), "sha256": sha256, **settings})


def bring(folder: Path, wanted: PublicFile, **settings: Any) -> bytes:
    path = fetch_file(wanted, folder, PAGE, retries(**settings))
    assert path == folder / "file.bin"
    assert [entry.name for entry in folder.iterdir()] == ["file.bin"]
    return path.read_bytes()


def refusal(folder: Path, wanted: PublicFile, **settings: Any) -> str:
    with pytest.raises(InvalidInput) as caught:
        fetch_file(wanted, folder, PAGE, retries(**settings))
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert not (folder / "file.bin").exists()
    assert PAGE in sentence
    assert str(folder / "file.bin") in sentence
    return sentence
