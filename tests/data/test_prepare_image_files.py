"""`data prepare`: Office-Caltech and DomainNet, from folders and from archives."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy
import pytest
from original_files import (
    random_pixels,
    save_picture,
    write_domainnet,
    write_file,
    write_mnist,
    write_office,
    write_usps,
)
from prepared_sets import prepare, refusal

from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.public.photos import DOMAINNET_CLASSES, OFFICE_CLASSES, name_class

pytestmark = pytest.mark.whole

CALTECH_NAMES = (
    "003.backpack",
    "224.touring-bike",
    "027.calculator",
    "101.head-phones",
    "045.computer-keyboard",
    "127.laptop-101",
    "046.computer-monitor",
    "047.computer-mouse",
    "041.coffee-mug",
    "238.video-projector",
)


def listed_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_office_files_are_copied_unchanged(source: Path, data: Path) -> None:
    for domain in ("amazon", "caltech", "dslr", "webcam"):
        write_office(source / domain)
    outcome = prepare(source, data, "office10")
    assert outcome.missing == {}
    assert outcome.prepared["dslr"] == "20 images of 10 classes"
    assert listed_files(data / "office10") == listed_files(source)
    for name in listed_files(source):
        assert (data / "office10" / name).read_bytes() == (source / name).read_bytes()


def test_office_accepts_alternative_class_and_domain_names(source: Path, data: Path) -> None:
    write_office(source / "office31" / "Amazon" / "images", "back_pack", "laptop")
    # Classes of the originals that are not among the ten.
    for other in ("desktop_computer", "bike_helmet"):
        save_picture(
            source / "office31" / "Amazon" / "images" / other / "1.jpg", random_pixels(8, 8)
        )
    write_office(source / "caltech" / "256_ObjectCategories", *CALTECH_NAMES)
    for other in ("145.motorbikes-101", "146.mountain-bike"):
        save_picture(
            source / "caltech" / "256_ObjectCategories" / other / "1.jpg", random_pixels(8, 8)
        )
    outcome = prepare(source, data, "office10")
    assert list(outcome.prepared) == ["amazon", "caltech"]
    assert list(outcome.missing) == ["dslr", "webcam"]
    for domain in ("amazon", "caltech"):
        folders = sorted(path.name for path in (data / "office10" / domain).iterdir())
        assert folders == sorted(OFFICE_CLASSES)
        assert len(listed_files(data / "office10" / domain)) == 20


def test_caltech_names_map_to_office_classes() -> None:
    assert [name_class(name) for name in CALTECH_NAMES] == list(OFFICE_CLASSES)


@pytest.mark.parametrize("name", ["desktop_computer", "146.mountain-bike", "phone", "101", ""])
def test_other_class_names_are_not_matched(name: str) -> None:
    assert name_class(name) is None


def test_caltech_is_prepared_from_its_tar(source: Path, data: Path, tmp_path: Path) -> None:
    write_office(tmp_path / "256_ObjectCategories", *CALTECH_NAMES)
    write_file(tmp_path / "256_ObjectCategories" / "003.backpack" / "RENAME2", b"a script")
    (source / "caltech256").mkdir()
    with tarfile.open(source / "caltech256" / "256_ObjectCategories.tar", "w") as tar:
        tar.add(tmp_path / "256_ObjectCategories", "256_ObjectCategories")
    assert list(prepare(source, data, "office10").prepared) == ["caltech"]
    assert len(listed_files(data / "office10")) == 20


def test_invalid_office_folders_are_rejected(source: Path, data: Path) -> None:
    write_office(source / "amazon")
    broken = write_file(source / "amazon" / "mug" / "mug_0.jpg", b"no picture")
    assert f"{broken} (" in refusal(source, data, "office10")
    for path in (source / "amazon" / "mug").iterdir():
        path.unlink()
    shutil.rmtree(source / "amazon" / "bike")
    assert "amazon has no images of bike, mug" in refusal(source, data, "office10")
    write_office(source / "amazon", "back_pack")
    assert "more than one folder for backpack" in refusal(source, data, "office10")


def test_replace_removes_images_of_the_old_set(source: Path, data: Path) -> None:
    write_office(source / "amazon")
    prepare(source, data, "office10")
    (source / "amazon" / "mug" / "mug_0.jpg").rename(source / "amazon" / "mug" / "new.jpg")
    assert prepare(source, data, "office10").kept == ["amazon"]
    assert not (data / "office10" / "amazon" / "mug" / "new.jpg").exists()
    prepare(source, data, "office10", replace=True)
    assert listed_files(data / "office10") == listed_files(source)


def test_replace_leaves_one_layout(source: Path, data: Path) -> None:
    write_office(source / "amazon")
    write_file(data / "office10" / "amazon.npz", b"arrays of another day")
    assert prepare(source, data, "office10").kept == ["amazon"]
    prepare(source, data, "office10", replace=True)
    assert [entry.name for entry in (data / "office10").iterdir()] == ["amazon"]


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


def test_domainnet_keeps_the_official_split(source: Path, data: Path) -> None:
    write_domainnet(source, "real")
    outcome = prepare(source, data, "domainnet")
    assert outcome.prepared == {"real": "20 training and 10 test images, 64 x 64 RGB"}
    assert list(outcome.missing) == ["clipart", "infograph", "painting", "quickdraw", "sketch"]
    check_domainnet(data, "real")


def test_domainnet_is_prepared_from_zips_and_split_lists(
    source: Path, data: Path, tmp_path: Path
) -> None:
    for domain in ("clipart", "quickdraw"):
        write_domainnet(tmp_path / "made", domain)
        with zipfile.ZipFile(source / f"{domain}.zip", "w") as archive:
            for path in sorted((tmp_path / "made" / domain).rglob("*.png")):
                archive.write(path, path.relative_to(tmp_path / "made"))
            archive.writestr("__MACOSX/clipart/bird/._1.png", b"what an archiver leaves")
        for part in ("train", "test"):
            name = f"{domain}_{part}.txt"
            (source / "splits").mkdir(exist_ok=True)
            (tmp_path / "made" / name).rename(source / "splits" / name)
    assert list(prepare(source, data, "domainnet").prepared) == ["clipart", "quickdraw"]
    for domain in ("clipart", "quickdraw"):
        check_domainnet(data, domain)
    assert listed_files(data / "domainnet") == ["clipart.npz", "quickdraw.npz"]


def test_domainnet_folder_names_are_case_insensitive(source: Path, data: Path) -> None:
    write_domainnet(source, "real")
    (source / "real").rename(source / "Real")
    prepare(source, data, "domainnet")
    check_domainnet(data, "real")


def test_gray_domainnet_images_are_written_in_color(source: Path, data: Path) -> None:
    write_domainnet(source, "quickdraw")
    for path in source.rglob("*.png"):
        save_picture(path, random_pixels(70, 70))
    prepare(source, data, "domainnet")
    with numpy.load(data / "domainnet" / "quickdraw.npz") as archive:
        assert archive["x_test"].shape == (10, 64, 64, 3)


def test_image_listed_twice_is_stored_twice(source: Path, data: Path) -> None:
    write_domainnet(source, "real")
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
    write_domainnet(source, "real")
    lines = (source / "real_train.txt").read_text().splitlines()[:20]
    path = write_file(source / "real_train.txt", "\n".join([*lines, line]).encode())
    sentence = refusal(source, data, "domainnet")
    assert told in sentence
    assert str(path) in sentence


def test_domainnet_needs_split_lists_and_images(source: Path, data: Path) -> None:
    write_domainnet(source, "real")
    lists = {path.name: path.read_bytes() for path in source.glob("*.txt")}
    (source / "real_test.txt").unlink()
    assert "has real_train.txt but lacks real_test.txt" in refusal(source, data, "domainnet")
    (source / "real_train.txt").unlink()
    sentence = refusal(source, data, "domainnet")
    assert "images of real but lacks real_train.txt and real_test.txt" in sentence
    for name, content in lists.items():
        write_file(source / name, content)
    (source / "real_train.txt").write_text("real/bird/real_000_000000.png 0\n")
    assert f"lists no images of {', '.join(DOMAINNET_CLASSES[1:])}" in refusal(
        source, data, "domainnet"
    )
    shutil.rmtree(source / "real")
    assert "lacks real.zip, or a folder real, with" in refusal(source, data, "domainnet")
    with zipfile.ZipFile(source / "real.zip", "w") as archive:
        archive.writestr("real/aircraft_carrier/1.png", b"")
    assert "lacks real.zip, or a folder real, with" in refusal(source, data, "domainnet")


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
from mpfedcl.data.public import archives
from mpfedcl.data.public.prepare import prepare_set

def die(self, target):
    os.kill(os.getpid(), signal.SIGKILL)

Path.replace = die
prepare_set(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
"""


@pytest.mark.parametrize("name", ["mnist", "office10"])
def test_killed_preparation_leaves_no_readable_set(source: Path, data: Path, name: str) -> None:
    if name == "mnist":
        write_mnist(source)
    else:
        write_office(source / "amazon")
    ended = subprocess.run(
        [sys.executable, "-c", _KILLED, name, str(source), str(data / name)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert ended.returncode == -9
    entries = [entry.name for entry in (data / name).iterdir()]
    assert entries == [".preparing"], "killed after all was written, before it was renamed"
    assert listed_files(data / name / ".preparing") != []
    outcome = prepare(source, data, name)
    assert len(outcome.prepared) == 1
    assert ".preparing" not in [entry.name for entry in (data / name).iterdir()]


@pytest.mark.parametrize("name", ["cifar", "folder", "mnist-sample"])
def test_unknown_sets_are_rejected(source: Path, data: Path, name: str) -> None:
    sentence = refusal(source, data, name)
    assert f"{name!r} cannot be prepared; it must be one of mnist, digit5, office10" in sentence


def test_source_that_is_not_a_folder_is_rejected(tmp_path: Path, data: Path) -> None:
    assert "must be a folder" in refusal(tmp_path / "nowhere", data, "mnist")
    write_file(tmp_path / "file", b"")
    assert "must be a folder" in refusal(tmp_path / "file", data, "mnist")
