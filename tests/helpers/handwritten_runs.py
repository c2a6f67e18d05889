"""Run directories written by hand: any size, any names, no training."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpfedcl.experiment import Experiment
from mpfedcl.methods import PREDICTORS
from mpfedcl.studies.tuning import Rung, Trial, TuningResult

Json = dict[str, Any]
HOSTILE = (
    "</script><script>document.title='taken'</script>",
    "<img src=x onerror=document.title='taken'>",
    "\"'`&lt;${1}",
    "класс-名前-🦓\u202e",
)
VERSIONS = {"python": "3.11", "mpfedcl": "0", "torch": "2", "numpy": "2", "scikit-learn": "1"}


def write_run(
    path: Path,
    *,
    clients: Sequence[str] = ("client-0", "client-1", "client-2"),
    classes: Sequence[str] = ("cat", "dog"),
    rounds: int = 3,
    rejected: Json | None = None,
    finished: bool = True,
    **settings: Any,
) -> Path:
    """Write a run whose accuracies are made up but known: see `accuracy_of`."""
    experiment = Experiment(rounds=rounds, clients=len(clients)).replace(
        **{"prototypes__per_class": 2, **settings}
    )
    path.mkdir(parents=True)
    (path / "experiment.toml").write_text(experiment.resolved().to_toml())
    lines = []
    for number in range(1, rounds + 1):
        by_client = {name: accuracy_of(number, place) for place, name in enumerate(clients)}
        mean = sum(by_client.values()) / len(clients)
        table = {
            test: {predictor: mean - 10 * i - j for j, predictor in enumerate(PREDICTORS)}
            for i, test in enumerate(("local_test", "global_test"))
        }
        lines.append(
            {
                "round": number,
                "loss": 2.0 / number,
                "accuracy": table,
                "accuracy_per_client": by_client,
                "seconds": {"train": 0.5, "cluster": 0.25, "evaluate": 1.0},
                "bytes": {"up": 1000, "down": 500},
                "clients": {
                    "answered": list(clients),
                    "missing": [],
                    "rejected": (rejected or {}) if number == rounds else {},
                },
                "sent": {"parameters": 10, "prototype_floats": 4},
                "unchanged": False,
                "remarks": {},
            }
        )
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    size = len(classes)
    write_json(
        path / "partition.json",
        {
            "classes": list(classes),
            "clients": {
                name: {"train": [(7 * place + 3 * k) % 50 for k in range(size)], "test": 10}
                for place, name in enumerate(clients)
            },
            "input_means": dict.fromkeys(clients, 0.0),
        },
    )
    if finished:
        write_json(
            path / "confusion.json",
            {
                "format": 2,
                "round": rounds,
                "predictor": "personal_prototype",
                "classes": list(classes),
                "clients": {
                    name: [[8 if i == j else (i + j + place) % 3 for j in range(size)]
                           for i in range(size)]
                    for place, name in enumerate(clients)
                },
                "unanswered": {clients[0]: [1] * size},
            },
        )  # fmt: skip
        write_json(
            path / "summary.json",
            {"format": 2, "predictor": "personal_prototype", "versions": VERSIONS, "threads": 1},
        )
    return path


def accuracy_of(round_number: int, client: int) -> float:
    """The made-up accuracy of a client in a round."""
    return 40.0 + min(round_number, 50) - 7 * (client % 5)


def write_json(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content))


def write_tuning(path: Path, method: str, **changes: Any) -> Json:
    """Write a method's search as it is written in its own folder, and return it.

    Five settings over 4 rounds: one blew up, the third is chosen.
    """
    defaults = {"train__lr": 0.01, "contrast__weight": 1.0}
    tried: list[tuple[Json, dict[int, float | None], int | None]] = [
        ({}, {1: 40.0, 2: 50.0, 4: 60.0}, None),
        ({"train__lr": 0.03}, {1: 42.0, 2: 52.0}, 2),
        ({"train__lr": 0.1, "contrast__weight": 3.0}, {1: 44.0, 2: 55.0, 4: 66.0}, None),
        ({"train__lr": 0.3}, {1: None}, 1),
        ({"contrast__weight": 3.0}, {1: 41.0}, 1),
    ]
    search = TuningResult(
        method=method,
        predictor="global_classifier",
        base=Experiment(method=method, rounds=4),
        search_space_used={"train__lr": (0.01, 0.03, 0.1, 0.3), "contrast__weight": (1.0, 3.0)},
        budget=5,
        seeds=[7],
        validation=0.2,
        rungs=[Rung(1, 5), Rung(2, 3), Rung(4, 2)],
        trials=[
            Trial(number, defaults | change, change, scores, stopped, [f"trial-{number}-seed7"])
            for number, (change, scores, stopped) in enumerate(tried)
        ],
        chosen=2,
        within=[2],
        standard_error=1.9,
        rounds_run=13,
        seconds=2.5,
    )
    path.mkdir(parents=True, exist_ok=True)
    search.model_copy(update=changes).write(path)
    content: Json = json.loads((path / "tuning.json").read_text())
    return content
