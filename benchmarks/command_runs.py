"""Runs of the command line, watched from outside through the files that they write."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from mpfedcl.experiment import Experiment
from workloads import HEAD_SIZES, head_clients

_LOOK_EVERY = 0.002
_LONGEST_RUN = 900


@dataclass(frozen=True)
class WatchedRun:
    """When things happened, in seconds since the command was given."""

    begun: float
    """The data are loaded, the model is made, round 1 begins."""
    rounds: list[float]
    """The record of each round is on disk."""
    ended: float
    records: list[dict[str, Any]]


def can_use_workers() -> bool:
    """Tell whether this version spreads clients over processes."""
    return "workers" in Experiment.model_fields


def watch_run(settings: Mapping[str, object], out: Path, env: Mapping[str, str]) -> WatchedRun:
    """Give `mpfedcl run` with settings and watch it to its end."""
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "mpfedcl", "run", *words, "--out", str(out)]
    start, records = out / "partition.json", out / "rounds.jsonl"
    began = time.perf_counter()
    begun, rounds, seen = None, list[float](), 0
    with subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            while process.poll() is None and time.perf_counter() - began < _LONGEST_RUN:
                if begun is None and start.exists():
                    begun = time.perf_counter() - began
                size = records.stat().st_size if records.exists() else 0
                if size > seen:
                    count = records.read_bytes().count(b"\n")
                    rounds += [time.perf_counter() - began] * (count - len(rounds))
                    seen = size
                time.sleep(_LOOK_EVERY)
        finally:
            process.kill()
        ended = time.perf_counter() - began
        _, errors = process.communicate()
    if process.returncode != 0 or begun is None:
        raise RuntimeError(f"{' '.join(command)} failed:\n{errors}")
    lines = records.read_text(encoding="utf-8").splitlines()
    return WatchedRun(begun, rounds, ended, [json.loads(line) for line in lines])


def write_head_set(folder: Path, num_images: int) -> dict[str, object]:
    """Write made-up features as pictures, and an encoder that reads them out again.

    Returns the settings that make `mpfedcl run` train a head on 512 features. Needs onnx.
    """
    import onnx
    from onnx import TensorProto, helper

    side, size = 32, HEAD_SIZES[0]
    num_clients = max(1, num_images // 20)
    clients = head_clients(num_clients, -(-num_images // num_clients)).data.clients
    features = numpy.concatenate([client.inputs.numpy() for client in clients])[:num_images]
    labels = numpy.concatenate([client.labels.numpy() for client in clients])[:num_images]
    pixels = numpy.zeros((num_images, side * side), dtype=numpy.uint8)
    pixels[:, :size] = (features * 25).clip(0, 255)
    pictures = pixels.reshape(num_images, side, side)
    (folder / "set").mkdir(parents=True)
    numpy.savez(
        folder / "set" / "features.npz",
        x_train=pictures,
        y_train=labels,
        x_test=pictures[:100],
        y_test=labels[:100],
    )
    bounds = {"begin": [0], "end": [size], "axis": [1]}
    graph = helper.make_graph(
        [
            helper.make_node("Flatten", ["picture"], ["flat"], axis=1),
            helper.make_node("Slice", ["flat", *bounds], ["features"]),
        ],
        "read out",
        [helper.make_tensor_value_info("picture", TensorProto.FLOAT, ["n", 3, side, side])],
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["n", size])],
        [helper.make_tensor(name, TensorProto.INT64, [1], at) for name, at in bounds.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, str(folder / "encoder.onnx"))
    return {
        "dataset.name": "folder",
        "dataset.root": folder / "set",
        "encoder.name": f"onnx:{folder / 'encoder.onnx'}",
        "partition.test": "shared",
        "prototypes.per-class": 2,
    }
