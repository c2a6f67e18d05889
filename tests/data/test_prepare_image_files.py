"""`data prepare`: DomainNet from its archives, and domains that are kept."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy
import pytest
from original_files import (
    Bytes,
    random_pixels,
    save_picture,
    write_domainnet,
    write_file,
    write_mnist,
    write_usps,
)
from prepared_sets import prepare, refusal

from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.public.photos import DOMAINNET_CLASSES

pytestmark = pytest.mark.whole


def listed_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def write_zipped_domainnet(source: Path, domain: str, picture: Bytes | None = None) -> None:
    """Write the archive and the split of a domain, with one picture for all if it is given."""
    write_domainnet(source, domain)
    with zipfile.ZipFile(source / f"{domain}.zip", "w") as archive:
        for path in sorted((source / domain).rglob("*.png")):
            if picture is not None:
                save_picture(path, picture)
            archive.write(path, path.relative_to(source))
        archive.writestr("__MACOSX/clipart/bird/._1.png", b"what an archiver leaves")
    shutil.rmtree(source / domain)


def check_domainnet(data: Path, domain: str) -> None:
    with numpy.load(data / "domainnet" / f"{domain}.npz") as archive:
        arrays = dict(archive)
    assert arrays["x_train"].shape == (20, 64, 64, 3)
    assert arrays["x_test"].shape == (10, 64, 64, 3)
    assert arrays["y_train"].tolist() == [label for label in range(10) for _ in range(2)]
    assert arrays["y_test"].tolist() == list(range(10))
    # The colors tell which picture it is: class, number, and 200.
    assert arrays["x_train"][:, 0, 0].tolist() == [
        [label, number * 100, 200] for label in range(10) for number in (0, 2)
    ]
    assert arrays["x_test"][:, 63, 63].tolist() == [[label, 100, 200] for label in range(10)]


def test_domainnet_is_prepared_from_zips_and_split_lists(source: Path, data: Path) -> None:
    for domain in ("clipart", "quickdraw"):
        write_zipped_domainnet(source / "parts", domain)
    outcome = prepare(source, data, "domainnet")
    assert outcome.prepared["clipart"] == "20 training and 10 test images, 64 x 64 RGB"
    assert list(outcome.prepared) == ["clipart", "quickdraw"]
    assert list(outcome.missing) == ["infograph", "painting", "real", "sketch"]
    for domain in ("clipart", "quickdraw"):
        check_domainnet(data, domain)
    assert listed_files(data / "domainnet") == ["clipart.npz", "quickdraw.npz"]


def test_gray_domainnet_images_are_written_in_color(source: Path, data: Path) -> None:
    write_zipped_domainnet(source, "quickdraw", random_pixels(70, 70))
    prepare(source, data, "domainnet")
    with numpy.load(data / "domainnet" / "quickdraw.npz") as archive:
        assert archive["x_test"].shape == (10, 64, 64, 3)


def test_image_listed_twice_is_stored_twice(source: Path, data: Path) -> None:
    write_zipped_domainnet(source, "real")
    lines = (source / "real_test.txt").read_text().splitlines()
    write_file(source / "real_test.txt", "\n".join([*lines, lines[0]]).encode())
    prepare(source, data, "domainnet")
    with numpy.load(data / "domainnet" / "real.npz") as archive:
        assert archive["x_test"][10, 0, 0].tolist() == [0, 100, 200]
        assert archive["x_test"][0, 0, 0].tolist() == [0, 100, 200]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("real/bird/../../../secret.jpg 3", "each line must be real/<class>/<file> and a number"),
        ("/etc/bird/secret.jpg 3", "has '/etc/bird/secret.jpg 3' in line 21"),
        ("sketch/bird/sketch_031_000001.jpg 3", "in line 21"),
        ("real/../bird.jpg 3", "in line 21"),
        ("real/bird/real_000_000000.png", "in line 21"),
        ("real/bird/absent.png 3", "lists 1 images that are not there"),
    ],
)
def test_invalid_split_files_are_rejected(source: Path, data: Path, line: str, told: str) -> None:
    write_zipped_domainnet(source, "real")
    lines = (source / "real_train.txt").read_text().splitlines()[:20]
    path = write_file(source / "real_train.txt", "\n".join([*lines, line]).encode())
    sentence = refusal(source, data, "domainnet")
    assert told in sentence
    assert str(path) in sentence


def test_domainnet_needs_split_lists_and_images(source: Path, data: Path) -> None:
    write_zipped_domainnet(source, "real")
    lists = {path.name: path.read_bytes() for path in source.glob("*.txt")}
    (source / "real_test.txt").unlink()
    assert "has real_train.txt but lacks real_test.txt" in refusal(source, data, "domainnet")
    for name, content in lists.items():
        write_file(source / name, content)
    (source / "real_train.txt").write_text("real/bird/real_000_000000.png 0\n")
    assert f"lists no images of {', '.join(DOMAINNET_CLASSES[1:])}" in refusal(
        source, data, "domainnet"
    )
    (source / "real.zip").unlink()
    assert "real" in prepare(source, data, "domainnet").missing


def test_replace_leaves_one_layout(source: Path, data: Path) -> None:
    write_mnist(source)
    write_file(data / "mnist" / "mnist" / "0" / "a.png", b"an image of another day")
    assert prepare(source, data, "mnist").kept == ["mnist"]
    prepare(source, data, "mnist", replace=True)
    assert [entry.name for entry in (data / "mnist").iterdir()] == ["mnist.npz"]


def test_prepared_domains_are_kept(source: Path, data: Path) -> None:
    write_usps(source)
    prepare(source, data, "digit5")
    before = (data / "digit5" / "usps.npz").stat()
    write_mnist(source)
    outcome = prepare(source, data, "digit5")
    assert (list(outcome.prepared), outcome.kept) == (["mnist"], ["usps"])
    after = (data / "digit5" / "usps.npz").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    outcome = prepare(source, data, "digit5", replace=True)
    assert (list(outcome.prepared), outcome.kept) == (["mnist", "usps"], [])
    assert (data / "digit5" / "usps.npz").stat().st_ino != before.st_ino


def test_failed_replacement_keeps_the_old_set(source: Path, data: Path) -> None:
    write_usps(source)
    prepare(source, data, "digit5")
    before = (data / "digit5" / "usps.npz").read_bytes()
    write_file(source / "usps.bz2", b"broken")
    with pytest.raises(InvalidInput):
        prepare(source, data, "digit5", replace=True)
    assert (data / "digit5" / "usps.npz").read_bytes() == before
    assert listed_files(data / "digit5") == ["usps.npz"]


def test_only_requested_domains_are_prepared(source: Path, data: Path) -> None:
    write_usps(source)
    write_mnist(source)
    outcome = prepare(source, data, "digit5", only=("usps",))
    assert (list(outcome.prepared), outcome.kept, outcome.missing) == (["usps"], [], {})


_KILLED = """
import os, signal, sys
from pathlib import Path
from mpfedcl.data.public import originals
from mpfedcl.data.public.prepare import prepare_set

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

Path.replace = die
prepare_set(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
"""


def test_killed_preparation_leaves_no_readable_set(source: Path, data: Path) -> None:
    name = "mnist"
    write_mnist(source)
    ended = subprocess.run(
        [sys.executable, "-c", _KILLED, name, str(source), str(data / name)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert ended.returncode == -9
    entries = [entry.name for entry in (data / name).iterdir()]
    assert all(entry.startswith(".") for entry in entries), "killed before it was renamed"
    assert len(entries) == 2
    outcome = prepare(source, data, name)
    assert len(outcome.prepared) == 1
    assert [entry.name for entry in (data / name).iterdir()] == ["mnist.npz"]


@pytest.mark.parametrize("name", ["cifar", "folder", "mnist-sample"])
def test_unknown_sets_are_rejected(source: Path, data: Path, name: str) -> None:
    sentence = refusal(source, data, name)
    assert f"{name!r} cannot be prepared; it must be one of mnist, digit5, domainnet" in sentence


def test_source_that_is_not_a_folder_is_rejected(tmp_path: Path, data: Path) -> None:
    assert "must be a folder" in refusal(tmp_path / "nowhere", data, "mnist")
    write_file(tmp_path / "file", b"")
    assert "must be a folder" in refusal(tmp_path / "file", data, "mnist")
