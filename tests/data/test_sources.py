"""Where sets are looked for, and which layouts are refused."""

import os
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

from image_sets import read_image_set
from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment.data_folder import find_data_folder
from mpfedcl.experiment.settings import DatasetSettings


@pytest.fixture(autouse=True)
def _own_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPFEDCL_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def refusal(**settings: Any) -> str:
    with pytest.raises(InvalidInput) as caught:
        read_image_set(DatasetSettings(**settings))
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return sentence


def save_archive(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    numpy.savez(
        path,
        x_train=numpy.zeros((4, 3, 3), dtype=numpy.uint8),
        y_train=numpy.arange(4),
    )


def save_picture(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (3, 3)).save(path)


def test_data_folder_precedence_is_setting_environment_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_data_folder(DatasetSettings())[0] == tmp_path / "home" / ".cache" / "mpfedcl"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert find_data_folder(DatasetSettings())[0] == tmp_path / "cache" / "mpfedcl"
    monkeypatch.setenv("MPFEDCL_DATA", "~/data")
    assert find_data_folder(DatasetSettings())[0] == tmp_path / "home" / "data"
    assert find_data_folder(DatasetSettings(root=tmp_path / "x"))[0] == tmp_path / "x"
    monkeypatch.setenv("MPFEDCL_DATA", "")
    assert find_data_folder(DatasetSettings())[0] == tmp_path / "cache" / "mpfedcl"


@pytest.mark.parametrize("through", ["dataset.root", "$MPFEDCL_DATA", "the cache folder"])
def test_named_set_is_read_from_each_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, through: str
) -> None:
    settings = DatasetSettings(name="mnist")
    folder = tmp_path / "place"
    if through == "dataset.root":
        settings = DatasetSettings(name="mnist", root=folder)
    elif through == "$MPFEDCL_DATA":
        monkeypatch.setenv("MPFEDCL_DATA", str(folder))
    else:
        folder = tmp_path / "home" / ".cache" / "mpfedcl"
    with pytest.raises(InvalidInput) as caught:
        read_image_set(settings)
    assert f"{folder / 'mnist'} (from {through}) does not exist" in str(caught.value)
    save_archive(folder / "mnist" / "mnist.npz")
    assert len(read_image_set(settings).domains) == 1


def test_missing_set_is_rejected_with_advice(tmp_path: Path) -> None:
    sentence = refusal(name="mnist", root=tmp_path / "nowhere")
    assert "dataset.name is 'mnist'" in sentence
    assert str(tmp_path / "nowhere" / "mnist") in sentence
    assert "mnist-sample needs no files" in sentence


def test_folder_needs_a_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MPFEDCL_DATA", str(tmp_path))
    sentence = refusal(name="folder")
    assert "dataset.root is not set" in sentence
    assert "mnist-sample needs no files" in sentence


def test_file_as_root_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "pictures.zip"
    path.write_bytes(b"")
    assert f"{path} (from dataset.root) is a file" in refusal(name="folder", root=path)


def test_folder_without_a_known_layout_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing here")
    (tmp_path / "empty").mkdir()
    sentence = refusal(name="folder", root=tmp_path)
    assert f"{tmp_path} has neither npz files nor domain folders" in sentence
    assert "<domain>/<class>/*.png|jpg" in sentence


def test_class_folders_without_a_domain_are_rejected(tmp_path: Path) -> None:
    save_picture(tmp_path / "dog" / "1.png")
    sentence = refusal(name="folder", root=tmp_path)
    assert f"{tmp_path / 'dog'} holds images but no class folders" in sentence
    assert f"{tmp_path}/<domain>/<class>/*.png|jpg" in sentence


def test_two_layouts_in_one_folder_are_rejected(tmp_path: Path) -> None:
    save_archive(tmp_path / "ink.npz")
    save_picture(tmp_path / "photo" / "dog" / "1.png")
    sentence = refusal(name="folder", root=tmp_path)
    assert "npz files (ink)" in sentence
    assert "domain folders (photo)" in sentence
    assert "dataset.domains" in sentence
    for domain in ("ink", "photo"):
        settings = DatasetSettings(name="folder", root=tmp_path, domains=(domain,))
        assert read_image_set(settings).domains[0].name == domain


def test_domain_as_file_and_folder_is_rejected(tmp_path: Path) -> None:
    save_archive(tmp_path / "ink.npz")
    save_picture(tmp_path / "ink" / "dog" / "1.png")
    assert "ink.npz and the folder ink" in refusal(name="folder", root=tmp_path)


def test_unknown_domain_of_the_sample_is_rejected() -> None:
    sentence = refusal(name="mnist-sample", domains=("svhn",))
    assert "dataset.domains has 'svhn'" in sentence
    assert "mnist-sample" in sentence


def test_unknown_set_is_rejected() -> None:
    sentence = refusal(name="cifar")
    assert "dataset.name is 'cifar'" in sentence
    assert "mnist-sample, mnist" in sentence


@pytest.mark.parametrize("place", ["set", "domain", "class"])
def test_folder_without_list_permission_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    save_picture(tmp_path / "photo" / "dog" / "1.png")
    folders = {"set": "", "domain": "photo", "class": "photo/dog"}
    forbidden = tmp_path / folders[place]
    list_folder = Path.iterdir

    def refuse(folder: Path) -> Any:
        if folder == forbidden:
            raise PermissionError(13, "Permission denied", str(folder))
        return list_folder(folder)

    # Simulated, since the superuser may list anything.
    monkeypatch.setattr(Path, "iterdir", refuse)
    sentence = refusal(name="folder", root=tmp_path)
    assert f"{forbidden} cannot be read (Permission denied)" in sentence
    assert "must be readable" in sentence


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read anything")
@pytest.mark.parametrize("name", ["ink.npz", "photo/dog/1.png", "photo/dog", "photo"])
def test_file_without_read_permission_is_rejected(tmp_path: Path, name: str) -> None:
    save_archive(tmp_path / "ink.npz")
    save_picture(tmp_path / "photo" / "dog" / "1.png")
    path = tmp_path / name
    mode = path.stat().st_mode
    path.chmod(0)
    try:
        sentence = refusal(
            name="folder", root=tmp_path, domains=(name.split("/")[0].split(".")[0],)
        )
    finally:
        path.chmod(mode)
    assert str(path) in sentence
    assert "Permission denied" in sentence
