"""Seconds of a round of FedAvg with convolutional networks, next to a loop written by hand.

Both do the same work on CIFAR-10: the same 10 clients (Dirichlet 0.5), initial weights, batches,
steps and mean. A run of mpfedcl and the loops take turns, round by round, in one process.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

import mpfedcl
from measuring import RESULTS, Progress, Result, Spread, Table
from mpfedcl.core.rng import generator
from mpfedcl.data.client_data import ClientData
from mpfedcl.data.loading import load_data_and_model
from mpfedcl.engines.trainers.base import draw_batches
from mpfedcl.models.module import ModuleModel
from mpfedcl.runs.plan import resolve

WIDTHS = (16, 32, 64)
MODELS = {"ResNet-8, own module": "convolutional:ResNet8", "CNN of NIID-Bench": "cnn-small"}
BASE: dict[str, Any] = {
    "clients": 10,
    "partition__alpha": 0.5,
    "personal_models": False,
    "train": {"batch_size": 64, "lr": 0.01, "lr_decay": 1.0, "momentum": 0.9},
}
DRAWN = "convolutional:draw_images"
SMALL = 200
"""Drawn images of the check, and of a smoke run."""
TOLERANCE = 1e-5
"""Of weights in float64 that both have trained, relative to the largest weight."""


class Block(nn.Module):
    """Two 3 x 3 convolutions with batch normalization, and a shortcut."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if before != width:
            self.shortcut.append(nn.Conv2d(before, width, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(width))

    def forward(self, images: Tensor) -> Tensor:
        """Return the features."""
        inner = self.norm2(self.conv2(relu(self.norm1(self.conv1(images)))))
        return relu(inner + self.shortcut(images))


class ResNet8(nn.Module):
    """A convolution, three blocks and a linear layer: 77,850 parameters for CIFAR-10."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        first = nn.Conv2d(input_shape[0], WIDTHS[0], 3, padding=1, bias=False)
        self.stem = nn.Sequential(first, nn.BatchNorm2d(WIDTHS[0]), nn.ReLU())
        before = (WIDTHS[0], *WIDTHS[:-1])
        pairs = zip(before, WIDTHS, strict=True)
        self.blocks = nn.Sequential(*(Block(b, w, stride=w // b) for b, w in pairs))
        self.classify = nn.Linear(WIDTHS[-1], num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.classify(self.blocks(self.stem(images)).mean((2, 3)))
        return logits


def draw_images() -> Any:
    """Return noise of CIFAR-10's size, for a smoke run without data: (training, test) images."""
    drawn = numpy.random.default_rng(0)

    def draw(count: int) -> Any:
        images = drawn.integers(0, 256, (count, 32, 32, 3), dtype=numpy.uint8)
        return images, numpy.arange(count) % 10

    return draw(SMALL), draw(100)


@dataclass(frozen=True)
class Setting:
    """How a run and the loops use the cores."""

    name: str
    cores: int
    threads: int
    """Of each process of the run."""
    workers: int
    threads_by_hand: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the run's experiment."""


SETTINGS = (
    Setting("1 core", 1, 1, 1, 1),
    Setting("2 cores: 2 threads", 2, 2, 1, 2),
    Setting("2 cores: 2 workers", 2, 1, 2, 2),
)
LAYOUTS = {"by hand": torch.contiguous_format, "by hand, channels_last": torch.channels_last}


class ByHand:
    """FedAvg as a loop over clients in plain PyTorch."""

    def __init__(
        self,
        module: nn.Module,
        clients: Sequence[tuple[ClientData, Tensor]],
        experiment: mpfedcl.Experiment,
        layout: torch.memory_format,
    ) -> None:
        self.module = module.to(memory_format=layout)  # type: ignore[call-overload, unused-ignore]
        self._clients = [(each, x.contiguous(memory_format=layout)) for each, x in clients]
        self._experiment = experiment
        # Batch normalization cannot train on a single sample.
        kinds = (nn.BatchNorm1d, nn.BatchNorm2d)
        self._least = 1 + any(isinstance(each, kinds) for each in module.modules())
        self._initial = {n: v.clone() for n, v in module.state_dict().items()}
        self.restart()

    def restart(self) -> None:
        """Return to the initial weights."""
        self.weights = dict(self._initial)

    def run_round(self, number: int) -> None:
        """Train each client and average."""
        train = self._experiment.train
        total = sum(len(client.labels) for client, _ in self._clients)
        means = {n: torch.zeros_like(v) for n, v in self.weights.items() if v.is_floating_point()}
        for client, images in self._clients:
            self.module.load_state_dict(self.weights)
            self.module.train()
            optimizer = torch.optim.SGD(
                self.module.parameters(),
                lr=train.learning_rate(number),
                momentum=train.momentum,
                fused=True,
            )
            for chosen in draw_batches(client, self._experiment, number, least=self._least):
                optimizer.zero_grad()
                loss = cross_entropy(self.module(images[chosen]), client.labels[chosen])
                loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
                optimizer.step()
            state = self.module.state_dict()
            for name, mean in means.items():
                mean.add_(state[name], alpha=len(client.labels) / total)
        self.weights |= means


def write_by_hand(experiment: mpfedcl.Experiment) -> dict[str, ByHand]:
    """Return a loop for each memory layout, with the data and initial weights of an experiment."""
    resolved = resolve(experiment)
    data, model = load_data_and_model(resolved, torch.device("cpu"))
    assert isinstance(model, ModuleModel)
    dtype = getattr(torch, resolved.dtype)
    clients = [(each, model.shape_inputs(each.inputs)) for each in data.clients]
    initial = model.init(generator(resolved.seed, "weights"), dtype)
    return {
        name: ByHand(model.as_module(initial), clients, resolved, layout)
        for name, layout in LAYOUTS.items()
    }


def take_turns(
    experiment: mpfedcl.Experiment,
    setting: Setting,
    loops: Mapping[str, ByHand],
    say: Callable[[str], None],
) -> tuple[mpfedcl.RunResult, dict[str, list[float]]]:
    """Run an experiment and after each of its rounds the same round of each loop."""
    times: dict[str, list[float]] = {name: [] for name in ("mpfedcl", *loops)}
    for loop in loops.values():
        loop.restart()
    os.environ["OMP_NUM_THREADS"] = str(setting.threads)
    began = time.perf_counter()

    def on_round(record: Mapping[str, Any]) -> None:
        nonlocal began
        times["mpfedcl"].append(time.perf_counter() - began)
        torch.set_num_threads(setting.threads_by_hand)
        for name, loop in loops.items():
            say(f"{experiment.model.name}, {setting.name}: round {record['round']}, {name}")
            began = time.perf_counter()
            loop.run_round(record["round"])
            times[name].append(time.perf_counter() - began)
        torch.set_num_threads(setting.threads)
        began = time.perf_counter()

    with TemporaryDirectory() as folder:
        experiment = experiment.replace(
            workers=setting.workers, evaluate_every=experiment.rounds, **setting.changes
        )
        observer = mpfedcl.Observer(on_round=on_round)
        result = mpfedcl.run(experiment, Path(folder) / "run", observer)
        trained = result.global_model.state_dict()
    for name, loop in loops.items():
        difference = compare(trained, loop.weights)
        say(f"{name}: weights differ by {difference:.1e}")
        if experiment.dtype == "float64" and difference > TOLERANCE:
            raise SystemExit(f"{experiment.model.name}, {name}: weights differ by {difference}.")
    return result, times


def compare(trained: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> float:
    """Return the largest difference of weights and statistics, relative to their tensor's size."""
    return max(
        float((value - others[name]).abs().max() / others[name].abs().max().clamp(min=1e-12))
        for name, value in trained.items()
        if value.is_floating_point()
    )


def measure(
    base: mpfedcl.Experiment, settings: Sequence[Setting], progress: Progress
) -> list[dict[str, Any]]:
    """Return the seconds of a model's rounds for each setting, after a check in float64."""
    small = base.replace(dtype="float64", rounds=2, dataset__name=DRAWN, dataset__train_size=SMALL)
    take_turns(small, settings[0], write_by_hand(small), progress.say)
    loops, found = write_by_hand(base), []
    for setting in settings:
        result, times = take_turns(base, setting, loops, progress.say)
        assert result.summary is not None
        # The first round also starts the run, and the last one evaluates.
        seconds = {name: values[1:-1] for name, values in times.items()}
        accuracy = result.summary["accuracy_global"]
        found.append({**asdict(setting), "accuracy": accuracy, "seconds": seconds})
    return found


def tabulate(title: str, found: Sequence[dict[str, Any]]) -> Table:
    """Return the seconds of a model's rounds, and their ratio to those of the faster loop."""
    rows: list[list[str]] = []
    best: dict[int, list[tuple[float, float]]] = {}
    for each in found:
        spreads = {name: Spread.of(values) for name, values in each["seconds"].items()}
        run, *loops = (spread.median for spread in spreads.values())
        shown = (f"{s.median:.2f} ({s.lowest:.2f}-{s.highest:.2f})" for s in spreads.values())
        rows.append([each["name"], *shown, f"{run / min(loops):.2f}"])
        best.setdefault(each["cores"], []).append((run, min(loops)))
    ratios = (
        f"{min(run for run, _ in pairs) / min(loop for _, loop in pairs):.2f} on {cores} "
        f"core{'s' if cores > 1 else ''}"
        for cores, pairs in best.items()
    )
    note = f"Ratio with both at their best settings: {', '.join(ratios)}."
    return Table(title, ["seconds per round", *found[0]["seconds"], "ratio"], rows, note)


def write_page(result: Result) -> None:
    """Write tables and notes into docs/performance.md."""
    root = Path(__file__).resolve().parents[1]
    # A package of the checkout, which only scripts of the root folder find.
    sys.path.append(str(root))
    fill_page = import_module("reproduction.tables").fill_page
    notes = (fill(f"- {note}", 118, subsequent_indent="  ") for note in result.notes)
    text = "\n".join([*(table.markdown() for table in result.tables), *notes])
    fill_page(root / "docs" / "performance.md", {"convolutional": f"{text}\n"})


def main() -> None:
    """Measure all models and settings, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run on drawn images")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--images", type=int, default=50_000, help="training images in total")
    parser.add_argument("--rounds", type=int, default=5, help="the first and the last do not count")
    parser.add_argument("--cores", type=int, choices=(1, 2), default=2, help="at most")
    given = parser.parse_args()
    if given.rounds < 3:
        parser.error(f"--rounds is {given.rounds}; it must be at least 3.")
    rounds, images = (3, SMALL) if given.quick else (given.rounds, given.images)
    base = mpfedcl.Experiment(method="fedavg", rounds=rounds).replace(
        **BASE,
        dataset__name=DRAWN if given.quick else "cifar10",
        dataset__train_size=images,
    )
    progress = Progress()
    result = Result("convolutional", (__doc__ or "").strip(), given.quick)
    cores = 1 if given.quick else given.cores
    settings = [setting for setting in SETTINGS if setting.cores <= cores]
    for title, name in MODELS.items():
        try:
            found = measure(base.replace(model__name=name), settings, progress)
        except mpfedcl.InvalidInput as error:
            # Most often without data: MPFEDCL_DATA must name the folder of cifar10/cifar10.npz.
            parser.error(str(error))
        result.tables.append(tabulate(title, found))
        result.data[title] = found
        accuracies = sorted({f"{each['accuracy']:.1f} %" for each in found})
        result.notes.append(
            f"{title}: {' or '.join(accuracies)} on the test images after {rounds} rounds, one "
            "seed; the learning rate is not tuned."
        )
    result.notes += [
        f"FedAvg, {images:,} training images, 10 clients, Dirichlet 0.5, one epoch, batches of 64, "
        "SGD at 0.01 with momentum 0.9, float32. Median (lowest-highest) of the rounds but the "
        f"first and the last ({rounds - 2}). ratio: seconds of mpfedcl over those of the faster "
        "loop. With 2 workers, the loops have 2 threads.",
        "mpfedcl's rounds contain update validation and a checkpoint on disk. The loops index "
        "tensors in memory and use torch's fused optimizer.",
        f"Before that, two rounds of both in float64 on {SMALL} drawn images gave weights that "
        f"differ by at most {TOLERANCE:g} of the largest weight of a tensor.",
    ]
    progress.close()
    result.write(given.out or (RESULTS / "quick" if given.quick else RESULTS))
    if not given.quick and given.out is None:
        write_page(result)


if __name__ == "__main__":
    main()
