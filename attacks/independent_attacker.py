"""Adaptive attackers in numpy: they know the code, all public seeds and the others' updates.

Written apart from `malicious_clients.py` and from the package's defenses: an update is opened into
plain arrays, an attack changes them, and they are packed again. One client of five attacks, or two
of ten that agree; mnist-sample, label skew Dir(0.5), 20 rounds, learning rate 0.1, bounds on.

    python attacks/independent_attacker.py runs/adaptive             # run what is missing
    python attacks/independent_attacker.py runs/adaptive --report    # the table
"""

import argparse
import itertools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch

from mpfedcl.core.rng import generator
from mpfedcl.data.client_data import FederatedData
from mpfedcl.data.loading import load_data_and_model
from mpfedcl.engines import InProcessEngine
from mpfedcl.experiment import Experiment
from mpfedcl.methods import find_method
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.prototypes import Prototypes
from mpfedcl.rounds.assembly import Assembly, assemble
from mpfedcl.rounds.engine import Members
from mpfedcl.rounds.loop import RoundLoop

Array = numpy.ndarray[Any, Any]
Change = dict[str, Array]
LATE = 10
"""The first round in which a patient attacker attacks."""
TIMES = 20_000
"""How often a client claims each of its samples."""
COMMON = 0.05
"""Typical cosine of rounds that may be judged, a little below what the bounds ask for."""
BUCKETS = 4096
"""Numbers of the count sketch that directions were once compared by."""


@dataclass
class Opened:
    """An update as plain arrays, and what the attacker knows of the round."""

    change: Change
    vectors: Array
    labels: Array
    others: Sequence[Change] = ()
    round: int = 1


Attack = Callable[[Opened], None]


def flip(times: float) -> Attack:
    """Go the other way, `times` as far."""

    def attack(own: Opened) -> None:
        own.change = {name: -times * value for name, value in own.change.items()}

    return attack


def hide_in_null_space(own: Opened) -> None:
    """Go the other way, except for what a count sketch with a public seed sees."""
    places, signs = {}, {}
    for name, value in own.change.items():
        draw = generator(0, name, "sketch")
        places[name] = torch.randint(BUCKETS, (value.size,), generator=draw).numpy()
        signs[name] = torch.randint(2, (value.size,), generator=draw).numpy() * 2.0 - 1.0
    seen, counts = numpy.zeros(BUCKETS), numpy.zeros(BUCKETS)
    for name, value in own.change.items():
        numpy.add.at(seen, places[name], signs[name] * value.ravel())
        numpy.add.at(counts, places[name], 1)
    shown = seen / numpy.maximum(counts, 1)
    for name, value in own.change.items():
        visible = (signs[name] * shown[places[name]]).reshape(value.shape)
        own.change[name] = (2 * visible - value).astype(value.dtype)


def flip_late(own: Opened) -> None:
    """Go the other way once a good reputation is earned."""
    if own.round >= LATE:
        flip(1)(own)


def stay_inside(own: Opened) -> None:
    """Go against the others by as much as the bounds on direction and norm let pass.

    A round in which the others have no common direction is not judged: there, the other way. In
    the others, as far against their sum as the median cosine with them stays positive.
    """
    rows = numpy.stack([_flatten(each) for each in (own.change, *own.others)])
    norms = numpy.linalg.norm(rows, axis=1)
    rows /= norms[:, None]
    against = -rows[1:].sum(0)
    against /= numpy.linalg.norm(against)
    between = numpy.sort(rows[1:] @ rows[1:].T, axis=1)[:, :-1]
    moved = against
    if numpy.median(numpy.median(between, axis=1)) > COMMON:
        mixes = [part * against + (1 - part) * rows[0] for part in numpy.linspace(0, 1, 101)]
        moved = next((each for each in mixes[::-1] if numpy.median(rows[1:] @ each) > 0), rows[0])
        moved = moved / numpy.linalg.norm(moved)
    _fill(own.change, 1.19 * float(numpy.median(norms)) * moved)


def permute(own: Opened, share: float = 1.0) -> None:
    """Give the vectors of each of the first classes to the next one."""
    held = sorted(set(own.labels.tolist()))
    moved = held[: max(2, round(share * len(held)))]
    following = dict(zip(moved, [*moved[1:], *moved[:1]], strict=True))
    labels = [following.get(label, label) for label in own.labels.tolist()]
    order = numpy.argsort(labels, kind="stable")
    own.vectors, own.labels = own.vectors[order], numpy.array(labels)[order]


def permute_half(own: Opened) -> None:
    """Permute half of the classes only."""
    permute(own, 0.5)


def permute_late(own: Opened) -> None:
    """Permute once a good reputation is earned."""
    if own.round >= LATE:
        permute(own)


def swap_two(own: Opened) -> None:
    """Exchange the labels of two classes."""
    permute(own, 0.0)


def shift(part: float) -> Attack:
    """Move each class's vectors a part of the way to the next class's."""

    def attack(own: Opened) -> None:
        held, means = _describe(own)
        following = dict(zip(held, [*held[1:], *held[:1]], strict=True))
        ways = [means[following[label]] - means[label] for label in own.labels.tolist()]
        own.vectors = own.vectors + part * numpy.array(ways)

    return attack


def claim_one_class(own: Opened) -> None:
    """Send one class only, where others are: without a second one, nothing can be compared."""
    held, means = _describe(own)
    own.vectors = numpy.array([means[label] for label in held[1:3]])
    own.labels = numpy.full(len(own.vectors), held[0])


def pile_up(own: Opened) -> None:
    """Put all classes next to one, each a little in its own direction.

    Directions from the client's own mean then look honest, although only one place is claimed.
    """
    held, means = _describe(own)
    center = numpy.mean([means[label] for label in held], axis=0)
    target = means[held[own.round % len(held)]]
    own.vectors = target + 0.05 * (own.vectors - center)


ATTACKS: Mapping[str, Attack] = {
    "sign-flip": flip(1),
    "sign-flip-5": flip(5),
    "claim-and-flip-5": flip(5),
    "null-space": hide_in_null_space,
    "flip-late": flip_late,
    "inside-the-bounds": stay_inside,
    "permuted": permute,
    "permuted-late": permute_late,
    "permuted-half": permute_half,
    "two-swapped": swap_two,
    "shifted-0.3": shift(0.3),
    "shifted-0.6": shift(0.6),
    "piled-up": pile_up,
    "one-class": claim_one_class,
}
ON_PROTOTYPES = tuple(ATTACKS)[6:]
AWAY = "away"
"""No attack: the malicious clients' updates are missing, which no defense can make up for."""


def _describe(own: Opened) -> tuple[list[int], dict[int, Array]]:
    held = sorted(set(own.labels.tolist()))
    return held, {label: own.vectors[own.labels == label].mean(0) for label in held}


def _flatten(change: Change) -> Array:
    return numpy.concatenate([change[name].ravel() for name in sorted(change)]).astype(float)


def _fill(change: Change, flat: Array) -> None:
    start = 0
    for name in sorted(change):
        size, like = change[name].size, change[name]
        change[name] = flat[start : start + size].reshape(like.shape).astype(like.dtype)
        start += size


class AdaptiveClients(InProcessEngine):
    """An engine some of whose clients open their update, change it and pack it again."""

    def __init__(
        self, assembly: Assembly, data: FederatedData, attack: str, attackers: Collection[str]
    ) -> None:
        super().__init__(assembly, data)
        self._attack, self._attackers = attack, frozenset(attackers)
        if attack.startswith("claim"):
            self.members = Members(
                {n: TIMES * k if n in self._attackers else k for n, k in data.sizes.items()}
            )

    def train(
        self, broadcast: Broadcast, names: Sequence[str], *, keep: Collection[str]
    ) -> Iterator[Update]:
        """Train all clients; yield honest updates as they are, the others after the attack."""
        updates = [each.written_out() for each in super().train(broadcast, names, keep=keep)]
        start = {name: value.numpy() for name, value in broadcast.params.items()}
        opened = {each.client: _open(each, start, broadcast.round) for each in updates}
        honest = [each.change for name, each in opened.items() if name not in self._attackers]
        for update in updates:
            if update.client in self._attackers:
                if self._attack == AWAY:
                    continue
                own = opened[update.client]
                own.others = honest
                ATTACKS[self._attack](own)
                update = self._pack(update, own, start)
            yield update

    def _pack(self, update: Update, own: Opened, start: Mapping[str, Array]) -> Update:
        averaged = {n: torch.from_numpy(start[n] + each) for n, each in own.change.items()}
        rows = update.prototypes
        rows = Prototypes(
            torch.from_numpy(own.vectors).to(rows.vectors.dtype),
            torch.from_numpy(own.labels),
            torch.ones(len(own.labels), dtype=torch.int64),
        )
        return replace(
            update,
            averaged=averaged,
            prototypes=rows,
            num_samples=self.members.sizes[update.client],
        )


def _open(update: Update, start: Mapping[str, Array], number: int) -> Opened:
    assert isinstance(update.averaged, dict)
    change = {name: value.numpy() - start[name] for name, value in update.averaged.items()}
    rows = update.prototypes
    return Opened(change, rows.vectors.numpy().copy(), rows.labels.numpy().copy(), round=number)


@dataclass(frozen=True)
class Case:
    """One run."""

    method: str
    attack: str
    clients: int
    seed: int
    alpha: float = 0.5
    rounds: int = 20

    def path(self, folder: Path) -> Path:
        """Return the file of its result."""
        name = f"{self.method}-{self.attack}-{self.clients}-{self.alpha:g}-{self.seed}.json"
        return folder / name


def list_cases(seeds: Collection[int]) -> Iterator[Case]:
    """Yield all cases, the most important first."""
    for seed in seeds:
        for method, attack in itertools.product(
            ("mp-fedcl", "fedavg"), ("off", "none", AWAY, *ATTACKS)
        ):
            if method == "mp-fedcl" or attack not in ON_PROTOTYPES:
                yield Case(method, attack, 5, seed)
    for seed, method in itertools.product(seeds, ("mp-fedcl", "fedavg")):
        for attack in ("off", "none", AWAY, *ATTACKS):
            if attack not in ON_PROTOTYPES:
                yield Case(method, attack, 5, seed, alpha=0.05)
        if method == "mp-fedcl":
            yield Case(method, "permuted", 5, seed, alpha=0.05)
    for method, attack in itertools.product(
        ("mp-fedcl", "fedavg"), ("off", "none", AWAY, *ATTACKS)
    ):
        if method == "mp-fedcl" or attack not in ON_PROTOTYPES:
            yield Case(method, attack, 10, min(seeds))


def run(case: Case) -> dict[str, Any]:
    """Run a case; return its accuracy, and who was bounded or dropped in how many rounds."""
    hidden = (128, 64) if case.clients > 5 else ()
    experiment = Experiment(
        method=case.method, rounds=case.rounds, clients=case.clients, seed=case.seed
    ).replace(
        partition__alpha=case.alpha,
        train__lr=0.1,
        model__hidden=hidden,
        validation__bounds="off" if case.attack == "off" else "on",
    )
    experiment = experiment.resolved(find_method(case.method).defaults)
    data, model = load_data_and_model(experiment, torch.device("cpu"))
    assembly = assemble(experiment, model, num_classes=data.num_classes, input_size=data.input_size)
    attackers: list[str] = []
    engine = InProcessEngine(assembly, data)
    if case.attack in (AWAY, *ATTACKS):
        first = case.seed % case.clients
        attackers = sorted(data.names)[first :: 5 if case.clients > 5 else case.clients][:2]
        engine = AdaptiveClients(assembly, data, case.attack, attackers)
    loop = RoundLoop(assembly, engine)
    times: dict[str, dict[str, int]] = {}
    for number in range(1, experiment.rounds + 1):
        record = loop.run_round(evaluate=number == experiment.rounds)
        found = {**record.processed, "rejected": [*record.clients.rejected]}
        for mark, clients in found.items():
            for client in clients:
                by_client = times.setdefault(mark, {})
                by_client[client] = by_client.get(client, 0) + 1
    assert record.accuracy is not None
    (accuracy,) = record.accuracy["global_test"].values()
    return {**vars(case), "accuracy": accuracy, "attackers": attackers, "times": times}


def report(results: Sequence[Mapping[str, Any]]) -> None:
    """Print the mean accuracy of each case over its seeds, and the points lost by the attack."""
    found: dict[tuple[Any, ...], dict[int, float]] = {}
    for each in results:
        column = (each["method"], each["clients"], each["alpha"])
        found.setdefault((column, each["attack"]), {})[each["seed"]] = each["accuracy"]
    columns = sorted(
        {column for column, _ in found}, key=lambda c: (c[1], -c[2], c[0] != "mp-fedcl")
    )
    heads = [f"{method}, {clients} clients, Dir({alpha:g})" for method, clients, alpha in columns]
    print("| attack | " + " | ".join(heads) + " |")
    print("|---|" + "---|" * len(columns))
    for attack, label in {"off": "none, bounds off", "none": "none"}.items():
        known = [[*found.get((column, attack), {}).values()] for column in columns]
        means = [f"{numpy.mean(each):.1f}" if each else "" for each in known]
        print(f"| {label} | " + " | ".join(means) + " |")
    for attack in (AWAY, *ATTACKS):
        cells = [_describe_loss(found, column, attack) for column in columns]
        print(f"| {attack} | " + " | ".join(cells) + " |")


def _describe_loss(
    found: Mapping[tuple[Any, ...], Mapping[int, float]], column: tuple[Any, ...], attack: str
) -> str:
    plain, now = found.get((column, "none"), {}), found.get((column, attack), {})
    lost = [plain[seed] - now[seed] for seed in sorted(plain.keys() & now.keys())]
    if not lost:
        return ""
    seeds = ", ".join(f"{each:.1f}" for each in lost)
    return f"{numpy.mean([*now.values()]):.1f} ({seeds})"


def main() -> None:
    """Run what is missing, or report what is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--report", action="store_true", help="print the tables")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", default=[], help="attacks to run")
    given = parser.parse_args()
    if given.report:
        report([json.loads(path.read_text()) for path in sorted(given.folder.glob("*.json"))])
        return
    torch.set_num_threads(1)
    given.folder.mkdir(parents=True, exist_ok=True)
    for case in list_cases(given.seeds):
        path = case.path(given.folder)
        if path.exists() or (given.only and case.attack not in given.only):
            continue
        result = run(case)
        path.write_text(json.dumps(result))
        print(path.name, result["accuracy"], result["times"], flush=True)


if __name__ == "__main__":
    main()
