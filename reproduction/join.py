"""Domains that join a finished federation: the tables and the figure of docs/join.md.

Each domain of Digit-5, Office-10 and sixdomain is held out of a federation in turn and joins it
with `mpfedcl join`; next to it the same domain alone from untrained weights, and in a federation
that has it from the start. Two tables of the page, few images and the effect on the others, need
more than the public interface gives; their values stay as they are in docs/results/join.json.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpfedcl import Experiment
from reproduction.items import DOMAINS, Sets, data_file
from reproduction.join_page import draw, render_page
from reproduction.runs import Runs
from reproduction.tables import DOCS

RATES, SEEDS, EPOCHS, ROUNDS = (0.01, 0.1), (0, 1, 2), (0, 1, 2, 5, 10), 60
RESULTS = DOCS / "results" / "join.json"


@dataclass(frozen=True)
class Case:
    """A domain that comes late, at one learning rate and seed."""

    rate: float
    dataset: str
    domain: str
    seed: int

    def federation(self, domains: tuple[str, ...]) -> Experiment:
        """Return a run of some domains, one per client."""
        return Experiment(rounds=ROUNDS, seed=self.seed, evaluate_every=ROUNDS).replace(
            dataset__name=self.dataset,
            dataset__domains=domains,
            partition__kind="feature",
            train__lr=self.rate,
            evaluate_predictors="all",
            personal_models=False,
        )


def cases(sets: Sets) -> Iterator[Case]:
    """Yield everything that is measured."""
    for rate in RATES:
        for dataset in ("digit5", "office10", "sixdomain"):
            if dataset in sets.titles:
                for domain in DOMAINS[dataset]:
                    for seed in SEEDS:
                        yield Case(rate, dataset, domain, seed)


def join(run: Path, case: Case, rate: float, epochs: int) -> dict[str, dict[str, float]]:
    """Return the accuracy of a client that joins, before and after training, by predictor."""
    source = data_file(case.dataset, case.domain)
    command = [sys.executable, "-m", "mpfedcl", "join", str(run), "--data", str(source)]
    command += ["--name", case.domain, "--epochs", str(epochs), "--lr", str(rate), "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, dict[str, float]] = json.loads(done.stdout)["accuracy"]
    return found


def by_epochs(run: Path, case: Case, epochs: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return the accuracy after each number of epochs."""
    joined: dict[str, dict[str, float]] = {}
    for number in epochs[1:]:
        found = join(run, case, case.rate, number)
        joined |= {"0": found["before"], str(number): found["after"]}
    return joined


def measure(case: Case, runs: Runs) -> dict[str, Any]:
    """Return the predictors on the domain's local test set, by what it began with and epochs."""
    every = DOMAINS[case.dataset]
    others = tuple(each for each in every if each != case.domain)
    trained, whole = case.federation(others), case.federation(every)
    # Alone: to join a federation that has not trained, and without its prototypes in the loss.
    blank = trained.replace(rounds=1, train__lr=1e-30, contrast__weight=0.0)
    runs.complete([trained, whole, blank])
    epochs = EPOCHS[:2] if runs.quick else EPOCHS
    path = runs.path(runs.prepare(trained))
    member = runs.records(whole)[-1]
    last = trained.train.learning_rate(ROUNDS + 1)
    return {
        "joined": by_epochs(path, case, epochs),
        "alone": by_epochs(runs.path(blank), case, epochs),
        "last rate": join(path, case, last, epochs[-1])["after"],
        # By classifier the records have only the mean over clients, which is what the page shows.
        "federation": {
            "personal": {
                "both": member["accuracy_per_client"][case.domain],
                "classifier": member["accuracy"]["local_test"]["personal_classifier"],
            }
        },
    }


def main(runs: Runs) -> None:
    """Measure all cases, keep what is only in the results, and write page and figure."""
    content = json.loads(RESULTS.read_text(encoding="utf-8"))
    keys = ("rate", "dataset", "domain", "seed")
    known = {tuple(case[key] for key in keys): case for case in content["cases"]}
    for case in cases(Sets()):
        place = tuple(getattr(case, key) for key in keys)
        kept = known.setdefault(place, dict(zip(keys, place, strict=True)))
        kept |= rounded(measure(case, runs))
        print(*place, file=sys.stderr, flush=True)
        if runs.quick:
            return
    content |= {"command": "make reproduce STUDY=join", "cases": list(known.values())}
    # A line per case, so that a change shows where it is.
    text = json.dumps(content, separators=(",", ":")).replace('{"rate"', '\n{"rate"')
    RESULTS.write_text(text + "\n", encoding="utf-8")
    render_page(content, DOCS / "join.md")
    draw(content, DOCS / "images" / "join.png")


def rounded(value: Any) -> Any:
    """Return the same with four decimals."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return round(value, 4) if isinstance(value, float) else value
