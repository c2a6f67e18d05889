"""ExportedFile runs: size, accuracy and time an image on one core.

    python benchmarks/deployment.py RUN [RUN ...]

Each run is exported as float and as int8, and asked about up to 1,000 of its local test set images
beside PyTorch; then single images one after the other. Prints Markdown.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy
import onnxruntime

from mpfedcl.core.errors import InvalidInput
from mpfedcl.inference.export import CheckSamples, ExportSettings, export_run, load_check_samples
from mpfedcl.inference.predictor import Predictor
from mpfedcl.report.tables import TextTable

COLUMNS = ("", "file MB", "load ms", "an image ms", "accuracy %", "labels as PyTorch's")
_WARM_UP = 20
_REPEATS = 300


def main() -> None:
    """Measure the runs that are named."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    for path in sys.argv[1:]:
        print(measure_run(Path(path)).markdown())


def measure_run(path: Path) -> TextTable:
    """Return one run's table."""
    predictor = Predictor.load(path)
    real = load_check_samples(predictor.trained, 1000)
    if real.labels is None:
        sys.exit(f"{path}: the run's data must be here (MPFEDCL_DATA)")
    said = [each.label for each in predictor.predict(real.samples)]
    expected = numpy.array([predictor.class_names.index(label) for label in said])
    size = sum(file.stat().st_size for file in path.glob("*.safetensors")) / 1e6
    pytorch = time_single(lambda image: predictor.predict(image), real)
    right = 100 * float((expected == real.labels).mean())
    rows = [["PyTorch", f"{size:.2f}", "-", f"{pytorch:.3f}", f"{right:.1f}", "100.0"]]
    with tempfile.TemporaryDirectory() as folder:
        for name, wanted in (
            ("ONNX", ExportSettings()),
            ("ONNX, int8", ExportSettings(quantized=True)),
        ):
            try:
                done = export_run(predictor, wanted, Path(folder) / "model.onnx")
            except InvalidInput as error:
                print(f"{path}, {name}: {error}", file=sys.stderr)
                continue
            rows.append([name, *measure_file(done.path, real, expected)])
    experiment = predictor.trained.experiment
    title = f"{experiment.method} on {experiment.dataset.name}"
    print(f"{title}, {len(real.samples):,} {real.origin}\n")
    return TextTable(title, COLUMNS, rows)


def measure_file(path: Path, real: CheckSamples, expected: Any) -> list[str]:
    """Return the cells of one ONNX file."""
    began = time.perf_counter()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    loaded = time.perf_counter() - began
    parts = [real.samples[n : n + 50] for n in range(0, len(real.samples), 50)]
    label = numpy.concatenate([session.run(["label"], {"images": part})[0] for part in parts])
    milliseconds = time_single(lambda image: session.run(None, {"images": image}), real)
    return [
        f"{path.stat().st_size / 1e6:.2f}",
        f"{1000 * loaded:.0f}",
        f"{milliseconds:.3f}",
        f"{100 * (label == real.labels).mean():.1f}",
        f"{100 * (label == expected).mean():.1f}",
    ]


def time_single(ask: Callable[[Any], object], real: CheckSamples) -> float:
    """Return the median milliseconds of one image, images in turn."""
    seconds = []
    for number in range(_WARM_UP + _REPEATS):
        place = number % len(real.samples)
        image = real.samples[place : place + 1]
        # Of this thread alone: other programs on the machine do not count.
        began = time.thread_time()
        ask(image)
        seconds.append(time.thread_time() - began)
    return 1000 * statistics.median(seconds[_WARM_UP:])


if __name__ == "__main__":
    main()
