"""Outputs of exported ONNX files."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
from numpy.typing import NDArray
from torch.onnx._internal.exporter._registration import ONNXRegistry

Answers = dict[str, NDArray[Any]]


@pytest.fixture(scope="module", autouse=True)
def operators_are_listed_once() -> Iterator[None]:
    """Cache torch's list of all operators, which takes most of the time of an export."""
    with pytest.MonkeyPatch.context() as patch:
        once = functools.cache(ONNXRegistry.from_torchlib)
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(once))
        yield


def ask(content: bytes | Path, images: NDArray[Any]) -> tuple[Answers, Any]:
    """Return the outputs of an ONNX file, and its metadata."""
    session = onnxruntime.InferenceSession(
        content if isinstance(content, bytes) else str(content), providers=["CPUExecutionProvider"]
    )
    (source,) = session.get_inputs()
    names = [each.name for each in session.get_outputs()]
    found = dict(zip(names, session.run(None, {source.name: images}), strict=True))
    return found, json.loads(session.get_modelmeta().custom_metadata_map["mpfedcl"])
