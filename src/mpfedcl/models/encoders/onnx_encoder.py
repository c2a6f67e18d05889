"""Any ONNX image model as a frozen encoder, through onnxruntime."""

import hashlib
import json
import os
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from mpfedcl.core.errors import InvalidInput, explain
from mpfedcl.core.images import Images
from mpfedcl.experiment.settings import EncoderSettings
from mpfedcl.models.encoders.encoder import (
    Features,
    Preprocessing,
    encode_in_batches,
    fingerprint_header,
)

_TYPES = {"tensor(float)": numpy.float32, "tensor(float16)": numpy.float16}
_AS_THEY_ARE = Preprocessing(64, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
"""The model gets RGB in 0 to 1, unless its metadata name a mean and a standard deviation."""


class OnnxEncoder:
    """An output of an ONNX model as features, averaged over positions or taken from one token.

    The model takes RGB images [batch, 3, height, width]; their size is the one in its input shape,
    else the one in the settings, else the one in its metadata, else 64. Of a model with several
    outputs the settings name one. The model is loaded on first use, so cached
    features need no onnxruntime.
    """

    def __init__(self, path: Path, settings: EncoderSettings | None = None) -> None:
        try:
            self.content = path.read_bytes()
        except OSError as error:
            raise InvalidInput(
                f"encoder.name is 'onnx:{path}', which cannot be read "
                f"({explain(error)}); it must name an ONNX file."
            ) from None
        self.name = f"onnx {path.name}"
        self._path = path
        self._settings = settings or EncoderSettings()
        # The file's bytes decide everything that the settings leave open.
        sha = hashlib.sha256(fingerprint_header("onnx", _AS_THEY_ARE))
        if choices := self._settings.onnx_choices:
            sha.update(json.dumps(choices, sort_keys=True).encode())
        sha.update(self.content)
        self.fingerprint = sha.hexdigest()

    @cached_property
    def preprocessing(self) -> Preprocessing:
        """Size from the model's input, else from the settings or its metadata; scale from these."""
        settings = self._settings
        metadata = dict(self._session.get_modelmeta().custom_metadata_map)
        told = Preprocessing.from_metadata(metadata, _AS_THEY_ARE)
        height, width = self._input.shape[2:]
        fixed = [side for side in (height, width) if isinstance(side, int) and side > 0]
        if len(set(fixed)) > 1:
            raise self._refuse(f"takes images of {height} x {width}", "take square images")
        if fixed and settings.image_size not in (None, fixed[0]):
            raise InvalidInput(
                f"encoder.image_size is {settings.image_size}; it must be left out or "
                f"{fixed[0]}, because the model {self._path} takes no other."
            )
        return Preprocessing(
            fixed[0] if fixed else settings.image_size or told.image_size,
            settings.mean or told.mean,
            settings.deviation or told.std,
        )

    @cached_property
    def output(self) -> str:
        """The name of the output used as features."""
        outputs = self._session.get_outputs()
        names, wanted = [each.name for each in outputs], self._settings.output
        if wanted in names or (wanted is None and len(names) == 1):
            return wanted or names[0]
        listed = ", ".join(f"{each.name} {each.shape}" for each in outputs)
        fault = "is not set" if wanted is None else f"is {wanted!r}"
        raise InvalidInput(
            f"encoder.output {fault}; it must be one of the outputs of {self._path}: {listed}."
        )

    @property
    def tokens(self) -> str | None:
        """The reduction of tokens [batch, tokens, features] to one vector; None without tokens."""
        return (self._settings.tokens or "mean") if self.trial_output.ndim == 3 else None

    @property
    def feature_size(self) -> int:
        """The number of features of an image."""
        return int(self.reduce(self.trial_output).shape[1])

    @cached_property
    def trial_output(self) -> NDArray[Any]:
        """The output for black images, because files may not declare its shape."""
        size = self.preprocessing.image_size
        black = numpy.zeros((self._batch_size or 1, 3, size, size), dtype=numpy.uint8)
        return self._run(black)

    def encode(self, images: Images) -> Features:
        """Return the features [images, feature_size]."""
        return encode_in_batches(self._encode_batch, images, self, self._batch_size)

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
                f"cannot be loaded ({explain(error)})", "be one whole ONNX file"
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
        """The fixed batch size of the model, if any."""
        first = self._input.shape[0]
        return first if isinstance(first, int) and first > 0 else None

    def _encode_batch(self, batch: Images) -> Features:
        count, insisted = len(batch), self._batch_size
        if insisted is not None and count < insisted:
            batch = numpy.concatenate([batch, numpy.repeat(batch[-1:], insisted - count, axis=0)])
        features: Features = self.reduce(self._run(batch))[:count].astype(numpy.float32)
        return features

    def _run(self, batch: Images) -> NDArray[Any]:
        """Return the model's output for bytes [batch, 3, height, width]."""
        mean, std = (
            numpy.asarray(values, dtype=numpy.float32)[:, None, None]
            for values in (self.preprocessing.mean, self.preprocessing.std)
        )
        pixels = (batch.astype(numpy.float32) / 255 - mean) / std
        source, output = self._input, self.output
        try:
            outputs = self._session.run([output], {source.name: pixels.astype(_TYPES[source.type])})
        except Exception as error:
            raise self._refuse(f"fails on an image ({explain(error)})", "run here") from None
        found: NDArray[Any] = numpy.asarray(outputs[0])
        if found.ndim < 2 or len(found) != len(batch) or found.dtype.kind != "f":
            raise self._refuse(
                f"gives {found.dtype} {list(found.shape)} for {len(batch)} images",
                "give [batch, features], [batch, features, height, width] or "
                "[batch, tokens, features]",
            )
        if self._settings.tokens is not None and (found.ndim != 3 or found.shape[1] < 2):
            raise InvalidInput(
                f"encoder.tokens is {self._settings.tokens!r}; it must be left out, because the "
                f"output {output} is {list(found.shape)} and has no tokens to choose from."
            )
        return found

    def reduce(self, found: Any) -> Any:
        """Return one vector for each image; `found` is the output as an array or a tensor."""
        tokens = self.tokens
        if tokens == "class":
            return found[:, 0]
        if tokens == "patches":
            found = found[:, 1:]
        positions = tuple(range(2, found.ndim)) if tokens is None else (1,)
        return found.mean(axis=positions) if positions else found

    def _refuse(self, fault: str, wanted: str) -> InvalidInput:
        return InvalidInput(
            f"encoder.name is 'onnx:{self._path}': the model {fault}; it must {wanted}."
        )


def open_session(runtime: Any, content: bytes) -> Any:
    """Open a model in onnxruntime, on one thread."""
    options = runtime.SessionOptions()
    # With several runs on a machine, one thread is faster than threads that wait for each other.
    options.intra_op_num_threads = max(1, int(os.environ.get("OMP_NUM_THREADS") or 1))
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
