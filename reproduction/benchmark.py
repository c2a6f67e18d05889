"""All methods side by side: docs/benchmark.md.

For each method the learning rate is chosen on validation images of another draw; then three seeds
are run, and both test sets are read in the last round.
"""

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from mpfedcl import Experiment, InvalidInput
from reproduction.items import Sets
from reproduction.runs import Record, Runs, training_seconds
from reproduction.tables import DOCS, markdown, mean_std, paired_difference

RATES = (0.01, 0.03, 0.1)
"""Tried for each method that trains."""
SEEDS, TUNING_SEED = (0, 1, 2), 100
ROUNDS, POINTS = 30, 5
"""Rounds of a run, and how often it is evaluated."""
TARGET = 0.9
"""Of FedAvg's last accuracy, by seed: how soon it is reached."""
TESTS = ("local_test", "global_test")
TITLES = {
    "mnist-label": "MNIST, label skew",
    "office10-label": "Office-10, label skew",
    "office10-feature": "Office-10, feature skew",
    "digit5-label": "Digit-5, label skew",
    "digit5-feature": "Digit-5, feature skew",
}
HEAD = f"""# All methods, side by side

Written by `make reproduce STUDY=benchmark`, not by hand. Methods: [methods.md](methods.md).

- **Same work for all**: {ROUNDS} rounds, the data set's other defaults. Only the learning rate is
  chosen for each method, among {", ".join(map(str, RATES))}, on validation images of another draw
  of the data. Its other settings are its defaults: with more tuning it may do better (`mpfedcl
  tune`).
- **Last round, not best.** local: each client on its local test set; global: every client on the
  test images of all. Both by the method's primary predictor. mean(std) over seeds, ddof 1.
- **rank**: by mean on that test set. In brackets the ranks that the seeds allow: a method is surely
  ahead of another only where 0 lies outside the 95 % interval of their paired difference.
- **MB**: what a client sends and receives in the whole run. **s**: seconds per round of all clients
  on two cores, without evaluation; a dash where it was not measured on an idle machine.
- **target**: virtual seconds until {TARGET:.0%} of FedAvg's last accuracy is reached on the local
  test sets, the median over seeds, where clients differ in speed (`--systems.kind lognormal`); in
  brackets how many seeds reached it, where not all. Runs are evaluated five times: it is coarse.

"""
Json = dict[str, Any]


def situations(sets: Sets) -> Iterator[tuple[str, Experiment]]:
    """Yield label skew for each set, and feature skew where there are several domains."""
    for dataset in sets.select("mnist", "office10", "digit5"):
        for kind in ("label", "feature")[: 1 if dataset.startswith("mnist") else 2]:
            yield (
                f"{dataset}-{kind}",
                Experiment(rounds=ROUNDS).replace(
                    evaluate_every=ROUNDS // POINTS,
                    dataset__name=dataset,
                    partition__kind=kind,
                    partition__alpha=0.05,
                    # The same clock for all, so that methods that do not wait can gain by it.
                    systems__kind="lognormal",
                    personal_models=False,
                ),
            )


def list_methods() -> list[str]:
    """Return all methods by name."""
    command = [sys.executable, "-m", "mpfedcl", "methods", "--json"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return [each["name"] for each in found] if isinstance(found, list) else list(found)


def measure(base: Experiment, runs: Runs) -> Json:
    """Return the results of a method, a value per seed."""
    tried = {}
    for rate in RATES:
        changes = {"train__lr": rate, "seed": TUNING_SEED, "partition__validation": 0.2}
        experiment = base.replace(**changes, evaluate_every=ROUNDS)
        last = runs.records(experiment)[-1]
        predictor = runs.summary(experiment)["predictor"]
        score = (last["accuracy"] or {}).get("local_test", {}).get(predictor)
        tried[rate] = -math.inf if score is None else score
        if last["round"] == 1 and not runs.quick:
            # A one-shot method has no learning rate.
            break
    rate = max(tried, key=lambda rate: (tried[rate], -rate))
    several = [base.replace(train__lr=rate, seed=seed) for seed in SEEDS]
    runs.complete(several)
    found = [runs.records(each) for each in several]
    summaries = [runs.summary(each) for each in several]
    predictor = summaries[0]["predictor"]
    # In the last round of a run that has diverged no update counts.
    num_clients = max(len(record["clients"]["answered"]) for record in found[0]) or 1
    return {
        "lr": rate if len(tried) > 1 else None,
        "local_test": [each["accuracy"] for each in summaries],
        "global_test": [each["accuracy_global"] for each in summaries],
        "megabytes": sum(sum(r["bytes"].values()) for r in found[0]) / num_clients / 1e6,
        "curves": [curve(records, predictor) for records in found],
        "seconds": median(map(training_seconds, found[0])) if runs.jobs == 1 else None,
    }


def curve(records: Sequence[Record], predictor: str) -> list[tuple[float, float | None]]:
    """Return virtual seconds and accuracy on the local test sets, where a run was evaluated."""
    return [
        (record["virtual_seconds"], record["accuracy"]["local_test"].get(predictor))
        for record in records
        if record["accuracy"] is not None and record.get("virtual_seconds") is not None
    ]


def rank(values: Mapping[str, Sequence[float | None]]) -> dict[str, tuple[int, int, int]]:
    """Return each method's rank by mean, and the first and last that the seeds allow."""
    means = {}
    for name, each in values.items():
        known = [value for value in each if value is not None]
        means[name] = fmean(known) if known else -1.0
    found = {}
    for name, own in values.items():
        others = [each for other, each in values.items() if other != name]
        pairs = [paired_difference(each, own) for each in others]
        verdicts = [each.verdict for each in pairs if each is not None]
        place = 1 + sum(mean > means[name] for mean in means.values())
        found[name] = place, 1 + verdicts.count("better"), len(values) - verdicts.count("worse")
    return found


def ranks_of(methods: Mapping[str, Json]) -> dict[str, dict[str, tuple[int, int, int]]]:
    """Return the ranks of all methods on both test sets."""
    return {test: rank({name: each[test] for name, each in methods.items()}) for test in TESTS}


def tabulate(methods: Mapping[str, Json]) -> str:
    """Return the table of a situation, best on the local test sets first."""
    ranks = ranks_of(methods)
    rows = []
    for name in sorted(methods, key=lambda name: ranks["local_test"][name][0]):
        each, shown = methods[name], []
        for test in TESTS:
            place, first, last = ranks[test][name]
            shown += [mean_std(each[test]), f"{place} ({first}-{last})"]
        rows.append(
            [
                f"`{name}`",
                "-" if each["lr"] is None else f"{each['lr']:g}",
                *shown,
                f"{each['megabytes']:.1f}",
                "-" if each["seconds"] is None else f"{each['seconds']:.2f}",
                time_to_target(each, methods.get("fedavg")),
            ]
        )
    columns = ["method", "lr", "local", "rank", "global", "rank", "MB", "s", "target"]
    return markdown(columns, rows)


def time_to_target(each: Json, average: Json | None) -> str:
    """Return the virtual seconds to the target, the median over seeds that reach it."""
    if average is None or not each["curves"]:
        return "-"
    reached = []
    for points, goal in zip(each["curves"], average["local_test"], strict=True):
        times = [at for at, value in points if value is not None and value >= TARGET * goal]
        reached += times[:1]
    if not reached:
        return "not reached"
    missed = f" ({len(reached)})" if len(reached) < len(each["curves"]) else ""
    return f"{median(reached):,.1f}{missed}"


def summarize(ranks: Mapping[str, Mapping[str, Mapping[str, Sequence[int]]]]) -> str:
    """Return the mean rank of each method over the situations that have it."""
    places: dict[str, dict[str, list[int]]] = {}
    for tests in ranks.values():
        for test, methods in tests.items():
            for name, (place, *_) in methods.items():
                places.setdefault(name, {each: [] for each in TESTS})[test].append(place)
    rows = []
    for name in sorted(places, key=lambda name: fmean(places[name]["local_test"])):
        shown = []
        for several in places[name].values():
            shown += [f"{fmean(several):.1f}", f"{min(several)} to {max(several)}"]
        rows.append([f"`{name}`", *shown, str(len(places[name]["local_test"]))])
    columns = ["mean rank, local", "best to worst", "mean rank, global", "best to worst", "in"]
    note = "A mean of ranks hides where a method loses: see above."
    return f"## Over all settings\n\n{note}\n\n{markdown(['method', *columns], rows)}"


def main(runs: Runs) -> None:
    """Measure all methods in all situations and write the page after each."""
    text, ranks = HEAD, {}
    for title, base in situations(Sets()):
        methods, left_out = {}, {}
        for name in ["fedavg", "local", "fedgauss"] if runs.quick else list_methods():
            try:
                methods[name] = measure(base.replace(method=name), runs)
            except InvalidInput as error:
                left_out[name] = str(error)
        text += f"## {TITLES.get(title, title)}\n\n{tabulate(methods)}\n"
        text += "".join(f"- `{name}` is left out: {why}\n" for name, why in left_out.items()) + "\n"
        ranks[title] = ranks_of(methods)
        if not runs.quick:
            notes = (DOCS / "results" / "benchmark-notes.md").read_text()
            (DOCS / "benchmark.md").write_text(f"{text}{summarize(ranks)}\n{notes}")
            ranks_file = DOCS / "results" / "benchmark.json"
            ranks_file.write_text(json.dumps(ranks, indent=1) + "\n")
    if runs.quick:
        print(text + summarize(ranks))
