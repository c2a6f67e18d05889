"""Make the MNIST sample that the package carries.

    python scripts/make_mnist_sample.py path/to/mnist.npz

The source has the arrays x_train, y_train, x_test, y_test (uint8 images, integer labels), as the
data folder's mnist.npz. The same source gives the same bytes: the draw has a fixed seed, and the
archive's entries carry a fixed date.
"""

import argparse
import zipfile
from pathlib import Path

import numpy
from numpy.typing import NDArray

SEED = 20240401
TRAIN_PER_DIGIT = 200
TEST_PER_DIGIT = 100
PACKAGED = Path(__file__).resolve().parents[1] / "src" / "mpfedcl" / "data" / "mnist_sample.npz"


def draw_balanced(
    labels: NDArray[numpy.integer], per_digit: int, generator: numpy.random.Generator
) -> NDArray[numpy.int64]:
    """Return the indices of `per_digit` images of each digit, in an order that says nothing."""
    chosen = []
    for digit in range(10):
        candidates = numpy.flatnonzero(labels == digit)
        if len(candidates) < per_digit:
            raise SystemExit(f"The source has {len(candidates)} of digit {digit}, not {per_digit}.")
        chosen.append(generator.choice(candidates, per_digit, replace=False))
    return generator.permutation(numpy.concatenate(chosen)).astype(numpy.int64)


def draw_sample(
    source: Path, train_per_digit: int, test_per_digit: int
) -> dict[str, NDArray[numpy.uint8]]:
    """Draw the sample's four arrays from the source archive."""
    generator = numpy.random.default_rng(SEED)
    sample = {}
    with numpy.load(source, allow_pickle=False) as archive:
        for part, per_digit in (("train", train_per_digit), ("test", test_per_digit)):
            labels = archive[f"y_{part}"]
            chosen = draw_balanced(labels, per_digit, generator)
            sample[f"x_{part}"] = archive[f"x_{part}"][chosen].astype(numpy.uint8)
            sample[f"y_{part}"] = labels[chosen].astype(numpy.uint8)
    return sample


def write_archive(path: Path, arrays: dict[str, NDArray[numpy.uint8]]) -> None:
    """Write a compressed npz whose bytes depend on the arrays alone."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, array in arrays.items():
            # numpy's own writer leaves the date to the zip module, which may put today's there.
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(entry, "w") as file:
                numpy.lib.format.write_array(file, array, allow_pickle=False)


def main() -> None:
    """Read the command line and write the sample."""
    parser = argparse.ArgumentParser(description="Make the MNIST sample that the package carries.")
    parser.add_argument("source", type=Path, help="mnist.npz")
    parser.add_argument("--out", type=Path, default=PACKAGED, help="file to write")
    parser.add_argument("--train-per-digit", type=int, default=TRAIN_PER_DIGIT)
    parser.add_argument("--test-per-digit", type=int, default=TEST_PER_DIGIT)
    settings = parser.parse_args()
    sample = draw_sample(settings.source, settings.train_per_digit, settings.test_per_digit)
    write_archive(settings.out, sample)
    sizes = ", ".join(f"{name} {array.shape}" for name, array in sample.items())
    print(f"Wrote {settings.out.stat().st_size:,} bytes: {sizes}")


if __name__ == "__main__":
    main()
