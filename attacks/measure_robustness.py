"""Measure the accuracy of every aggregation rule with and without malicious clients.

Each cell (method, setting, attack, share of attackers, seed) is a run of 20 rounds with 10 clients
on mnist-sample, label skew Dir(0.5), and a file in the results folder. Existing cells are not
run again, so a study can be interrupted and extended.

    python attacks/measure_robustness.py runs/robustness                # run missing cells
    python attacks/measure_robustness.py runs/robustness --report       # tables and figure
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt
import numpy
import torch
from torch import Tensor

from malicious_clients import TARGET, MaliciousClients, add_trigger, choose_attackers, poison_data
from mpfedcl.data.client_data import FederatedData
from mpfedcl.data.loading import load_data_and_model, pixel_constants
from mpfedcl.engines import InProcessEngine
from mpfedcl.experiment import Experiment
from mpfedcl.methods import find_method, prototype_rule
from mpfedcl.models import Model
from mpfedcl.models.encoders.encoder import PixelScaling
from mpfedcl.models.encoders.random_filters import RandomFilters, apply_filters
from mpfedcl.rounds.assembly import Assembly, assemble
from mpfedcl.rounds.loop import RoundLoop

BOUNDS = {"validation__bounds": "on"}
SETTINGS: dict[str, dict[str, Any]] = {
    "mean": {},
    "bounds": BOUNDS,
    "bounds but direction": BOUNDS | {"validation__strictness": 100.0},
    "median": {"aggregation__rule": "median"},
    "trimmed-mean": {"aggregation__rule": "trimmed-mean"},
    "krum": {"aggregation__rule": "krum"},
    "multi-krum": {"aggregation__rule": "multi-krum"},
    "geometric-median": {"aggregation__rule": "geometric-median"},
    "centered-clipping": {"aggregation__rule": "centered-clipping"},
    "bounds, multi-krum": BOUNDS | {"aggregation__rule": "multi-krum"},
    "bounds, geometric-median": BOUNDS | {"aggregation__rule": "geometric-median"},
    "bounds, centered-clipping": BOUNDS | {"aggregation__rule": "centered-clipping"},
}
METHODS = ("fedavg", "mp-fedcl", "fedgauss")
ON_MODELS = ("label-flip", "sign-flip", "sign-flip-5", "noise", "inner-product", "little")
ON_PROTOTYPES = ("permuted-prototypes", "backdoor")
CLAIMS = ("claim", "claim-and-flip")
EVERY = ("none", "away", *ON_MODELS, *ON_PROTOTYPES, *CLAIMS)
SEEDS = (0, 1, 2)
BEST = "bounds, multi-krum"
"""The rule that is measured with other shares, and with one attacker of five."""


@dataclass(frozen=True)
class Cell:
    """One run."""

    method: str
    setting: str
    attack: str
    share: float = 0.2
    seed: int = 0
    clients: int = 10
    hidden: tuple[int, ...] = (128, 64)

    def path(self, folder: Path) -> Path:
        """Return the file of its result."""
        size = "-".join(map(str, self.hidden)) or "default"
        where = folder / f"{self.clients}-clients-{size}" / self.method / self.setting
        return where / f"{self.attack}-{self.share:g}-{self.seed}.json"

    @property
    def plain(self) -> "Cell":
        """The same without anything that data and model do not depend on."""
        return replace(self, setting="mean", attack="none", share=0.0)

    @property
    def experiment(self) -> Experiment:
        """The settings of the run, complete."""
        experiment = Experiment(
            method=self.method, rounds=20, clients=self.clients, seed=self.seed
        ).replace(
            **{"partition__alpha": 0.5, "train__lr": 0.1, "model__hidden": self.hidden}
            | SETTINGS[self.setting]
        )
        return experiment.resolved(find_method(self.method).defaults)


def list_cells() -> Iterator[Cell]:
    """Yield all cells, some of them twice: what matters most comes first."""
    main = ("mean", "bounds", BEST)
    yield from _list_grid(SEEDS[:1], SETTINGS)
    yield from _list_grid(SEEDS[1:], main)
    for seed in SEEDS:
        yield from _list_one_of_five(seed, main)
        for share in (0.1, 0.3):
            for cell in _list_grid([seed], ("bounds", BEST)):
                if cell.attack != "none":
                    yield replace(cell, share=share)
    yield from _list_grid(SEEDS, SETTINGS)


def _list_grid(seeds: Iterable[int], settings: Iterable[str]) -> Iterator[Cell]:
    for seed, method, setting in itertools.product(seeds, METHODS, settings):
        for attack in EVERY:
            if is_sensible(method, setting, attack):
                yield Cell(method, setting, attack, seed=seed)


def _list_one_of_five(seed: int, settings: Iterable[str]) -> Iterator[Cell]:
    attacks = ("none", "sign-flip", "sign-flip-5", "noise", *CLAIMS, "permuted-prototypes")
    for method, setting, attack in itertools.product(("fedavg", "mp-fedcl"), settings, attacks):
        if (method, attack) != ("fedavg", "permuted-prototypes"):
            yield Cell(method, setting, attack, seed=seed, clients=5, hidden=())


def is_sensible(method: str, setting: str, attack: str) -> bool:
    """Tell whether a method has what the setting bounds, and what is attacked.

    Rules other than the mean do not look at sizes, so that claims change nothing; and without
    bounds they leave prototypes as they are.
    """
    if method == "fedgauss":
        return setting in ("mean", "bounds")
    if method == "fedavg" and attack in ON_PROTOTYPES:
        return False
    if setting in ("mean", "bounds", "bounds but direction"):
        return True
    has_bounds = setting.startswith("bounds")
    return attack not in (*CLAIMS, "away") and (has_bounds or attack not in ON_PROTOTYPES)


@cache
def load_data(plain: Cell) -> tuple[FederatedData, Model, FederatedData]:
    """Return the data, the model, and the same data as pixels, which a trigger is drawn on.

    Loaded once for all cells that share them: `plain` has no attack.
    """
    experiment, device = plain.experiment, torch.device("cpu")
    pixels, _ = load_data_and_model(experiment.replace(encoder__name="none"), device)
    return *load_data_and_model(experiment, device), pixels


def trigger(pixels: Tensor, cell: Cell, data: FederatedData) -> Tensor:
    """Return triggered images as the method sees them: pixels, or features."""
    triggered = add_trigger(pixels, float(pixels.max()))
    experiment = cell.experiment
    if experiment.encoder.name in (None, "none"):
        return triggered
    shape = tuple(data.partition["image_shape"])

    def scaling() -> PixelScaling:
        return PixelScaling(shape, *pixel_constants(experiment))

    encoder = RandomFilters.parse(str(experiment.encoder.name), scaling, "cpu")
    images = triggered.view(-1, 1, *shape[-2:])
    return apply_filters(encoder.tensors, images)


def run(cell: Cell) -> dict[str, Any]:
    """Run a cell; return its accuracy and the clients that were down-weighted or rejected."""
    began = time.perf_counter()
    data, model, pixels = load_data(cell.plain)
    experiment = cell.experiment
    attackers = choose_attackers(data.names, cell.share, cell.seed)
    triggered = {
        each.name: trigger(each.inputs, cell, data)
        for each in pixels.clients
        if each.name in attackers and cell.attack == "backdoor"
    }
    poisoned = poison_data(
        data,
        cell.attack,
        attackers,
        cell.seed,
        triggered,
        sends_sums=not find_method(cell.method).trains,
    )
    assembly = assemble(experiment, model, num_classes=data.num_classes, input_size=data.input_size)
    engine = InProcessEngine(assembly, poisoned)
    if cell.attack != "none":
        engine = MaliciousClients(assembly, poisoned, cell.attack, attackers, triggered)
    loop = RoundLoop(assembly, engine)
    rejected = dict.fromkeys(data.names, 0)
    for number in range(1, experiment.rounds + 1):
        record = loop.run_round(evaluate=number == experiment.rounds)
        for name in record.clients.rejected:
            rejected[name] = rejected.get(name, 0) + 1
    assert record.accuracy is not None
    predictor = assembly.method.predictor_on("global_test")
    return {
        **asdict(cell),
        "accuracy": record.accuracy["global_test"][predictor],
        "backdoor": measure_backdoor(loop, assembly, cell),
        "attackers": attackers,
        "processed": record.processed,
        "rejected": {name: count for name, count in rejected.items() if count},
        "seconds": round(time.perf_counter() - began, 2),
    }


@torch.no_grad()
def measure_backdoor(loop: RoundLoop, assembly: Assembly, cell: Cell) -> float | None:
    """Return how many % of triggered images of other classes are taken for the target."""
    if cell.attack not in ("none", "backdoor") or loop.global_model is None:
        return None
    data, _, pixels = load_data(cell.plain)
    inputs = trigger(pixels.test_inputs[data.test_labels != TARGET], cell, data)
    embeddings, scores = assembly.model.apply(loop.global_model, inputs)
    said = scores.argmax(1)
    if assembly.method.predictor_on("global_test").endswith("prototype"):
        said, _ = loop.pool.nearest(prototype_rule(assembly.method).project(embeddings))
    return 100 * float((said == TARGET).double().mean())


def main() -> None:
    """Run what is missing, or report what is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--report", action="store_true", help="print tables, draw the figure")
    parser.add_argument("--figure", type=Path, default=Path("docs/images/robustness.png"))
    parser.add_argument("--only", nargs="*", default=[], help="settings to run")
    given = parser.parse_args()
    if given.report:
        results = [json.loads(path.read_text()) for path in given.folder.rglob("*.json")]
        Report(results).write(given.figure)
        return
    torch.set_num_threads(1)
    for cell in dict.fromkeys(list_cells()):
        path = cell.path(given.folder)
        if path.exists() or (given.only and cell.setting not in given.only):
            continue
        result = run(cell)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(result))
        partial.replace(path)
        print(path.relative_to(given.folder), result["accuracy"], flush=True)


class Report:
    """Tables in Markdown and a figure, from whatever cells are there."""

    def __init__(self, results: list[dict[str, Any]]) -> None:
        self._cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for each in results:
            key = (each["clients"], each["method"], each["setting"], each["attack"], each["share"])
            self._cells.setdefault(key, []).append(each)

    def accuracy(
        self, method: str, setting: str, attack: str, share: float = 0.2, clients: int = 10
    ) -> float | None:
        """Return the mean over seeds."""
        found = self._cells.get((clients, method, setting, attack, share))
        return fmean(each["accuracy"] for each in found) if found else None

    def lost(self, method: str, setting: str, attack: str, share: float = 0.2) -> float | None:
        """Return the points below the mean without an attack, over the same seeds."""
        found = self._cells.get((10, method, setting, attack, share), [])
        honest = {
            each["seed"]: each["accuracy"]
            for each in self._cells.get((10, method, "mean", "none", 0.2), [])
        }
        pairs = [
            honest[each["seed"]] - each["accuracy"] for each in found if each["seed"] in honest
        ]
        return fmean(pairs) if pairs else None

    def write(self, figure: Path) -> None:
        """Print all tables and draw the figure."""
        for method in METHODS:
            attacks = [each for each in EVERY if is_sensible(method, "mean", each)]
            settings = [each for each in SETTINGS if is_sensible(method, each, "none")]
            print(f"\n{method}, points lost, 20 % attackers\n")
            self._print_table(settings, attacks, lambda s, a, m=method: self.lost(m, s, a))
            for share in (0.1, 0.3):
                print(f"\n{method}, points lost, {share:.0%} attackers\n")
                chosen = [each for each in ("bounds", BEST) if each in settings]
                self._print_table(
                    chosen, attacks, lambda s, a, m=method, p=share: self.lost(m, s, a, p)
                )
        print("\nbackdoor: % of triggered images predicted as the target\n")
        for method in ("mp-fedcl", "fedgauss"):
            for key, found in sorted(self._cells.items(), key=str):
                if key[1] == method and key[3] in ("backdoor", "none"):
                    rates = [c["backdoor"] for c in found if c["backdoor"] is not None]
                    if rates:
                        print(f"{key}: {fmean(rates):.1f}")
        print("\none attacker of five, accuracy\n")
        attacks = ["none", "sign-flip", "sign-flip-5", "noise", *CLAIMS, "permuted-prototypes"]
        for method in ("fedavg", "mp-fedcl"):
            print(f"\n{method}\n")
            self._print_table(
                ["mean", "bounds", BEST],
                attacks,
                lambda s, a, m=method: self.accuracy(m, s, a, clients=5),
            )
        self._draw(figure)

    def _print_table(self, rows: list[str], columns: list[str], value: Any) -> None:
        print("| | " + " | ".join(columns) + " |")
        print("|---|" + "---|" * len(columns))
        for row in rows:
            found = [value(row, column) for column in columns]
            texts = ["" if each is None else f"{each:.1f}" for each in found]
            print(f"| {row} | " + " | ".join(texts) + " |")

    def _draw(self, path: Path) -> None:
        figure, axes = plt.subplots(
            3, 1, figsize=(9, 11), height_ratios=[12, 12, 2.4], layout="constrained"
        )
        for axis, method in zip(axes, METHODS, strict=True):
            settings = [each for each in SETTINGS if is_sensible(method, each, "none")]
            lost = [[self.lost(method, s, a) for a in EVERY] for s in settings]
            values = numpy.array([[numpy.nan if v is None else v for v in row] for row in lost])
            shown = axis.imshow(values, cmap="RdYlGn_r", vmin=0, vmax=20, aspect="auto")
            axis.set_title(method, fontsize=10)
            axis.set_yticks(range(len(settings)), settings, fontsize=8)
            axis.set_xticks(range(len(EVERY)), [""] * len(EVERY))
            for (row, column), each in numpy.ndenumerate(values):
                if not numpy.isnan(each):
                    axis.text(column, row, f"{each:.1f}", ha="center", va="center", fontsize=8)
        axes[-1].set_xticks(range(len(EVERY)), EVERY, rotation=45, ha="right", fontsize=8)
        figure.colorbar(shown, ax=axes, label="points lost with 20 % attackers", shrink=0.4)
        figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
