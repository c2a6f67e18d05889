"""One-shot methods against tuned rounds: the tables of docs/one-shot.md.

Ten seeds, both test sets. The learning rate of rivals is chosen on validation images of three other
draws; one-shot methods have nothing to choose.
"""

import os
from pathlib import Path
from statistics import fmean
from typing import Any

import mpfedcl
from mpfedcl import Experiment
from reproduction.items import Sets
from reproduction.runs import Runs
from reproduction.tables import markdown, mean_std, paired_difference

SEEDS = tuple(range(10))
TUNING_SEEDS = (100, 101, 102)
RATES, ROUNDS = 4, 60
"""Learning rates tried for each rival, and rounds."""
SKEWS: dict[str, dict[str, Any]] = {
    "0.05": {"partition__alpha": 0.05},
    "0.5": {"partition__alpha": 0.5},
    "feature": {"partition__kind": "feature"},
    "0.1": {"partition__alpha": 0.1},
}
RIVALS = {
    "local_test": {
        "Local": ("local", "personal_classifier"),
        "FedAvg+prior": ("fedavg", "global_classifier_prior"),
        "own form": ("local-gauss", "personal_classifier_prior"),
    },
    "global_test": {
        "FedAvg": ("fedavg", "global_classifier"),
        "FedLDA": ("fedlda", "global_classifier"),
    },
}
OURS = {"local_test": "personal_classifier_prior", "global_test": "global_classifier"}
WORDS = {"better": "win", "worse": "loss", "no clear difference": "level"}


def encoders(sets: Sets) -> dict[str, list[str]]:
    """Return the encoders, and the data sets that they are tried on."""
    several = sets.select("office10", "domainnet", "digit5")
    data = Path(os.environ.get("MPFEDCL_DATA", "."))
    network = data.parent / "weights" / "mobilenet_v2_imagenet.onnx"
    found = {"resnet18": several, "random-filters": sets.select("mnist")}
    return found | ({f"onnx:{network}": several} if network.is_file() else {})


def run(base: Experiment, method: str, runs: Runs) -> list[dict[str, Any]]:
    """Return the summaries of a method over seeds; with rounds its learning rate is chosen."""
    experiment = base.replace(method=method)
    if method in ("local", "fedavg"):
        searched = runs.prepare(experiment.replace(evaluate_every=10))
        folder = runs.folder / "tuning" / runs.path(searched).name
        seeds = TUNING_SEEDS[:1] if runs.quick else TUNING_SEEDS
        found = mpfedcl.tune(searched, method, folder, budget=RATES, seeds=seeds, jobs=runs.jobs)
        assert found is not None
        experiment = experiment.replace(train__lr=found.best.train.lr)
    several = [experiment.replace(seed=seed) for seed in (SEEDS[:2] if runs.quick else SEEDS)]
    runs.complete(several)
    return [runs.summary(each) for each in several]


def main(runs: Runs) -> None:
    """Print a table per encoder and test set, each with the verdict on the best rival."""
    for encoder, datasets in encoders(Sets()).items():
        rows: dict[str, list[list[str]]] = {test: [] for test in RIVALS}
        for skew, changes in SKEWS.items():
            for dataset in datasets:
                if skew == "feature" and dataset.startswith("mnist"):
                    continue
                base = Experiment(rounds=ROUNDS, evaluate_every=ROUNDS).replace(
                    dataset__name=dataset,
                    encoder__name=encoder,
                    evaluate_predictors="all",
                    personal_models=False,
                    **changes,
                )
                names = ("local", "fedavg", "local-gauss", "fedlda", "fedgauss")
                found = {name: run(base, name, runs) for name in names}
                for test, wanted in RIVALS.items():
                    rivals = {
                        title: [each["predictors"][test][predictor] for each in found[method]]
                        for title, (method, predictor) in wanted.items()
                    }
                    ours = [each["predictors"][test][OURS[test]] for each in found["fedgauss"]]
                    best = max(rivals, key=lambda title: fmean(rivals[title]))
                    against = best if test == "local_test" else "FedAvg"
                    difference = paired_difference(ours, rivals[against])
                    assert difference is not None
                    verdict = f"{WORDS[difference.verdict]} {difference} ({against})"
                    values = [*map(mean_std, rivals.values()), mean_std(ours)]
                    rows[test].append([f"{dataset} {skew}", *values, verdict])
                if runs.quick:
                    break
        for test, table in rows.items():
            columns = [f"{test.replace('_', ' ')} set", *RIVALS[test], "FedGauss", "against"]
            print(f"{encoder}\n\n{markdown(columns, table)}")
