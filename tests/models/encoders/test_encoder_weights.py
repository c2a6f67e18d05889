"""Encoder weights: where they are looked for, which files are read, and which are refused."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.models.encoders.encoder import Preprocessing
from mpfedcl.models.encoders.torch_encoders import find_weights, load_weights
from mpfedcl.models.resnet import ResNet18

pytestmark = pytest.mark.whole

IMAGENET = Preprocessing(64, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.fixture(autouse=True)
def _own_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPFEDCL_WEIGHTS", raising=False)


@pytest.fixture(scope="module")
def weights() -> Tensors:
    return ResNet18().init(torch.Generator().manual_seed(0), torch.float32)


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(InvalidInput) as caught:
        action()
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return sentence


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    return path


def test_weights_are_searched_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "shared" / "data"
    data.mkdir(parents=True)
    beside = touch(tmp_path / "shared" / "weights" / "resnet18_beside.safetensors")
    assert find_weights(None, data).samefile(beside)
    inside = touch(data / "weights" / "resnet18_inside.pth")
    assert find_weights(None, data) == inside
    named = touch(tmp_path / "elsewhere" / "any-name.safetensors")
    monkeypatch.setenv("MPFEDCL_WEIGHTS", str(named))
    assert find_weights(None, data) == named
    asked = touch(tmp_path / "mine.pt")
    assert find_weights(asked, data) == asked


def test_weights_next_to_a_relative_data_folder_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = touch(tmp_path / "weights" / "resnet18.safetensors")
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path / "data")
    assert find_weights(None, Path()).samefile(beside)


def test_folder_is_searched_for_safetensors_first(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    touch(folder / "mobilenet.safetensors")
    assert "has a file resnet18*" in refusal(lambda: find_weights(None, tmp_path))
    old = touch(folder / "resnet18-f37072fd.pth")
    assert find_weights(None, tmp_path) == old
    new = touch(folder / "resnet18.safetensors")
    assert find_weights(None, tmp_path) == new
    touch(folder / "resnet18_other.safetensors")
    sentence = refusal(lambda: find_weights(None, tmp_path))
    assert "resnet18.safetensors, resnet18_other.safetensors" in sentence
    assert "encoder.weights must" in sentence


def test_missing_weights_error_lists_all_options(tmp_path: Path) -> None:
    data = tmp_path / "data"
    sentence = refusal(lambda: find_weights(None, data))
    for part in (
        "encoder.weights",
        "$MPFEDCL_WEIGHTS",
        str(data / "weights"),
        str(tmp_path / "weights"),
        "--encoder.name none",
        "--encoder.name random-resnet18",
    ):
        assert part in sentence


def test_nonexistent_weights_path_is_rejected(tmp_path: Path) -> None:
    assert "No such file" in refusal(lambda: load_weights(tmp_path / "nothing.pth"))


@pytest.mark.parametrize("suffix", ["safetensors", "pth", "pt"])
def test_each_format_is_read_without_the_classifier(
    tmp_path: Path, weights: Tensors, suffix: str
) -> None:
    found: dict[str, Any] = dict(weights)
    found["fc.weight"] = torch.zeros(1000, 512)
    found["fc.bias"] = torch.zeros(1000)
    found["bn1.num_batches_tracked"] = torch.tensor(7)
    path = tmp_path / f"resnet18.{suffix}"
    if suffix == "safetensors":
        save_file(found, path)
    else:
        torch.save(found, path)
    loaded, preprocessing = load_weights(path)
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    assert preprocessing == IMAGENET


def test_half_precision_weights_become_float32(tmp_path: Path, weights: Tensors) -> None:
    path = tmp_path / "resnet18.safetensors"
    save_file({name: value.half() for name, value in weights.items()}, path)
    loaded = load_weights(path)[0]
    assert {value.dtype for value in loaded.values()} == {torch.float32}
    assert torch.equal(loaded["conv1.weight"], weights["conv1.weight"].half().float())


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, IMAGENET),
        (
            {"image_size": "32", "mean": "[0.1, 0.2, 0.3]", "std": "[1, 1, 2]"},
            Preprocessing(32, (0.1, 0.2, 0.3), (1.0, 1.0, 2.0)),
        ),
        ({"image_size": "96"}, Preprocessing(96, IMAGENET.mean, IMAGENET.std)),
        ({"resolution": "several"}, IMAGENET),
    ],
)
def test_preprocessing_is_read_from_the_metadata(
    tmp_path: Path, weights: Tensors, metadata: dict[str, str], expected: Preprocessing
) -> None:
    path = tmp_path / "resnet18.safetensors"
    save_file(weights, path, metadata=metadata)
    assert load_weights(path)[1] == expected


@pytest.mark.parametrize(
    "metadata",
    [
        {"image_size": "{"},
        {"image_size": "[]"},
        {"image_size": "1.5"},
        {"mean": "[1, 2]"},
        {"std": '"x"'},
        {"std": "[" * 100_000},
    ],
)
def test_invalid_metadata_is_rejected(
    tmp_path: Path, weights: Tensors, metadata: dict[str, str]
) -> None:
    path = tmp_path / "resnet18.safetensors"
    save_file(weights, path, metadata=metadata)
    assert "must be JSON" in refusal(lambda: load_weights(path))


def test_invalid_preprocessing_is_rejected() -> None:
    assert "image_size is 0" in refusal(lambda: Preprocessing(0))
    assert "std is" in refusal(lambda: Preprocessing(64, IMAGENET.mean, (1.0, 0.0, 1.0)))


def test_missing_unknown_and_misshapen_tensors_are_listed_in_one_error(
    tmp_path: Path, weights: Tensors
) -> None:
    found: dict[str, Any] = dict(weights)
    del found["conv1.weight"]
    found["stem.weight"] = torch.zeros(3)
    found["bn1.bias"] = torch.zeros(65)
    found["bn1.weight"] = torch.zeros(64, dtype=torch.int64)
    path = tmp_path / "resnet18.safetensors"
    save_file(found, path)
    sentence = refusal(lambda: load_weights(path))
    for name in ("conv1.weight", "bn1.weight", "bn1.bias"):
        assert name in sentence
    assert "and 1 more" in sentence
    assert str(path) in sentence


def test_only_the_first_of_many_faults_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "resnet18.safetensors"
    save_file({"conv1.weight": torch.zeros(64, 3, 7, 7)}, path)
    sentence = refusal(lambda: load_weights(path))
    assert "and 96 more" in sentence
    assert len(sentence) < 400


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_rejected(
    tmp_path: Path, weights: Tensors, value: float
) -> None:
    broken = {**weights, "layer2.0.bn1.bias": torch.full((128,), value)}
    path = tmp_path / "resnet18.safetensors"
    save_file(broken, path)
    assert "layer2.0.bn1.bias" in refusal(lambda: load_weights(path))


def test_negative_variance_is_rejected(tmp_path: Path, weights: Tensors) -> None:
    path = tmp_path / "resnet18.safetensors"
    save_file({**weights, "bn1.running_var": torch.full((64,), -1.0)}, path)
    assert "variances below 0" in refusal(lambda: load_weights(path))


@pytest.mark.parametrize("suffix", ["safetensors", "pth", "pt"])
@pytest.mark.parametrize("content", [b"", b"no weights at all", b"\x80\x04\x95", b"PK\x03\x04 zip"])
def test_broken_weight_files_are_rejected(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"resnet18.{suffix}"
    path.write_bytes(content)
    assert str(path) in refusal(lambda: load_weights(path))


def test_other_objects_and_unknown_suffixes_are_rejected(tmp_path: Path, weights: Tensors) -> None:
    path = tmp_path / "resnet18.pth"
    torch.save(torch.zeros(3), path)
    assert "holds a Tensor" in refusal(lambda: load_weights(path))
    torch.save({**weights, "bn1.bias": "text"}, path)
    assert "bn1.bias" in refusal(lambda: load_weights(path))
    reason = refusal(lambda: load_weights(tmp_path / "resnet18.bin"))
    assert "resnet18.bin" in reason
    assert ".safetensors" in reason


class Attack:
    """Runs a program when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.trace}'",)


@pytest.mark.parametrize("way", ["torch", "pickle", "inside"])
def test_malicious_pickle_is_rejected_and_not_executed(
    tmp_path: Path, weights: Tensors, way: str
) -> None:
    trace, path = tmp_path / "attacked", tmp_path / "resnet18.pth"
    if way == "pickle":
        path.write_bytes(pickle.dumps(Attack(trace)))
    else:
        torch.save({**weights, "x": Attack(trace)} if way == "inside" else Attack(trace), path)
    assert "never read" in refusal(lambda: load_weights(path))
    assert not trace.exists()
