"""Small files in the formats in which the originals are published."""

import bz2
import gzip
import struct
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray
from PIL import Image

from mpfedcl.data.public import photos

Bytes = NDArray[numpy.uint8]


def random_pixels(*shape: int, seed: int = 0) -> Bytes:
    return numpy.random.default_rng(seed).integers(0, 256, shape, dtype=numpy.uint8)


def idx_bytes(array: Bytes) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.tobytes()


def write_file(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def write_mnist(folder: Path, compressed: bool = True) -> dict[str, Bytes]:
    """Write 12 training and 11 test digits and return them."""
    arrays = {
        "x_train": random_pixels(12, 28, 28, seed=1),
        "y_train": (numpy.arange(12) % 10).astype(numpy.uint8),
        "x_test": random_pixels(11, 28, 28, seed=2),
        "y_test": (numpy.arange(11) % 10).astype(numpy.uint8),
    }
    files = {"x_train": "train-images-idx3", "y_train": "train-labels-idx1"}
    files |= {"x_test": "t10k-images-idx3", "y_test": "t10k-labels-idx1"}
    for key, name in files.items():
        path = folder / f"{name}-ubyte{'.gz' if compressed else ''}"
        content = idx_bytes(arrays[key])
        write_file(path, gzip.compress(content) if compressed else content)
    return arrays


def write_mat(path: Path, images: Any, labels: Any, **options: Any) -> Path:
    from scipy.io import savemat

    path.parent.mkdir(parents=True, exist_ok=True)
    savemat(path, {"X": images, "y": labels}, **{"do_compression": True, **options})
    return path


def write_svhn(folder: Path, prefix: str = "", labels: Any = None) -> Bytes:
    """Write training and test digits with labels 1 to 10, and return the training images."""
    images = random_pixels(32, 32, 3, 10)
    numbers = numpy.arange(1, 11) if labels is None else numpy.asarray(labels)
    write_mat(folder / f"{prefix}train_32x32.mat", images, numbers[:, None].astype(numpy.uint8))
    write_mat(
        folder / f"{prefix}test_32x32.mat", images[..., :4], numbers[:4, None].astype(numpy.uint8)
    )
    return images


def libsvm_bytes(pixels: NDArray[numpy.float64], labels: list[int]) -> bytes:
    lines = [
        " ".join([str(label), *(f"{i}:{value:.6g}" for i, value in enumerate(row, start=1))])
        for row, label in zip(pixels, labels, strict=True)
    ]
    return bz2.compress("\n".join([*lines, ""]).encode())


def write_usps(folder: Path) -> Bytes:
    """Write 10 training and 3 test digits, labels 1 to 10, and return the training images."""
    images = random_pixels(10, 16, 16)
    pixels = images.reshape(10, 256) / 127.5 - 1
    write_file(folder / "usps.bz2", libsvm_bytes(pixels, list(range(1, 11))))
    write_file(folder / "usps.t.bz2", libsvm_bytes(pixels[:3], [10, 1, 2]))
    return images


def save_picture(path: Path, pixels: Bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def write_mnist_m(folder: Path) -> Bytes:
    """Write 10 training and 4 test images with their label files; return the training images."""
    images = random_pixels(10, 32, 32, 3)
    for part, count in (("train", 10), ("test", 4)):
        lines = []
        # Not in the order of the names, so that only the list can tell the labels.
        for number in reversed(range(count)):
            save_picture(folder / f"mnist_m_{part}" / f"{number:08}.png", images[number])
            lines.append(f"{number:08}.png {number}")
        write_file(folder / f"mnist_m_{part}_labels.txt", "\n".join([*lines, ""]).encode())
    return images


def write_domainnet(folder: Path, domain: str) -> None:
    """Write three images of each class and one of a class beyond the ten, and the split."""
    lists: dict[str, list[str]] = {"train": [], "test": []}
    for label, name in enumerate((*photos.DOMAINNET_CLASSES, "aircraft_carrier")):
        for number in range(3):
            inner = f"{domain}/{name}/{domain}_{label:03}_{number:06}.png"
            pixels = numpy.full((80, 100, 3), (label, number * 100, 200), dtype=numpy.uint8)
            save_picture(folder / inner, pixels)
            lists["test" if number == 1 else "train"].append(f"{inner} {label + 30}")
    for part, lines in lists.items():
        write_file(folder / f"{domain}_{part}.txt", "\n".join([*lines, ""]).encode())


def cifar_bytes(labels: list[tuple[int, ...]], images: Bytes) -> bytes:
    """Return records: the labels, then the red, the green and the blue plane."""
    planes = [b"".join(image[..., color].tobytes() for color in range(3)) for image in images]
    return b"".join(bytes(own) + each for own, each in zip(labels, planes, strict=True))


def write_cifar10(folder: Path) -> Bytes:
    """Write five files of two images, labels 0 to 9, and a test file of three; return all."""
    images = random_pixels(13, 32, 32, 3)
    for number in range(5):
        own = slice(2 * number, 2 * number + 2)
        content = cifar_bytes([(2 * number,), (2 * number + 1,)], images[own])
        write_file(folder / f"data_batch_{number + 1}.bin", content)
    write_file(folder / "test_batch.bin", cifar_bytes([(9,), (0,), (4,)], images[10:]))
    return images


def write_cifar100(folder: Path) -> Bytes:
    """Write four training images and a test image, coarse label first; return all."""
    images = random_pixels(5, 32, 32, 3)
    labels: list[tuple[int, ...]] = [(4, 0), (1, 1), (19, 99), (14, 2)]
    write_file(folder / "train.bin", cifar_bytes(labels, images[:4]))
    write_file(folder / "test.bin", cifar_bytes([(11, 98)], images[4:]))
    return images
