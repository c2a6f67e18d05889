"""Archives that attack: each is refused with a sentence, and nothing lands outside."""

import gzip
import io
import shutil
import stat
import tarfile
import zipfile
from collections import namedtuple
from pathlib import Path, PurePosixPath

import pytest

from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.public import originals
from mpfedcl.data.public.originals import unpack_archive

ESCAPES = ["../evil.txt", "ROOT/evil.txt", "a/../../evil.txt", "a\\..\\evil.txt", "C:evil.txt"]


def make_zip(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            # A ZipInfo keeps names that a plain string would be cleaned of.
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return path


def make_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def everything(_path: PurePosixPath) -> bool:
    return True


def sample_index(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def refusal(archive: Path, folder: Path) -> str:
    with pytest.raises(InvalidInput) as caught:
        unpack_archive(archive, folder, everything)
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert str(archive) in sentence
    return sentence


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inner = tmp_path / "deep" / "folder"
    inner.mkdir(parents=True)
    return inner


@pytest.mark.parametrize("kind", ["a.zip", "a.tar", "a.tar.gz"])
def test_only_wanted_members_are_unpacked(tmp_path: Path, folder: Path, kind: str) -> None:
    make = make_zip if kind.endswith("zip") else make_tar
    archive = make(tmp_path / kind, {"x/one.png": b"one", "x/two.txt": b"two", "three.png": b""})
    assert unpack_archive(archive, folder, lambda path: path.suffix == ".png") == folder
    assert sample_index(folder) == ["three.png", "x/one.png"]
    assert (folder / "x" / "one.png").read_bytes() == b"one"


@pytest.mark.parametrize("name", ESCAPES)
@pytest.mark.parametrize("kind", ["a.zip", "a.tar"])
def test_no_member_is_written_outside_the_folder(
    tmp_path: Path, folder: Path, kind: str, name: str
) -> None:
    make = make_zip if kind.endswith("zip") else make_tar
    before = sample_index(tmp_path)
    archive = make(tmp_path / kind, {name.replace("ROOT", str(tmp_path)): b"evil"})
    if kind == "a.tar" and ".." in name and "\\" not in name:
        assert "outside" in refusal(archive, folder)
    else:
        # The name is made harmless.
        unpack_archive(archive, folder, everything)
    outside = [path for path in sample_index(tmp_path) if not path.startswith("deep/folder/")]
    assert outside == sorted([*before, kind])


def test_links_are_not_made(tmp_path: Path, folder: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
            member = tarfile.TarInfo(f"link-{kind!r}")
            member.type, member.linkname = kind, str(secret)
            archive.addfile(member)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as zipped:
        info = zipfile.ZipInfo("link")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        zipped.writestr(info, str(secret))
    for name in ("a.tar", "a.zip"):
        unpack_archive(tmp_path / name, folder, everything)
    assert not any(path.is_symlink() for path in folder.iterdir())
    assert "secret" not in [path.read_text() for path in folder.iterdir()]


@pytest.mark.parametrize("kind", ["a.zip", "a.tar.gz"])
def test_archives_above_the_declared_size_limit_are_rejected(
    tmp_path: Path, folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = make_zip if kind.endswith("zip") else make_tar
    archive = make(tmp_path / kind, {f"{n}.png": bytes(10**6) for n in range(5)})
    assert archive.stat().st_size < 50_000
    monkeypatch.setattr(originals, "MOST_BYTES_UNPACKED", 3 * 10**6)
    assert "declares 5 files of 5,000,000 bytes" in refusal(archive, folder)
    monkeypatch.setattr(originals, "MOST_BYTES_UNPACKED", 10**9)
    monkeypatch.setattr(originals, "MOST_FILES_UNPACKED", 4)
    assert "at most 4 files" in refusal(archive, folder)
    assert list(folder.iterdir()) == []


def test_archive_larger_than_the_free_space_is_rejected(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(99, 0, 99))
    archive = make_zip(tmp_path / "a.zip", {"one.png": bytes(100)})
    assert "and 99 bytes" in refusal(archive, folder)
    assert list(folder.iterdir()) == []


def test_zip_that_declares_too_little_is_rejected(tmp_path: Path, folder: Path) -> None:
    declared = 100
    archive = make_zip(tmp_path / "a.zip", {"one.png": bytes(10_000)})
    content = archive.read_bytes()
    lie = content.replace((10_000).to_bytes(4, "little"), declared.to_bytes(4, "little"))
    assert lie != content
    archive.write_bytes(lie)
    refusal(archive, folder)
    assert sum(path.stat().st_size for path in folder.iterdir()) <= declared


@pytest.mark.parametrize("kind", ["a.zip", "a.tar", "a.tar.gz"])
def test_broken_archives_are_rejected(tmp_path: Path, folder: Path, kind: str) -> None:
    make = make_zip if kind.endswith("zip") else make_tar
    # Noise does not shrink, so that half of the archive ends within a file.
    noise = bytes((number * number * 7919 >> 3) % 251 for number in range(40_000))
    archive = make(tmp_path / kind, {"one.png": noise, "two.png": noise})
    whole = archive.read_bytes()
    for content in (whole[: len(whole) // 3], whole[: len(whole) // 2], b"<html>", b""):
        archive.write_bytes(content)
        sentence = refusal(archive, folder)
        assert "whole" in sentence


def test_damaged_member_is_rejected(tmp_path: Path, folder: Path) -> None:
    archive = make_zip(tmp_path / "a.zip", {"one.png": bytes(range(256)) * 50})
    content = bytearray(archive.read_bytes())
    content[60] ^= 0xFF
    archive.write_bytes(content)
    assert "cannot be read" in refusal(archive, folder)


def test_gzip_without_a_tar_is_rejected(tmp_path: Path, folder: Path) -> None:
    archive = tmp_path / "a.tar.gz"
    archive.write_bytes(gzip.compress(b"no tar inside" * 99))
    sentence = refusal(archive, folder)
    assert len(sentence) < 300
