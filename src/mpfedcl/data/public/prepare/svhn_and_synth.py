"""Digits in MATLAB files, X [32, 32, 3, images] and y: SVHN and SynthDigits."""

from pathlib import Path
from typing import Any

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.images import Images
from mpfedcl.data.public.prepare.originals_folder import (
    OriginalsFolder,
    check_labels,
    find_or_unpack,
    find_train_and_test,
)
from mpfedcl.data.samples import DomainImages
from mpfedcl.data.train_test_split import Indices

SVHN_FILES = ("train_32x32.mat", "test_32x32.mat")
SYNTH_FILES = ("synth_train_32x32.mat", "synth_test_32x32.mat")
SYNTH_ARCHIVE = "SynthDigits.zip"


def read_svhn(source: OriginalsFolder) -> DomainImages | None:
    """Read the cropped digits of SVHN, where label 10 means 0; None without the files."""
    paths = find_train_and_test(source, SVHN_FILES)
    if paths is None:
        return None
    parts = [_read_part(path, range(1, 11)) for path in paths]
    (train_images, train_labels), (test_images, test_labels) = parts
    return DomainImages("svhn", train_images, train_labels % 10, test_images, test_labels % 10)


def read_synth(source: OriginalsFolder) -> DomainImages | None:
    """Read SynthDigits from its files or its zip archive; None without them."""
    paths = find_or_unpack(
        source, SYNTH_FILES, [SYNTH_ARCHIVE], lambda path: path.name in SYNTH_FILES
    )
    if paths is None:
        return None
    parts = [_read_part(path, range(10)) for path in paths]
    return DomainImages("synth", *parts[0], *parts[1])


def _read_part(path: Path, allowed_labels: range) -> tuple[Images, Indices]:
    from scipy.io import loadmat, whosmat

    declared = _explain_faults(path, lambda: whosmat(path))
    sizes = {name: (tuple(shape), kind) for name, shape, kind in declared}
    for name in ("X", "y"):
        if name not in sizes:
            listed = ", ".join(sorted(sizes)) or "nothing"
            raise InvalidInput(
                f"{path} lacks {name}: it has {listed}, and must have X and y and be whole."
            )
    shape, kind = sizes["X"]
    # Declared sizes come first, so that no array of another kind is ever unpacked.
    if len(shape) != 4 or shape[:3] != (32, 32, 3) or shape[3] == 0 or kind != "uint8":
        raise InvalidInput(
            f"{path}: X has shape {shape} and type {kind}; it must be [32, 32, 3, images] uint8."
        )
    content = _explain_faults(path, lambda: loadmat(path, variable_names=["X", "y"]))
    # A view: the file's order of axes is changed while it is written, not in memory.
    images: Images = content["X"].transpose(3, 0, 1, 2)
    return images, check_labels(content["y"], allowed_labels, path, len(images))


def _explain_faults(path: Path, read: Any) -> Any:
    """Turn whatever scipy raises on broken bytes into one sentence."""
    try:
        return read()
    except NotImplementedError:
        raise InvalidInput(
            f"{path} is a MATLAB 7.3 file, which is HDF5 inside; it must be saved as version 7 or "
            "earlier (save -v7)."
        ) from None
    except MemoryError:
        raise InvalidInput(f"{path} does not fit into memory; it must be a smaller file.") from None
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise InvalidInput(
            f"{path} cannot be read ({reason}); it must be a whole MATLAB file."
        ) from None
