"""Predict with an exported run on a device: onnxruntime, numpy and Pillow, nothing else.

mpfedcl export runs/mine --out model.onnx        # on the machine that trained
python edge_inference.py model.onnx a.png b.jpg  # anywhere
"""

import json
import sys
from typing import Any

import numpy
import onnxruntime
from numpy.typing import NDArray
from PIL import Image, ImageOps


def read_image(path: str, expected: dict[str, Any]) -> NDArray[numpy.uint8]:
    """Return an image as the bytes that the model expects: upright, in its color mode and size."""
    mode = "RGB" if expected["color"] == "RGB" else "L"
    picture: Image.Image = ImageOps.exif_transpose(Image.open(path))
    if picture.mode.endswith(("A", "a")) or "transparency" in picture.info:
        # Transparent parts become white.
        clear = picture.convert("LA" if mode == "L" else "RGBA")
        picture = Image.new(mode, clear.size, "white")
        picture.paste(clear.convert(mode), mask=clear.getchannel("A"))
    picture = picture.convert(mode)
    size = (expected["width"], expected["height"])
    if picture.size != size:
        shrinks = picture.width * picture.height > size[0] * size[1]
        picture = picture.resize(
            size, Image.Resampling.LANCZOS if shrinks else Image.Resampling.BICUBIC
        )
    return numpy.asarray(picture, dtype=numpy.uint8)


def main(model: str, *paths: str) -> None:
    """Print what the model says of each image."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    note = json.loads(session.get_modelmeta().custom_metadata_map["mpfedcl"])
    names = [output.name for output in session.get_outputs()]
    for path in paths:
        image = read_image(path, note["input"])
        found = dict(zip(names, session.run(None, {"images": image[None]}), strict=True))
        line = f"{path}: {note['classes'][found['label'][0]]}"
        if "distance" in found:
            distance, limit = found["distance"][0], note["unknown"]
            line += f", distance {distance:.3f}"
            line += " (unknown)" if limit and distance > limit["distance"] else ""
        else:
            line += f", probability {found['scores'][0].max():.3f}"
        print(line)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: python edge_inference.py MODEL.onnx IMAGE [IMAGE ...]")
    main(*sys.argv[1:])
