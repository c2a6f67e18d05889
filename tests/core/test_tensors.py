"""Files that are whole or not there."""

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import write_atomically
from mpfedcl.core.tensors import digest, load_tensors, pack_tensors
from small_experiments import assert_same_tensors


def test_file_is_written_and_replaced(tmp_path: Path) -> None:
    for content in (b"first", b"", b"second"):
        write_atomically(tmp_path / "file", content)
        assert (tmp_path / "file").read_bytes() == content
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_failed_write_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    write_atomically(tmp_path / "file", b"old")
    with monkeypatch.context() as patch:
        patch.setattr(*((os, "fsync", fail) if step == "fsync" else (Path, "replace", fail)))
        with pytest.raises(OSError, match="No space left"):
            write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_tensors_are_read_back(tmp_path: Path) -> None:
    tensors = {
        "b": torch.arange(6).reshape(2, 3).T,
        "a": torch.randn(3, dtype=torch.float64, requires_grad=True),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(1.5),
    }
    write_atomically(tmp_path / "x.safetensors", pack_tensors(tensors))
    assert_same_tensors(load_tensors(tmp_path / "x.safetensors"), tensors)


def test_equal_tensors_give_equal_bytes(tmp_path: Path) -> None:
    left = {"a": torch.ones(2), "b": torch.zeros(3)}
    right = {"b": torch.zeros(3), "a": torch.ones(2)}
    assert pack_tensors(left) == pack_tensors(right)
    assert pack_tensors(left, ("names", "[1]")) == pack_tensors(right, ("names", "[1]"))
    write_atomically(tmp_path / "x.safetensors", pack_tensors(left, ("names", "[1]")))
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.metadata() == {"names": "[1]"}


def test_tensors_that_share_memory_are_packed_separately() -> None:
    tensor = torch.arange(4.0)
    shared = {"a": tensor, "b": tensor, "c": tensor[1:3]}
    apart = {name: value.clone() for name, value in shared.items()}
    assert pack_tensors(shared) == pack_tensors(apart)


@pytest.mark.parametrize("content", [b"", b"nothing of the kind", b"\xff" * 100])
def test_file_without_tensors_is_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(InvalidInput, match=r"x\.safetensors cannot be read as safetensors"):
        load_tensors(tmp_path / "x.safetensors")


def test_missing_tensor_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"x\.safetensors cannot be read"):
        load_tensors(tmp_path / "x.safetensors")


def test_digest_is_sha256() -> None:
    # The SHA-256 of "abc", from the standard's own example.
    assert digest(b"abc").startswith("ba7816bf8f01cfea414140de5dae2223b00361a396177a9c")


def test_devices_and_pipes_are_rejected_as_tensors(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "b.safetensors")
    for name in ("a", "b"):
        with pytest.raises(InvalidInput, match="as safetensors: it is not a regular"):
            load_tensors(tmp_path / f"{name}.safetensors")
