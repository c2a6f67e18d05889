"""Any ONNX image model as a frozen encoder, through onnxruntime."""

import hashlib
import os
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy

from mpfedcl.encoders.encoder import (
    Features,
    OnProgress,
    encode_in_batches,
    fingerprint_header,
)
from mpfedcl.encoders.preprocessing import Preprocessing
from mpfedcl.errors import InvalidInput
from mpfedcl.images import Images

_TYPES = {"tensor(float)": numpy.float32, "tensor(float16)": numpy.float16}
_AS_THEY_ARE = Preprocessing(64, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
"""The model gets RGB in 0 to 1, unless its metadata name a mean and a deviation."""


class OnnxEncoder:
    """The first output of an ONNX model, averaged over positions, stands for an image.

    The model takes RGB images [batch, 3, height, width]; their size is the one in its input shape,
    else the one in its metadata, else 64. Nothing is loaded until something is asked for that the
    file's bytes cannot tell: cached features need no onnxruntime.
    """

    def __init__(self, path: Path) -> None:
        try:
            self.content = path.read_bytes()
        except OSError as error:
            raise InvalidInput(
                f"encoder.name is 'onnx:{path}', which cannot be read "
                f"({error.strerror or error}); it must name an ONNX file."
            ) from None
        self.name = f"onnx {path.name}"
        self._path = path
        # Size and scale are read from the file itself, so its bytes decide everything.
        sha = hashlib.sha256(fingerprint_header("onnx", _AS_THEY_ARE))
        sha.update(self.content)
        self.fingerprint = sha.hexdigest()

    @cached_property
    def preprocessing(self) -> Preprocessing:
        """Size from the model's input, else from its metadata; scale from its metadata."""
        metadata = dict(self._session.get_modelmeta().custom_metadata_map)
        told = Preprocessing.from_metadata(metadata, _AS_THEY_ARE)
        height, width = self._input.shape[2:]
        fixed = [side for side in (height, width) if isinstance(side, int) and side > 0]
        if len(set(fixed)) > 1:
            raise self._refuse(f"takes images of {height} x {width}", "take square images")
        return Preprocessing(fixed[0], told.mean, told.std) if fixed else told

    @cached_property
    def feature_size(self) -> int:
        """Found by a trial run on a black image."""
        size = self.preprocessing.image_size
        black = numpy.zeros((self._batch_size or 1, 3, size, size), dtype=numpy.uint8)
        return int(self._encode_batch(black).shape[1])

    def encode(self, images: Images, on_progress: OnProgress | None = None) -> Features:
        """Return the features [images, feature_size]."""
        return encode_in_batches(self._encode_batch, images, self, on_progress, self._batch_size)

    @cached_property
    def _session(self) -> Any:
        try:
            runtime = import_module("onnxruntime")
        except ImportError:
            raise InvalidInput(
                f"encoder.name is 'onnx:{self._path}', but onnxruntime is not installed; "
                "`pip install 'mpfedcl[onnx]'` brings it."
            ) from None
        try:
            return open_session(runtime, self.content)
        # The runtime has a class of error for each of its states, under no common name.
        except Exception as error:
            raise self._refuse(
                f"cannot be loaded ({first_line(error)})", "be one whole ONNX file"
            ) from None

    @cached_property
    def _input(self) -> Any:
        """The only input, checked."""
        inputs = self._session.get_inputs()
        shape = inputs[0].shape if len(inputs) == 1 else []
        if (
            len(shape) != 4
            or inputs[0].type not in _TYPES
            or (isinstance(shape[1], int) and shape[1] != 3)
        ):
            listed = ", ".join(f"{each.name} {each.type} {each.shape}" for each in inputs)
            raise self._refuse(
                f"takes {listed}", "take one float input [batch, 3, height, width], RGB in 0 to 1"
            )
        return inputs[0]

    @property
    def _batch_size(self) -> int | None:
        """The batch that the model insists on, if it does."""
        first = self._input.shape[0]
        return first if isinstance(first, int) and first > 0 else None

    def _encode_batch(self, batch: Images) -> Features:
        count, insisted = len(batch), self._batch_size
        if insisted is not None and count < insisted:
            batch = numpy.concatenate([batch, numpy.repeat(batch[-1:], insisted - count, axis=0)])
        mean, std = (
            numpy.asarray(values, dtype=numpy.float32)[:, None, None]
            for values in (self.preprocessing.mean, self.preprocessing.std)
        )
        pixels = (batch.astype(numpy.float32) / 255 - mean) / std
        try:
            outputs = self._session.run(
                None, {self._input.name: pixels.astype(_TYPES[self._input.type])}
            )
        except Exception as error:
            raise self._refuse(f"fails on an image ({first_line(error)})", "run here") from None
        features = numpy.asarray(outputs[0])
        if features.ndim < 2 or len(features) != len(batch) or features.dtype.kind != "f":
            raise self._refuse(
                f"gives {features.dtype} {list(features.shape)} for {len(batch)} images",
                "give [batch, features], [batch, features, height, width] or "
                "[batch, tokens, features]",
            )
        if features.ndim == 3:
            features = features.mean(axis=1)
        elif features.ndim > 3:
            features = features.mean(axis=tuple(range(2, features.ndim)))
        return features[:count].astype(numpy.float32)

    def _refuse(self, fault: str, wanted: str) -> InvalidInput:
        return InvalidInput(
            f"encoder.name is 'onnx:{self._path}': the model {fault}; it must {wanted}."
        )


def open_session(runtime: Any, content: bytes) -> Any:
    """Open a model in onnxruntime, on one thread."""
    options = runtime.SessionOptions()
    # Beside other runs, threads that wait for each other are slower than one alone.
    options.intra_op_num_threads = max(1, int(os.environ.get("OMP_NUM_THREADS") or 1))
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def first_line(error: Exception) -> str:
    """Return the first line of what an error says, else its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
