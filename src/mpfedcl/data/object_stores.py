"""The samples and the labels of one Python object: arrays, a Dataset of torch or of Hugging Face.

Arrays are checked when they are opened, the samples of a Dataset when inputs are made of them.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
    default_convert,
)
from torch.utils.data import Subset as TorchSubset

from mpfedcl.core.errors import InvalidInput, enumerate_names, explain_user_code
from mpfedcl.core.images import resize_images
from mpfedcl.data.image_files import convert_image, is_colored
from mpfedcl.data.samples import (
    ArrayFormat,
    ImageFormat,
    Indices,
    SampleFormat,
    Samples,
    SampleStore,
    digest_rows,
    find_not_finite,
)
from mpfedcl.experiment.data_folder import FLOAT_TYPES, TOKEN_TYPES, list_types
from mpfedcl.experiment.settings import DatasetSettings

FORMS = (
    "(x, y) arrays, a torch Dataset, a Hugging Face Dataset or a frame, a pair (train, test) of "
    "these, or a dictionary of these by client"
)
_SAMPLES_AT_ONCE = 256
_SCALARS = ("Value", "ClassLabel")
"""Features of Hugging Face that are no input of a model."""

Array = NDArray[Any]


class Source(NamedTuple):
    """The samples of an object."""

    store: SampleStore
    labels: Indices
    array_format: ArrayFormat | None
    class_names: tuple[str, ...]
    fingerprint: str
    notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class ArrayStore:
    """Samples in memory."""

    samples: Samples
    format: SampleFormat
    fingerprint: str

    def __len__(self) -> int:
        return len(self.samples)

    def sign(self, rows: Indices) -> str:
        """Sign the content and the rows."""
        return digest_rows(rows, self.fingerprint)

    def inspect(self) -> set[SampleFormat]:
        """All samples of an array are alike."""
        return {self.format}

    def load(self, rows: Indices, wanted: SampleFormat) -> Samples:
        """Return samples in a format."""
        return _fit(self.samples[rows], wanted)


@dataclass(frozen=True)
class DatasetStore:
    """Samples of a Dataset, read when they are needed; all must be like the first."""

    dataset: Any
    shown: str
    labels: Indices
    format: SampleFormat
    may_resize: bool
    """Whether a size was asked for, so that images may have several."""

    def __len__(self) -> int:
        return len(self.labels)

    def sign(self, rows: Indices) -> str:
        """Read and sign the samples: a Dataset may return anything for a row."""
        signed = digest(sample.tobytes() for _, sample in self._read(rows))
        return digest_rows(rows, signed, str(self.format))

    def inspect(self) -> set[SampleFormat]:
        """The first sample is read, the others are compared with it when they are."""
        return {self.format}

    def load(self, rows: Indices, wanted: SampleFormat) -> Samples:
        """Read samples into an array, in a format."""
        samples = numpy.empty((len(rows), *wanted.shape), wanted.dtype)
        may_differ = self.may_resize or wanted.shape[:2] != self.format.shape[:2]
        for place, (row, sample) in enumerate(self._read(rows)):
            found, one = _find_format(sample[None], f"{self.shown}, sample {row:,}")
            if isinstance(wanted, ImageFormat) and isinstance(found, ImageFormat):
                fits = found.is_color <= wanted.is_color and (
                    may_differ or found.size == wanted.size
                )
            else:
                fits = found == self.format
            if not fits:
                raise InvalidInput(
                    f"{self.shown}, sample {row:,} has the shape {list(sample.shape)}; it must "
                    f"have that of the first, {list(self.format.shape)}, or images a size "
                    "(dataset.image_size)."
                )
            if isinstance(found, ArrayFormat) and (odd := find_not_finite(one, row)):
                raise InvalidInput(f"{self.shown} has {odd}; {found.say_finite()}.")
            samples[place] = _fit(one, wanted)[0]
        return samples

    def _read(self, rows: Indices) -> Iterator[tuple[int, Array]]:
        for begin in range(0, len(rows), _SAMPLES_AT_ONCE):
            some = rows[begin : begin + _SAMPLES_AT_ONCE].tolist()
            if len(self.dataset) != len(self):
                raise InvalidInput(
                    f"{self.shown} has {len(self.dataset):,} samples now and had {len(self):,}; "
                    "its length must not change."
                )
            pairs = _read_pairs(self.dataset, some, self.shown)
            for row, (value, label) in zip(some, pairs, strict=True):
                if label != self.labels[row]:
                    raise InvalidInput(
                        f"{self.shown}, sample {row:,} has the label {label}, and "
                        f"{self.labels[row]} in its targets or before; it must be the same."
                    )
                yield row, value


def _fit(samples: Samples, wanted: SampleFormat) -> Samples:
    if isinstance(wanted, ArrayFormat):
        return samples.astype(wanted.dtype, copy=False)
    return resize_images(samples, wanted.size, wanted.is_color)


def _read_pairs(dataset: Any, rows: Sequence[int], shown: str) -> list[tuple[Array, int]]:
    """Read samples of a Dataset as arrays with their labels."""
    try:
        several = getattr(dataset, "__getitems__", None)
        items = several(list(rows)) if several else [dataset[row] for row in rows]
        if len(items) != len(rows):
            raise ValueError(f"{len(items)} of {len(rows)} samples")
    except InvalidInput:
        raise
    except Exception as error:
        raise InvalidInput(
            f"{shown} fails when samples {rows[0]:,} to {rows[-1]:,} are read "
            f"({explain_user_code(error)}); each must be a pair (input, label)."
        ) from error
    pairs = []
    for row, item in zip(rows, items, strict=True):
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise InvalidInput(
                f"{shown}, sample {row:,} is {_shorten(item)}; it must be a pair (input, label)."
            )
        label = item[1].tolist() if hasattr(item[1], "tolist") else item[1]
        label = label[0] if isinstance(label, list) and len(label) == 1 else label
        if type(label) is not int:
            raise InvalidInput(
                f"{shown}, sample {row:,} has the label {_shorten(item[1])}; it must be a whole "
                "number from 0."
            )
        pairs.append((_to_array(item[0], f"{shown}, sample {row:,}"), label))
    return pairs


def open_source(value: Any, shown: str, dataset: DatasetSettings) -> Source:
    """Open an object; its samples stay where they are."""
    if isinstance(value, DataLoader):
        value = _open_loader(value, shown)
    if hasattr(value, "select_columns") and hasattr(value, "features"):
        value = _HuggingFacePairs.of(value, dataset.label, shown)
    elif dataset.label is not None:
        raise InvalidInput(
            f"dataset.label is {dataset.label!r}; it must be left out, because {shown} has no "
            "columns."
        )
    if type(value) is TensorDataset and len(value.tensors) == 2:
        value = value.tensors
    if isinstance(value, tuple) and len(value) == 2 and is_array(value[0]):
        return _open_arrays(*value, shown)
    if not hasattr(value, "__getitem__") or not hasattr(value, "__len__"):
        raise InvalidInput(f"{shown} is {_shorten(value)}; data must be {FORMS}.")
    return _open_dataset(value, dataset, shown)


def _open_loader(loader: "DataLoader[Any]", shown: str) -> Any:
    """Return the samples of a DataLoader as a Dataset, or as arrays from its collate function."""
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        raise InvalidInput(
            f"{shown} is a DataLoader of an IterableDataset; its Dataset must have __getitem__ and "
            "__len__, because clients read samples by number."
        )
    batches = loader.batch_sampler
    sampler: Any = batches.sampler if type(batches) is BatchSampler else batches or loader.sampler
    reads_once = isinstance(sampler, SequentialSampler | RandomSampler) and not getattr(
        sampler, "replacement", False
    )
    if isinstance(sampler, SubsetRandomSampler):
        dataset = TorchSubset(dataset, sorted(sampler.indices))
    elif not reads_once or len(sampler) != len(dataset):
        raise InvalidInput(
            f"{shown} is a DataLoader with a {type(sampler).__name__}, which does not read each "
            "sample once; give the samples as a torch.utils.data.Subset instead."
        )
    if loader.collate_fn in (default_collate, default_convert):
        return dataset
    # Once on all samples, so that what is padded has one length.
    try:
        batch = loader.collate_fn([dataset[row] for row in range(len(dataset))])
    except Exception as error:
        raise InvalidInput(
            f"{shown} is a DataLoader whose collate function fails on all {len(dataset):,} samples "
            f"at once ({explain_user_code(error)}); it must return a pair (inputs, labels)."
        ) from error
    if not isinstance(batch, tuple | list) or len(batch) != 2 or not is_array(batch[0]):
        raise InvalidInput(
            f"{shown} is a DataLoader whose collate function returns {_shorten(batch)}; it must "
            "return a pair (inputs, labels) of arrays."
        )
    return tuple(batch)


def _open_arrays(x: Any, y: Any, shown: str) -> Source:
    samples, labels = _to_array(x, shown), _check_labels(y, shown)
    if len(samples) != len(labels) or not len(labels):
        raise InvalidInput(
            f"{shown} has {len(samples):,} samples and {len(labels):,} labels; they must be "
            "equally many, at least 1."
        )
    found, samples = _find_format(samples, shown)
    array_format = found if isinstance(found, ArrayFormat) else None
    if array_format and (odd := find_not_finite(samples)):
        raise InvalidInput(f"{shown} has {odd}; {array_format.say_finite()}.")
    content = numpy.ascontiguousarray(samples)
    told = f"{content.dtype} {content.shape}".encode()
    fingerprint = digest([told, content.data, labels.data])
    store = ArrayStore(samples, found, fingerprint)
    return Source(store, labels, array_format, (), fingerprint)


def _open_dataset(dataset: Any, settings: DatasetSettings, shown: str) -> Source:
    count = len(dataset)
    if not count:
        raise InvalidInput(f"{shown} has 0 samples; it must have at least 1.")
    ends = [0, count - 1]
    pairs, again = (_read_pairs(dataset, ends, shown) for _ in range(2))
    known = _find_targets(dataset)
    if known is None:
        rows = range(0, count, _SAMPLES_AT_ONCE)
        parts = (range(n, min(count, n + _SAMPLES_AT_ONCE)) for n in rows)
        known = [label for some in parts for _, label in _read_pairs(dataset, some, shown)]
    labels = _check_labels(known, shown)
    if len(labels) != count:
        raise InvalidInput(
            f"{shown} has {count:,} samples and {len(labels):,} targets; they must be equally many."
        )
    found, _ = _find_format(pairs[0][0][None], f"{shown}, sample 0")
    told = json.dumps([type(dataset).__qualname__, count, str(found)]).encode()
    fingerprint = digest([told, labels.data, *(value.tobytes() for value, _ in pairs)])
    notices: tuple[str, ...] = ()
    if not all(numpy.array_equal(a, b) for (a, _), (b, _) in zip(pairs, again, strict=True)):
        notices = (
            f"{shown} gives other values each time that a sample is read. Each sample is read once "
            "in a run, which cannot be resumed: random transforms must be left out.",
        )
    store = DatasetStore(dataset, shown, labels, found, settings.image_size is not None)
    array_format = found if isinstance(found, ArrayFormat) else None
    return Source(store, labels, array_format, _find_classes(dataset), fingerprint, notices)


def is_array(value: Any) -> bool:
    """Return whether an object is an array of numpy or torch."""
    return isinstance(value, numpy.ndarray | torch.Tensor)


def _find_targets(dataset: Any) -> Any:
    """Return the labels of a Dataset that has them as a list, as torchvision's do; else None."""
    if isinstance(dataset, TorchSubset):
        found = _find_targets(dataset.dataset)
        return None if found is None else numpy.asarray(found)[numpy.asarray(dataset.indices)]
    if getattr(dataset, "target_transform", None) is not None:
        return None
    found = getattr(dataset, "targets", None)
    return found if isinstance(found, list | tuple) or is_array(found) else None


def _find_classes(dataset: Any) -> tuple[str, ...]:
    """Return the names of the classes if a Dataset has them, as torchvision's do."""
    inner = dataset.dataset if isinstance(dataset, TorchSubset) else dataset
    found = getattr(inner, "classes", None)
    if not isinstance(found, list | tuple) or not all(isinstance(each, str) for each in found):
        return ()
    return tuple(found) if len(set(found)) == len(found) else ()


def _check_labels(labels: Any, shown: str) -> Indices:
    found = _to_array(labels, f"{shown}: labels")
    found = found.reshape(-1) if found.shape[1:] == (1,) else found
    if found.dtype.kind not in "iu" or found.ndim != 1:
        raise InvalidInput(
            f"{shown} has labels {found.dtype} {list(found.shape)}; they must be whole numbers "
            "from 0, one per sample."
        )
    return numpy.ascontiguousarray(found, dtype=numpy.int64)


def _to_array(value: Any, shown: str) -> Array:
    """Return an image, a tensor or a list as an array."""
    if isinstance(value, Image.Image):
        upright = ImageOps.exif_transpose(value)
        return convert_image(upright, (upright.height, upright.width), is_colored(upright))
    try:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu()
            value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
        array: Array = numpy.asarray(value)
    # Lists of several lengths, sparse and meta tensors, objects whose conversion fails.
    except (ValueError, TypeError, RuntimeError, NotImplementedError):
        array = numpy.empty((), object)
    if array.dtype.kind not in "biuf":
        raise InvalidInput(f"{shown} is {_shorten(value)}; it must be an array of numbers.")
    return array


def _find_format(samples: Samples, shown: str) -> tuple[SampleFormat, Samples]:
    """Return the format of arrays [n, ...], and images with their channels last."""
    shape, dtype = samples.shape[1:], samples.dtype
    if shape and 0 not in shape:
        if dtype.name in FLOAT_TYPES:
            return ArrayFormat(shape), samples
        if dtype.name in TOKEN_TYPES and len(shape) == 1:
            return ArrayFormat(shape, "int64"), samples
        if dtype == numpy.uint8 and len(shape) == 3 and shape[0] in (1, 3) and shape[2] > 3:
            samples = numpy.moveaxis(samples, 1, -1)
        if dtype == numpy.uint8 and len(shape) == 3 and samples.shape[3] == 1:
            samples = samples[..., 0]
        if dtype == numpy.uint8 and (found := ImageFormat.from_shape(samples.shape[1:])):
            return found, samples
    raise InvalidInput(
        f"{shown} has samples {dtype} {list(shape)}; they must be {list_types(FLOAT_TYPES)} of any "
        f"shape, token ids, {list_types(TOKEN_TYPES)} [length], or images, uint8 [height, width] "
        "or [height, width, 3]."
    )


@dataclass(frozen=True)
class _HuggingFacePairs:
    """A Dataset of Hugging Face as pairs of one column and the label."""

    rows: Any
    column: str
    label: str
    targets: Array
    classes: tuple[str, ...]

    @classmethod
    def of(cls, dataset: Any, label: str | None, shown: str) -> "_HuggingFacePairs":
        """Choose the columns by the types of their features."""
        kinds = {name: type(kind).__name__ for name, kind in dataset.features.items()}
        labels = [name for name, kind in kinds.items() if kind == "ClassLabel"]
        labels = labels or [name for name in ("label", "labels") if name in kinds]
        label = label or (labels[0] if len(labels) == 1 else None)
        inputs = [n for n, kind in kinds.items() if n != label and kind not in _SCALARS]
        if label is None or label not in kinds or len(inputs) != 1:
            raise InvalidInput(
                f"{shown} has the columns {enumerate_names(list(kinds), 12)}; it must have one of "
                "images or arrays and one of labels (select_columns, dataset.label)."
            )
        rows = dataset.with_format(None).select_columns([inputs[0], label])
        names = getattr(dataset.features[label], "names", ())
        return cls(rows, inputs[0], label, numpy.asarray(rows[label][:]), tuple(names))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: list[int]) -> list[tuple[Any, Any]]:
        found = self.rows[rows]
        return list(zip(found[self.column], found[self.label], strict=True))


def digest(parts: Iterable[Any]) -> str:
    """Return a digest of bytes."""
    told: Any = hashlib.sha256()
    for part in parts:
        told.update(part)
    return str(told.hexdigest())


def _shorten(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
