"""ExportedFile runs: size, accuracy and time an image on one core.

    python benchmarks/deployment.py RUN [RUN ...]

Each run is exported and asked about up to 1,000 of its test images beside PyTorch; then single
images one after the other. Prints Markdown.
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

from mpfedcl.data.samples import Samples
from mpfedcl.inference.export import export_run, load_check_samples
from mpfedcl.inference.predictor import Predictor
from mpfedcl.report.tables import TextTable

COLUMNS = ("", "file MB", "load ms", "an image ms", "labels as PyTorch's")
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
    samples, origin = load_check_samples(predictor.trained, 1000)
    said = [each.label for each in predictor.predict(samples)]
    expected = numpy.array([predictor.class_names.index(label) for label in said])
    size = sum(file.stat().st_size for file in path.glob("*.safetensors")) / 1e6
    pytorch = time_single(lambda image: predictor.predict(image), samples)
    rows = [["PyTorch", f"{size:.2f}", "-", f"{pytorch:.3f}", "100.0"]]
    with tempfile.TemporaryDirectory() as folder:
        done = export_run(predictor, Path(folder) / "model.onnx")
        rows.append(["ONNX", *measure_file(done.path, samples, expected)])
    experiment = predictor.trained.experiment
    title = f"{experiment.method} on {experiment.dataset.name}"
    print(f"{title}, {len(samples):,} {origin}\n")
    return TextTable(title, COLUMNS, rows)


def measure_file(path: Path, samples: Samples, expected: Any) -> list[str]:
    """Return the cells of one ONNX file."""
    began = time.perf_counter()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    loaded = time.perf_counter() - began
    parts = [samples[n : n + 50] for n in range(0, len(samples), 50)]
    label = numpy.concatenate([session.run(["label"], {"images": part})[0] for part in parts])
    milliseconds = time_single(lambda image: session.run(None, {"images": image}), samples)
    return [
        f"{path.stat().st_size / 1e6:.2f}",
        f"{1000 * loaded:.0f}",
        f"{milliseconds:.3f}",
        f"{100 * (label == expected).mean():.1f}",
    ]


def time_single(ask: Callable[[Any], object], samples: Samples) -> float:
    """Return the median milliseconds of one image, images in turn."""
    seconds = []
    for number in range(_WARM_UP + _REPEATS):
        place = number % len(samples)
        image = samples[place : place + 1]
        # Of this thread alone: other programs on the machine do not count.
        began = time.thread_time()
        ask(image)
        seconds.append(time.thread_time() - began)
    return 1000 * statistics.median(seconds[_WARM_UP:])


if __name__ == "__main__":
    main()
