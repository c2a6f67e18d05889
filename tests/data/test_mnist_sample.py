"""The embedded sample: what is in it, where it comes from, and that it can be made again."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from image_sets import DomainImages, read_image_set
from mpfedcl.core.images import Images
from mpfedcl.data.samples import Indices
from mpfedcl.experiment.settings import DatasetSettings

pytestmark = pytest.mark.whole

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "src" / "mpfedcl" / "data" / "mnist_sample.npz"
SCRIPT = ROOT / "scripts" / "make_mnist_sample.py"


@pytest.fixture(scope="module")
def sample() -> DomainImages:
    return read_image_set(DatasetSettings(name="mnist-sample")).domains[0]


@pytest.fixture(scope="module")
def mnist() -> Path:
    places = [Path(os.environ["MPFEDCL_DATA"])] if os.environ.get("MPFEDCL_DATA") else []
    for place in (*places, ROOT.parent / "shared" / "data"):
        if (place / "mnist" / "mnist.npz").is_file():
            return place
    pytest.skip("MNIST is neither in $MPFEDCL_DATA nor in ../shared/data")


def test_mnist_sample_is_small_and_balanced(sample: DomainImages) -> None:
    assert SAMPLE.stat().st_size < 1_000_000
    assert sample.test_labels is not None
    assert numpy.bincount(sample.train_labels).tolist() == [200] * 10
    assert numpy.bincount(sample.test_labels).tolist() == [100] * 10
    assert sample.train_images.shape == (2000, 28, 28)


def test_mnist_sample_is_shuffled(sample: DomainImages) -> None:
    # Labels in order would make long runs; shuffled, one in ten neighbors is alike.
    alike = numpy.mean(sample.train_labels[1:] == sample.train_labels[:-1])
    assert 0.05 < alike < 0.15


def prints(images: Images, labels: Indices) -> set[bytes]:
    return {
        hashlib.blake2b(image.tobytes() + bytes([label])).digest()
        for image, label in zip(images, labels.tolist(), strict=True)
    }


def test_every_image_is_part_of_mnist(sample: DomainImages, mnist: Path) -> None:
    (whole,) = read_image_set(DatasetSettings(name="mnist", root=mnist)).domains
    assert whole.test_images is not None
    assert whole.test_labels is not None
    assert sample.test_images is not None
    assert sample.test_labels is not None
    train = prints(sample.train_images, sample.train_labels)
    test = prints(sample.test_images, sample.test_labels)
    assert len(train) == 2000
    assert len(test) == 1000
    assert train <= prints(whole.train_images, whole.train_labels)
    assert test <= prints(whole.test_images, whole.test_labels)


def make_sample(source: Path, out: Path) -> bytes:
    command = [sys.executable, str(SCRIPT), str(source), "--out", str(out)]
    small = ["--train-per-digit", "5", "--test-per-digit", "3"]
    subprocess.run([*command, *small], check=True, capture_output=True)
    return out.read_bytes()


def test_script_output_is_reproducible(tmp_path: Path) -> None:
    generator = numpy.random.default_rng(0)
    source = tmp_path / "source.npz"
    numpy.savez(
        source,
        x_train=generator.integers(0, 256, (200, 4, 4), dtype=numpy.uint8),
        y_train=numpy.arange(200) % 10,
        x_test=generator.integers(0, 256, (100, 4, 4), dtype=numpy.uint8),
        y_test=numpy.arange(100) % 10,
    )
    first = make_sample(source, tmp_path / "one.npz")
    assert make_sample(source, tmp_path / "two.npz") == first
    with numpy.load(tmp_path / "one.npz", allow_pickle=False) as made:
        assert numpy.bincount(made["y_train"]).tolist() == [5] * 10
        assert numpy.bincount(made["y_test"]).tolist() == [3] * 10
        assert made["x_train"].dtype == made["y_train"].dtype == numpy.uint8


def test_script_makes_the_packaged_sample(tmp_path: Path, mnist: Path) -> None:
    out = tmp_path / "sample.npz"
    source = mnist / "mnist" / "mnist.npz"
    subprocess.run(
        [sys.executable, str(SCRIPT), str(source), "--out", str(out)],
        check=True,
        capture_output=True,
    )
    # Arrays, not bytes: another zlib may compress otherwise.
    with numpy.load(out) as made, numpy.load(SAMPLE) as packaged:
        assert set(made.files) == set(packaged.files)
        for name in made.files:
            assert numpy.array_equal(made[name], packaged[name])


def test_license_and_source_are_documented() -> None:
    text = SAMPLE.with_name("MNIST-LICENSE.md").read_text(encoding="utf-8")
    for told in ("CC BY-SA 3.0", "LeCun", "Cortes", "Burges", "subset"):
        assert told in text
