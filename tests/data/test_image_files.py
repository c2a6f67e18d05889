"""Domains as folders of image files: every kind of file, and the sentence for each fault."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

from image_sets import ImageSet, read_image_set
from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment.settings import DatasetSettings


def save(path: Path, picture: Image.Image, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path, **options)
    return path


def plain(mode: str = "L", size: tuple[int, int] = (6, 8), color: Any = 100) -> Image.Image:
    return Image.new(mode, size, color)


def read_folder(root: Path, **settings: Any) -> ImageSet:
    return read_image_set(DatasetSettings(name="folder", root=root, **settings))


def read_one(root: Path, **settings: Any) -> Any:
    """Return the only image of a set."""
    (image,) = read_folder(root, **settings).domains[0].train_images
    return image


def refusal(root: Path, **settings: Any) -> str:
    with pytest.raises(InvalidInput) as caught:
        read_folder(root, **settings)
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return sentence


def test_labels_follow_the_sorted_union_of_class_folders(tmp_path: Path) -> None:
    save(tmp_path / "photo" / "dog" / "1.png", plain(color=1))
    save(tmp_path / "photo" / "cat" / "2.png", plain(color=2))
    save(tmp_path / "art" / "bee" / "3.png", plain(color=3))
    save(tmp_path / "art" / "dog" / "4.png", plain(color=4))
    save(tmp_path / "art" / "dog" / "5.png", plain(color=5))
    image_set = read_folder(tmp_path)
    assert image_set.class_names == ("bee", "cat", "dog")
    art, photo = image_set.domains
    assert (art.name, photo.name) == ("art", "photo")
    assert art.train_labels.tolist() == [0, 2, 2]
    assert photo.train_labels.tolist() == [1, 2]
    assert art.train_images[:, 0, 0].tolist() == [3, 4, 5]
    assert photo.train_images[:, 0, 0].tolist() == [2, 1]
    assert art.test_images is None
    # The same label for the same class when a domain is read alone.
    (alone,) = read_folder(tmp_path, domains=("photo",)).domains
    assert alone.train_labels.tolist() == [1, 2]


def test_common_image_size_is_kept(tmp_path: Path) -> None:
    for number in range(3):
        save(tmp_path / "a" / "c" / f"{number}.png", plain(size=(6, 8)))
    assert read_folder(tmp_path).domains[0].train_images.shape == (3, 8, 6)


def test_different_image_sizes_become_28(tmp_path: Path) -> None:
    save(tmp_path / "a" / "c" / "1.png", plain(size=(6, 8)))
    save(tmp_path / "b" / "c" / "1.jpg", plain(size=(60, 80)))
    image_set = read_folder(tmp_path)
    assert all(domain.train_images.shape == (1, 28, 28) for domain in image_set.domains)
    assert all(abs(int(domain.train_images.max()) - 100) <= 1 for domain in image_set.domains)


def test_image_size_setting_overrides_the_files(tmp_path: Path) -> None:
    save(tmp_path / "a" / "c" / "1.png", plain(size=(6, 8)))
    assert read_one(tmp_path, image_size=12).shape == (12, 12)


def test_one_color_image_makes_all_rgb(tmp_path: Path) -> None:
    save(tmp_path / "a" / "c" / "1.png", plain(color=90))
    save(tmp_path / "b" / "c" / "1.png", plain("RGB", color=(10, 20, 30)))
    gray, color = (domain.train_images[0] for domain in read_folder(tmp_path).domains)
    assert gray.shape == color.shape == (8, 6, 3)
    assert gray[0, 0].tolist() == [90, 90, 90]
    assert color[0, 0].tolist() == [10, 20, 30]


@pytest.mark.parametrize("name", ["x.png", "x.PNG", "x.jpg", "x.JPG", "x.jpeg", "x.JpEg"])
def test_extensions_are_case_insensitive(tmp_path: Path, name: str) -> None:
    picture = io.BytesIO()
    plain().save(picture, "PNG" if name.lower().endswith("png") else "JPEG")
    path = tmp_path / "a" / "c" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(picture.getvalue())
    assert read_one(tmp_path).shape == (8, 6)


def test_other_files_and_folders_are_ignored(tmp_path: Path) -> None:
    save(tmp_path / "a" / "c" / "1.png", plain())
    (tmp_path / "a" / "c" / "notes.txt").write_text("nothing")
    (tmp_path / "a" / "c" / "._1.png").write_bytes(b"what a file manager leaves")
    (tmp_path / "a" / ".cache").mkdir()
    (tmp_path / ".git" / "c").mkdir(parents=True)
    (tmp_path / "a" / "readme.md").write_text("nothing")
    (tmp_path / "README").write_text("nothing")
    (tmp_path / "an empty folder").mkdir()
    image_set = read_folder(tmp_path)
    assert [domain.name for domain in image_set.domains] == ["a"]
    assert image_set.class_names == ("c",)
    assert len(image_set.domains[0].train_images) == 1


def test_transparent_pixels_become_white(tmp_path: Path) -> None:
    picture = plain("RGBA", color=(10, 20, 30, 255))
    picture.putpixel((0, 0), (10, 20, 30, 0))
    save(tmp_path / "a" / "c" / "1.png", picture)
    image = read_one(tmp_path)
    assert image.shape == (8, 6, 3)
    assert image[0, 0].tolist() == [255, 255, 255]
    assert image[1, 1].tolist() == [10, 20, 30]


def test_gray_with_alpha_stays_gray(tmp_path: Path) -> None:
    picture = plain("LA", color=(40, 255))
    picture.putpixel((0, 0), (40, 0))
    save(tmp_path / "a" / "c" / "1.png", picture)
    image = read_one(tmp_path)
    assert image.shape == (8, 6)
    assert (image[0, 0], image[1, 1]) == (255, 40)


@pytest.mark.parametrize("mode", ["L", "RGB", "P"])
def test_transparent_color_becomes_white(tmp_path: Path, mode: str) -> None:
    picture = plain("RGB", color=(50, 50, 50)).convert(mode)
    picture.putpixel((0, 0), {"L": 7, "RGB": (7, 7, 7), "P": 3}[mode])  # type: ignore[arg-type]
    transparent: Any = {"L": 7, "RGB": (7, 7, 7), "P": 3}[mode]
    save(tmp_path / "a" / "c" / "1.png", picture, transparency=transparent)
    image = read_one(tmp_path)
    assert numpy.all(image[0, 0] == 255)
    assert numpy.all(abs(image[1, 1].astype(int) - 50) <= 1)


def test_palette_becomes_rgb(tmp_path: Path) -> None:
    picture = Image.new("P", (6, 8), 1)
    picture.putpalette([0, 0, 0, 200, 100, 50])
    save(tmp_path / "a" / "c" / "1.png", picture)
    assert read_one(tmp_path)[0, 0].tolist() == [200, 100, 50]


def test_black_and_white_becomes_gray(tmp_path: Path) -> None:
    save(tmp_path / "a" / "c" / "1.png", plain("1", color=1))
    assert numpy.all(read_one(tmp_path) == 255)


@pytest.mark.parametrize(("deep", "shallow"), [(0, 0), (65535, 255), (257 * 99, 99), (300, 1)])
def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path, deep: int, shallow: int) -> None:
    picture = Image.fromarray(numpy.full((8, 6), deep, dtype=numpy.uint16))
    save(tmp_path / "a" / "c" / "1.png", picture)
    image = read_one(tmp_path)
    assert image.shape == (8, 6)
    assert numpy.all(image == shallow)


def test_sixteen_bit_images_next_to_color_images(tmp_path: Path) -> None:
    picture = Image.fromarray(numpy.full((8, 6), 65535, dtype=numpy.uint16))
    save(tmp_path / "a" / "c" / "1.png", picture)
    save(tmp_path / "a" / "c" / "2.png", plain("RGB", color=(1, 2, 3)))
    images = read_folder(tmp_path).domains[0].train_images
    assert images[:, 0, 0].tolist() == [[255, 255, 255], [1, 2, 3]]


def test_cmyk_becomes_rgb(tmp_path: Path) -> None:
    save(tmp_path / "a" / "c" / "1.jpg", plain("CMYK", color=(0, 255, 255, 0)), quality=95)
    red, green, blue = read_one(tmp_path)[4, 3].tolist()
    assert red > 200
    assert green < 60
    assert blue < 60


@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_orientation_is_respected(tmp_path: Path, suffix: str) -> None:
    picture = Image.new("L", (16, 8), 0)
    picture.paste(255, (0, 0, 8, 8))  # bright on the left as stored
    exif = Image.Exif()
    exif[0x0112] = 6  # turn clockwise to look at it
    save(tmp_path / "a" / "c" / f"1.{suffix}", picture, exif=exif.tobytes())
    image = read_one(tmp_path)
    assert image.shape == (16, 8)
    assert image[:6].min() > 200
    assert image[-6:].max() < 50


def test_result_does_not_depend_on_threads(tmp_path: Path) -> None:
    generator = numpy.random.default_rng(1)
    for number in range(60):
        noise = generator.integers(0, 256, (9, 9, 3), dtype=numpy.uint8)
        save(tmp_path / "a" / f"class-{number % 4}" / f"{number}.png", Image.fromarray(noise))
    once, twice = (read_folder(tmp_path, image_size=5).domains[0] for _ in range(2))
    assert numpy.array_equal(once.train_images, twice.train_images)
    assert numpy.array_equal(once.train_labels, twice.train_labels)


def test_broken_file_is_rejected_by_name(tmp_path: Path) -> None:
    save(tmp_path / "a" / "c" / "good.png", plain())
    broken = tmp_path / "a" / "c" / "broken.jpg"
    broken.write_bytes(b"no image at all")
    sentence = refusal(tmp_path)
    assert str(broken) in sentence
    assert "cannot be read as an image" in sentence
    assert "PNG or JPEG" in sentence


@pytest.mark.parametrize("name", ["cut.jpg", "cut.png"])
def test_truncated_file_is_rejected(tmp_path: Path, name: str) -> None:
    generator = numpy.random.default_rng(2)
    noise = Image.fromarray(generator.integers(0, 256, (64, 64), dtype=numpy.uint8))
    path = save(tmp_path / "a" / "c" / name, noise)
    path.write_bytes(path.read_bytes()[:-1500])
    assert str(path) in refusal(tmp_path)


def test_broken_files_are_counted_and_the_first_named(tmp_path: Path) -> None:
    save(tmp_path / "a" / "c" / "good.png", plain())
    for number in range(5):
        (tmp_path / "a" / "c" / f"bad-{number}.png").write_bytes(b"")
    sentence = refusal(tmp_path)
    assert "5 files cannot be read as images" in sentence
    assert "bad-0.png" in sentence
    assert "bad-2.png" in sentence
    assert "bad-4.png" not in sentence


def test_image_in_another_format_is_rejected(tmp_path: Path) -> None:
    save(tmp_path / "a" / "c" / "good.png", plain())
    path = tmp_path / "a" / "c" / "picture.png"
    content = io.BytesIO()
    plain().save(content, "BMP")
    path.write_bytes(content.getvalue())
    assert str(path) in refusal(tmp_path)


def png_of_size(width: int, height: int) -> bytes:
    """Return a PNG of a few bytes that claims a size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + check

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("side", [10_000, 30_000])  # Pillow warns of the first, refuses the second
def test_decompression_bombs_are_rejected(tmp_path: Path, side: int) -> None:
    save(tmp_path / "a" / "c" / "good.png", plain())
    bomb = tmp_path / "a" / "c" / "bomb.png"
    bomb.write_bytes(png_of_size(side, side))
    sentence = refusal(tmp_path)
    assert str(bomb) in sentence
    assert "pixels" in sentence


@pytest.mark.parametrize("content", ["nothing", "hidden", "text", "folder"])
def test_empty_class_folder_is_rejected_by_name(tmp_path: Path, content: str) -> None:
    save(tmp_path / "a" / "full" / "1.png", plain())
    empty = tmp_path / "a" / "hollow"
    empty.mkdir()
    if content == "hidden":
        save(empty / ".1.png", plain())
    elif content == "text":
        (empty / "list.txt").write_text("1.png")
    elif content == "folder":
        save(empty / "deeper" / "1.png", plain())
    sentence = refusal(tmp_path)
    assert str(empty) in sentence
    assert "has no images; a class folder must hold at least one file *.png" in sentence


def test_first_empty_class_folders_are_named(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / "a" / f"class-{number}").mkdir(parents=True)
    sentence = refusal(tmp_path)
    assert "class-0" in sentence
    assert "and 3 more have no images" in sentence


def test_empty_class_in_an_unselected_domain_is_accepted(tmp_path: Path) -> None:
    save(tmp_path / "a" / "c" / "1.png", plain())
    (tmp_path / "b" / "hollow").mkdir(parents=True)
    assert len(read_folder(tmp_path, domains=("a",)).domains) == 1


def test_unknown_class_folder_in_a_named_set_is_rejected(tmp_path: Path) -> None:
    save(tmp_path / "mnist" / "pen" / "ten" / "1.png", plain())
    with pytest.raises(InvalidInput) as caught:
        read_image_set(DatasetSettings(name="mnist", root=tmp_path))
    assert "class folder 'ten'" in str(caught.value)
    assert "0, 1, 2" in str(caught.value)


def test_named_set_is_read_from_folders(tmp_path: Path) -> None:
    save(tmp_path / "mnist" / "pen" / "7" / "1.png", plain())
    image_set = read_image_set(DatasetSettings(name="mnist", root=tmp_path))
    assert image_set.domains[0].train_labels.tolist() == [7]
