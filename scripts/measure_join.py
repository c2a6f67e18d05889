"""Measure what joining is worth: the tables and the figure of docs/join.md.

Each domain of Digit-5, Office-10 and sixdomain is held out of a federation in turn and joins it
when it has ended; beside it the same domain alone from nothing, and in a federation that has it
from the start. What is there is not run again. Needs the data folder (MPFEDCL_DATA).
"""

import json
import sys
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mpfedcl.api import RUNNER
from mpfedcl.core.files import write_atomically
from mpfedcl.core.rng import generator
from mpfedcl.core.tensors import Tensors
from mpfedcl.data.loading import load_data_and_model
from mpfedcl.engines import InProcessEngine
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.data_folder import find_data_folder
from mpfedcl.experiment.settings import DatasetSettings
from mpfedcl.inference.new_client import Accuracies, NewClient, TrainingOutcome
from mpfedcl.inference.trained_run import TrainedRun, load_trained_run
from mpfedcl.methods import find_method
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.assembly import assemble
from mpfedcl.studies.jobs import JobOptions, PlannedRun, run_planned

SETS = {
    "digit5": ("mnist", "mnist_m", "svhn", "synth", "usps"),
    "office10": ("amazon", "caltech", "dslr", "webcam"),
    "sixdomain": ("art_painting", "cartoon", "clipart", "photo", "quickdraw", "sketch"),
}
FALSE_ALARM_RATES = (0.01, 0.1)
SEEDS = (0, 1, 2)
EPOCHS = (0, 1, 2, 5, 10)
SHOTS = (1, 2, 5)
ROUNDS = 60
DOCS = Path(__file__).resolve().parents[1] / "docs"


@dataclass(frozen=True)
class Case:
    """A domain that comes late, at one learning rate and seed."""

    rate: float
    dataset: str
    domain: str
    seed: int

    @property
    def source(self) -> Path:
        """Where the domain's images are."""
        place = find_data_folder(DatasetSettings())[0] / self.dataset / self.domain
        return place if place.is_dir() else place.with_suffix(".npz")

    def planned_run(self, out: Path, *, everyone: bool) -> PlannedRun:
        """Return the federation with the domain from the start, or the one without it."""
        domains = [each for each in SETS[self.dataset] if everyone or each != self.domain]
        experiment = Experiment(rounds=ROUNDS, seed=self.seed, evaluate_every=ROUNDS).replace(
            dataset__name=self.dataset,
            dataset__domains=tuple(domains),
            partition__kind="feature",
            train__lr=self.rate,
            # Only in the whole federation is a client's own model asked for.
            personal_models=everyone,
        )
        name = "everyone" if everyone else f"without-{self.domain}"
        resolved = experiment.resolved(find_method(experiment.method).defaults)
        return PlannedRun(resolved, self.folder(out) / f"{name}-seed{self.seed}")

    def folder(self, out: Path) -> Path:
        """Return where all runs of the set at this rate are."""
        return out / f"lr-{self.rate:g}" / self.dataset


def cases() -> Iterator[Case]:
    """Yield everything that is measured."""
    for rate in FALSE_ALARM_RATES:
        for dataset, domains in SETS.items():
            for domain in domains:
                for seed in SEEDS:
                    yield Case(rate, dataset, domain, seed)


def measure(case: Case, out: Path) -> dict[str, Any]:
    """Return the predictors on the domain's local test set images, from a file if they are there."""
    file = case.folder(out) / f"{case.domain}-seed{case.seed}.json"
    if file.is_file():
        found: dict[str, Any] = json.loads(file.read_text())
        return found
    without, everyone = case.planned_run(out, everyone=False), case.planned_run(out, everyone=True)
    run_planned([without, everyone], JobOptions(RUNNER))
    trained = load_trained_run(without.path)
    assert trained.pool is not None
    new_client = NewClient(trained, case.source, case.domain)
    params, pool = trained.parameters(), trained.pool
    fresh = trained.model.init(generator(case.seed, "weights"), torch.float32)
    nothing = PrototypePool.empty(len(trained.class_names), pool.dimension, pool.num_prototypes)
    last = trained.experiment.train.learning_rate(ROUNDS + 1)
    found = {
        "joined": by_epochs(new_client, params, pool),
        "alone": by_epochs(new_client, fresh, nothing),
        "last rate": read_after(new_client, params, pool, epochs=EPOCHS[-1], lr=last),
        "federation": read_member(new_client, load_trained_run(everyone.path)),
        "few": {
            name: {
                "joined": read_after(poor, params, pool, epochs=0),
                "alone": read_after(poor, fresh, nothing, epochs=0),
            }
            for name, poor in impoverish(new_client).items()
        },
        "others": read_others(trained, new_client.train(params, pool, epochs=1), case.domain),
        "images": {
            "train": len(new_client.client.labels),
            "test": len(new_client.data.test_labels),
        },
    }
    write_atomically(file, json.dumps(found).encode())
    return found


def by_epochs(new_client: NewClient, params: Tensors, pool: PrototypePool) -> dict[str, Accuracies]:
    """Return the predictors after each number of epochs."""
    return {str(each): read_after(new_client, params, pool, epochs=each) for each in EPOCHS}


def read_after(
    new_client: NewClient,
    params: Tensors,
    pool: PrototypePool,
    *,
    epochs: int,
    lr: float | None = None,
) -> Accuracies:
    """Return the predictors after so many epochs, the run's first learning rate unless told."""
    learned = new_client.train(params, pool, epochs=epochs, lr=lr)
    return new_client.evaluate(learned.params, learned.prototypes, pool)


def impoverish(new_client: NewClient) -> dict[str, NewClient]:
    """Return the same client with few images of a class, and with none of every other class."""
    labels = new_client.client.labels
    place = torch.zeros_like(labels)
    for label in range(len(new_client.data.class_names)):
        place[labels == label] = torch.arange(int((labels == label).sum()))
    kept = {f"{count} a class": place < count for count in SHOTS}
    return {
        name: choose_training_images(new_client, chosen)
        for name, chosen in {**kept, "every other class": labels % 2 == 0}.items()
    }


def choose_training_images(new_client: NewClient, chosen: torch.Tensor) -> NewClient:
    """Return the same client with some of its training images, and all its test images."""
    whole = new_client.client
    client = replace(whole, inputs=whole.inputs[chosen], labels=whole.labels[chosen])
    limited = copy(new_client)
    limited.data, limited.client = replace(new_client.data, clients=(client,)), client
    return limited


def read_member(new_client: NewClient, trained: TrainedRun) -> dict[str, Accuracies]:
    """Return the predictors of a client that was in the federation from the start."""
    assert trained.pool is not None
    own, others = trained.pool.of(new_client.name), trained.pool.without(new_client.name)
    models = {"averaged": trained.parameters(), "personal": trained.parameters(new_client.name)}
    return {name: new_client.evaluate(model, own, others) for name, model in models.items()}


def read_others(
    trained: TrainedRun, learned: TrainingOutcome, name: str
) -> dict[str, float | None]:
    """Return what the prototypes of a new client change for those who were there before it.

    The global model by nearest prototype, mean over the clients' local test sets.
    """
    assert trained.pool is not None
    data, model = load_data_and_model(trained.experiment, torch.device("cpu"))
    params = trained.parameters()
    assembly = assemble(
        trained.experiment,
        model,
        num_classes=data.num_classes,
        input_size=data.input_size,
        initial=params,
    )
    engine = InProcessEngine(assembly, data)
    pools = {"before": trained.pool, "after": trained.pool.with_client(name, learned.prototypes)}
    return {
        moment: engine.evaluate(params, pool, []).table()["own"]["global_prototype"]
        for moment, pool in pools.items()
    }


def gather(out: Path) -> dict[str, Any]:
    """Measure all cases and return them as docs/results has them."""
    content: dict[str, Any] = {
        "format": 1,
        "id": "join",
        "title": "Joining a finished federation",
        "command": "make join-study",
        "rounds": ROUNDS,
        "seeds": SEEDS,
        "epochs": EPOCHS,
        "cases": [],
    }
    for case in cases():
        found = measure(case, out)
        key = {name: getattr(case, name) for name in ("rate", "dataset", "domain", "seed")}
        content["cases"].append({**key, **found})
        print(*key.values(), file=sys.stderr, flush=True)
    return content


def main(out: Path) -> None:
    """Measure, then write the numbers, the tables and the figure."""
    from join_tables import draw, render_page

    content = gather(out)
    # A line per case, so that a change shows where it is.
    text = json.dumps(rounded(content), separators=(",", ":")).replace('{"rate"', '\n{"rate"')
    (DOCS / "results" / "join.json").write_text(text + "\n", encoding="utf-8")
    render_page(content, DOCS / "join.md")
    draw(content, DOCS / "images" / "join.png")


def rounded(value: Any) -> Any:
    """Return the same with four decimals."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/join"))
