"""An exported network as a file of torch (.pt2), which needs no code of mpfedcl or the user."""

import io
import json
from typing import Any

import torch
from numpy.typing import NDArray
from torch.export import ExportedProgram

from mpfedcl.inference.onnx_graph import NOTE, ExportedFunction, exporting

_TRACES_OF_CODE = ("stack_trace", "nn_module_stack", "torch_fn", "source_fn_stack", "from_node")
"""What torch keeps of the code, with paths of the machine that exported it."""


def pack_program(program: ExportedProgram, note: dict[str, Any]) -> bytes:
    """Return the file's bytes, with the metadata as the extra file `mpfedcl`."""
    for node in program.graph.nodes:
        for name in _TRACES_OF_CODE:
            node.meta.pop(name, None)
    # They would be the only pickle in the file.
    program.example_inputs = None
    file = io.BytesIO()
    with exporting("it cannot be written as a file of torch"):
        torch.export.save(program, file, extra_files={NOTE: json.dumps(note, allow_nan=False)})
    return file.getvalue()


def open_program(content: bytes) -> ExportedFunction:
    """Return a function that runs the program."""
    with exporting("the file of torch cannot be read"):
        module = torch.export.load(io.BytesIO(content)).module()

    def answer(samples: NDArray[Any]) -> list[NDArray[Any]]:
        with torch.no_grad():
            return [each.numpy() for each in module(torch.from_numpy(samples))]

    return answer
