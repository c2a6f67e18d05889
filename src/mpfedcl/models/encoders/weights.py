"""Weights of the ResNet-18 encoder: where they are found, and how they are checked."""

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment.data_folder import (
    SAFETENSORS,
    TORCH,
    WEIGHTS_VARIABLE,
    list_weights,
    weights_places,
)
from mpfedcl.models.encoders.preprocessing import Preprocessing
from mpfedcl.models.resnet import ResNet18

_PREFIXES = ("module.", "encoder.", "backbone.")
_WRAPPERS = ("state_dict", "model", "model_state_dict")
"""Keys under which training scripts keep the weights beside other things."""
_MOST_NAMES_LISTED = 3
_RANDOM = "--encoder.name random-resnet18 asks for a random encoder"


@dataclass(frozen=True)
class EncoderWeights:
    """Parameters and running statistics in float32, and what images they expect."""

    tensors: Tensors
    preprocessing: Preprocessing


def find_weights(asked: Path | None, *data_folders: Path) -> Path:
    """Return the weights file: the one asked for, else $MPFEDCL_WEIGHTS, else beside the data."""
    if asked is not None:
        return _choose_file(asked.expanduser(), "encoder.weights")
    if os.environ.get(WEIGHTS_VARIABLE):
        return _choose_file(Path(os.environ[WEIGHTS_VARIABLE]).expanduser(), f"${WEIGHTS_VARIABLE}")
    places = weights_places(*data_folders)
    for place in places:
        if found := _find_in_folder(place):
            return found
    raise InvalidInput(
        f"encoder.weights is not set, and neither ${WEIGHTS_VARIABLE} nor "
        f"{' nor '.join(str(place) for place in dict.fromkeys(places))} has "
        "a file resnet18*.safetensors or resnet18*.pth; it must name "
        f"ResNet-18 weights, or --encoder.name none trains on pixels ({_RANDOM})."
    )


def load_weights(path: Path) -> EncoderWeights:
    """Read a file of ResNet-18 weights; names and shapes must be torchvision's."""
    found: Mapping[str, Any]
    metadata: Mapping[str, str] = {}
    try:
        if path.suffix in SAFETENSORS:
            found, metadata = read_safetensors_file(path)
        elif path.suffix in TORCH:
            found = read_torch_file(path)
        else:
            raise InvalidInput(
                f"{path} ends in {path.suffix!r}; encoder weights must be a file "
                f"{', '.join(f'*{suffix}' for suffix in (*SAFETENSORS, *TORCH))}."
            )
    except OSError as error:
        raise InvalidInput(
            f"{path} cannot be read ({error.strerror or error}); encoder.weights must name a "
            f"file of ResNet-18 weights ({_RANDOM})."
        ) from None
    tensors = _check_shapes(_strip_prefixes(found), path)
    return EncoderWeights(tensors, Preprocessing.from_metadata(metadata, Preprocessing()))


def _choose_file(path: Path, origin: str) -> Path:
    if not path.exists():
        raise InvalidInput(
            f"{origin} is {str(path)!r}, which does not exist; it must be a file of ResNet-18 "
            f"weights, or a folder with one ({_RANDOM})."
        )
    if not path.is_dir():
        return path
    found = _find_in_folder(path)
    if found is None:
        raise InvalidInput(
            f"{origin} is the folder {path}, which has no file resnet18*.safetensors or "
            "resnet18*.pth; it must have one, or name a file."
        )
    return found


def _find_in_folder(folder: Path) -> Path | None:
    """Return the safetensors file of a folder, or its .pth file where it has none."""
    for suffixes in (SAFETENSORS, TORCH):
        found = list_weights(folder, suffixes)
        if len(found) > 1:
            raise InvalidInput(
                f"{folder} has {', '.join(path.name for path in found)}; encoder.weights must say "
                "which of them."
            )
        if found:
            return found[0]
    return None


def read_safetensors_file(path: Path) -> tuple[Tensors, Mapping[str, str]]:
    """Read a safetensors file with its metadata."""
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except SafetensorError as error:
        raise InvalidInput(f"{path} cannot be read as safetensors: {error}.") from None


def read_torch_file(path: Path) -> Mapping[str, Any]:
    """Read a state dict that torch.save wrote, tensors alone."""
    try:
        # weights_only: a pickle can run any program when it is read; this reads tensors alone.
        with warnings.catch_warnings():
            # It warns of odd pickles before it refuses them; the refusal is enough.
            warnings.simplefilter("ignore")
            found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    # Broken bytes make torch raise anything from EOFError to RuntimeError.
    except Exception as error:
        if type(error).__name__ == "UnpicklingError":
            raise InvalidInput(
                f"{path} holds Python objects beside tensors, which are never read because they "
                "can run any program; it must be a plain state dict "
                "(torch.save(model.state_dict(), ...))."
            ) from None
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise InvalidInput(
            f"{path} cannot be read ({reason}); it must be a file that torch.save wrote."
        ) from None
    while isinstance(found, dict):
        inner = next((found[key] for key in _WRAPPERS if isinstance(found.get(key), dict)), None)
        if inner is None:
            return found
        found = inner
    raise InvalidInput(
        f"{path} holds a {type(found).__name__}; it must be a state dict of ResNet-18."
    )


def _strip_prefixes(found: Mapping[str, Any]) -> dict[str, Any]:
    """Strip what wrappers put before names; leave out the classifier and the batch counters."""
    cleaned = {}
    for full_name, value in found.items():
        name = str(full_name)
        while name.startswith(_PREFIXES):
            name = name.partition(".")[2]
        if not name.startswith("fc.") and not name.endswith("num_batches_tracked"):
            cleaned[name] = value
    return cleaned


def _check_shapes(found: Mapping[str, Any], path: Path) -> Tensors:
    shapes = ResNet18().shapes()
    missing = [name for name in shapes if name not in found]
    unknown = [name for name in found if name not in shapes]
    wrong = [
        f"{name} as {_describe(found[name])} instead of {list(shape)}"
        for name, shape in shapes.items()
        if name in found and not _fits(found[name], shape)
    ]
    faults = [
        f"{verb} {_enumerate(names)}"
        for verb, names in (("lacks", missing), ("has the unknown", unknown), ("has", wrong))
        if names
    ]
    if faults:
        raise InvalidInput(
            f"{path} {' and '.join(faults)}; it must hold ResNet-18 with torchvision's names "
            "and shapes (fc.* is not needed)."
        )
    tensors = {name: found[name].detach().to(torch.float32).contiguous() for name in shapes}
    broken = [
        name
        for name, value in tensors.items()
        if not value.isfinite().all() or (name.endswith("running_var") and (value < 0).any())
    ]
    if broken:
        raise InvalidInput(
            f"{path} has values in {_enumerate(broken)} that are not finite, or variances below "
            "0; its training has failed, so other weights must be given."
        )
    return tensors


def _fits(value: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape == shape


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    kind = "" if value.is_floating_point() else f"{value.dtype} "
    return f"{kind}{list(value.shape)}"


def _enumerate(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES_LISTED
    listed = ", ".join(names[:_MOST_NAMES_LISTED])
    return f"{listed} and {more} more" if more > 0 else listed
