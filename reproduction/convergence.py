"""Hold the bounds of the paper's convergence section to what a run does: docs/convergence.md.

A subclass of the method measures each client around its training and writes what it finds into
the round's record (`remarks`). What the new pool does to a client is measured when the next round
begins, so a run has one round more than is judged.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy
import torch
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from mpfedcl import Batch, Context, Experiment, Method, find_method
from mpfedcl.methods import SharesPrototypes, prototype_rule
from reproduction.items import Sets
from reproduction.runs import Record, Runs
from reproduction.tables import COLORS, DOCS, figure_file, markdown

Tensors = dict[str, Tensor]
BOUNDS = {
    "lemma_1": "Lemma 1: training lowers L enough",
    "lemma_2": "Lemma 2: the new pool raises L little",
    "theorem_1": "Theorem 1: both together",
    "corollary_1": "Corollary 1: its condition on η is met",
    "lemma_1_one_step": "Lemma 1 for one plain step of η",
    "descent_one_step": "textbook: one plain step, own gradient",
    "falls_in_training": "L falls in training",
    "falls_over_round": "L falls over the round, new pool included",
    "falls_to_average": "L falls from one global model to the next",
}
STRIPES = {
    "lemma_1": "Lemma 1",
    "lemma_2": "Lemma 2",
    "theorem_1": "Theorem 1",
    "corollary_1": "Corollary 1",
    "falls_over_round": "L falls",
}


# The bounds as arithmetic


@dataclass(frozen=True)
class Measurement:
    """One client in one round; NaN where a value is not defined.

    The objective L_i is the method's own loss on all of the client's training samples at once.
    """

    num_samples: float
    objective_before: float
    """L_i(ω_t) with the pool that the round began with."""
    objective_after_one_step: float
    """L_i(ω_t - η ∇L_i(ω_t)), same pool: the only step that the theory takes."""
    objective_after_training: float
    """L_i(ω_{t+1}), same pool."""
    gradient_norm: float
    """|∇L_i(ω_t)|"""
    stochastic_gradient_norm: float
    """Mean of |∇L_i(ω_t; ξ)| over the round's batches ξ, all at ω_t."""
    step: float
    """|ω_{t+1} - ω_t|"""
    smoothness: float
    """|∇L_i(ω_{t+1}) - ∇L_i(ω_t)| / |ω_{t+1} - ω_t|, same pool: L_1 is at least this."""
    slope: float
    """|L_i(ω_{t+1}) - L_i(ω_t)| / |ω_{t+1} - ω_t|, same pool: ζ is at least this."""
    embedding_slope: float
    """Largest |z(ω_{t+1}; x) - z(ω_t; x)| / |Δω_e| over samples x: L_2 is at least this."""
    embedding_length: float
    """Mean of |z(ω_{t+1}; x)| over samples; z is what prototypes are made of."""
    objective_after_pool: float = math.nan
    """L_i(ω_{t+1}) with the pool that the next round begins with."""
    objective_after_aggregation: float = math.nan
    """L_i of what the client begins the next round with."""


@dataclass(frozen=True)
class Round:
    """A round, with all that the bounds ask for next to the constants."""

    learning_rate: float
    """η: the round's learning rate, of a single step."""
    pool_factor: float
    """A_p * weight / τ; 0 if the loss sees no prototypes, NaN where Lemma 2 says nothing."""
    gradient_norm: float
    """|∇L(ω_t)|, ∇L = Σ n_i ∇L_i(ω_t) / Σ n_i."""
    clients: Mapping[str, Measurement]

    @property
    def dissimilarity(self) -> float:
        """E_i |∇L_i(ω_t)|² / |∇L(ω_t)|², clients weighted by samples: δ² is at least this."""
        relative = ratio(self.mean.gradient_norm, self.gradient_norm)
        return relative * relative

    @property
    def mean(self) -> Measurement:
        """The clients' mean by samples; of gradients the root of the mean square."""
        clients = list(self.clients.values())
        weights = [each.num_samples for each in clients]

        def average(values: Sequence[float]) -> float:
            total = sum(n * value for n, value in zip(weights, values, strict=True))
            return total / sum(weights)

        names = [each.name for each in fields(Measurement)]
        means = {name: average([getattr(each, name) for each in clients]) for name in names}
        squares = average([each.gradient_norm * each.gradient_norm for each in clients])
        return Measurement(**means | {"gradient_norm": math.sqrt(squares)})


@dataclass(frozen=True)
class Constants:
    """The theory's constants as far as a run has shown them: each true one is at least as large."""

    smoothness: float = 0.0
    """L_1"""
    slope: float = 0.0
    """ζ"""
    dissimilarity: float = 0.0
    """δ²"""
    stochastic_gradient_norm: float = 0.0
    """G"""
    embedding_slope: float = 0.0
    """L_2"""

    def raised(self, measured: Round) -> "Constants":
        """Return the maxima of these and of what a round has shown."""
        largest = {}
        for name in (each.name for each in fields(self)):
            seen = [getattr(each, name, math.nan) for each in measured.clients.values()]
            seen += [measured.dissimilarity] if name == "dissimilarity" else []
            largest[name] = max([getattr(self, name), *filter(math.isfinite, seen)])
        return Constants(**largest)


@dataclass(frozen=True)
class Bounds:
    """What the theory says of one client in one round; NaN where it says nothing."""

    decrease: float
    """(η - L_1 η²/2) δ² |∇L(ω_t)|²: at least so much is training to lower L (Lemma 1)."""
    own_decrease: float
    """(η - L_1 η²/2) |∇L_i(ω_t)|²: so much one plain step lowers L_i, by the descent lemma."""
    increase: float
    """A_p weight L_2 η G |v| / τ: at most so much may the new pool raise L (Lemma 2)."""
    largest_learning_rate: float
    """The right side of Corollary 1's condition; may be negative."""


def find_bounds(measured: Round, client: Measurement, constants: Constants) -> Bounds:
    """Put the values of a client in a round into the paper's formulas."""
    rate, norm = measured.learning_rate, measured.gradient_norm
    factor = rate - constants.smoothness * rate * rate / 2
    # Products, not powers: of a huge float they are infinite, where a power is an error.
    global_square = constants.dissimilarity * norm * norm
    # The paper adds a vector v to a scalar; its length is meant.
    product = constants.embedding_slope * constants.stochastic_gradient_norm
    reach = measured.pool_factor * product * client.embedding_length
    reach = 0.0 if measured.pool_factor == 0 else reach
    limit = math.nan
    if constants.smoothness > 0 and global_square > 0:
        limit = 2 / constants.smoothness * (1 - reach / global_square)
    own = factor * client.gradient_norm * client.gradient_norm
    return Bounds(factor * global_square, own, rate * reach, limit)


def judge(measured: Round, client: Measurement, constants: Constants) -> dict[str, bool | None]:
    """Tell which bounds hold, by the names of BOUNDS; None where one is not defined."""
    bounds = find_bounds(measured, client, constants)
    before, trained = client.objective_before, client.objective_after_training
    one_step, renewed = client.objective_after_one_step, client.objective_after_pool
    at_most = {
        "lemma_1": (trained, before - bounds.decrease),
        "lemma_2": (renewed, trained + bounds.increase),
        "theorem_1": (renewed, before - bounds.decrease + bounds.increase),
        "corollary_1": (measured.learning_rate, bounds.largest_learning_rate),
        "lemma_1_one_step": (one_step, before - bounds.decrease),
        "descent_one_step": (one_step, before - bounds.own_decrease),
    }
    below = {
        "falls_in_training": (trained, before),
        "falls_over_round": (renewed, before),
        "falls_to_average": (client.objective_after_aggregation, before),
    }
    return {
        name: (left < right if name in below else left <= right)
        if math.isfinite(left) and math.isfinite(right)
        else None
        for name, (left, right) in {**at_most, **below}.items()
    }


def ratio(part: float, whole: float) -> float:
    """Return part / whole; 0 / 0 is 0: if nothing moved, nothing was seen."""
    if whole == 0:
        return 0.0 if part == 0 else math.nan
    return part / whole


# Measuring a run


class Measured(Method):
    """Measures each client of another method; only for the engine `loop`."""

    def __init__(self, experiment: Experiment, num_classes: int) -> None:
        super().__init__(experiment, num_classes)
        self._batches: list[Batch] = []
        self._clients: dict[str, dict[str, float | None]] = {}
        self._trained: dict[str, tuple[Tensors, Batch]] = {}
        self._gradients: defaultdict[str, Any] = defaultdict(int)
        self._pool_factor: float | None = 0.0
        self._rate = 0.0

    def prepare(self, broadcast: Any) -> Any:
        """Note the round's learning rate, and the factor of Lemma 2."""
        self._rate, contrast = self.local_training(broadcast.round).lr, self.experiment.contrast
        if isinstance(self, SharesPrototypes):
            # There is no contrast with an empty pool.
            factor = (self.num_classes - 1) * contrast.weight / contrast.temperature
            self._pool_factor = factor if len(broadcast.pool) else None
        return super().prepare(broadcast)

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        """Note the batch: together they are all samples of the client."""
        self._batches.append(batch)
        return super().loss(params, batch, context)

    def finish(
        self, params: Tensors, context: Context, num_steps: int
    ) -> tuple[Tensors | None, Tensors]:
        """Measure the client around its training."""
        if not self._batches:
            # Asked for the shapes of an update only.
            return super().finish(params, context, num_steps)
        batches, self._batches = self._batches, []
        samples = Batch(
            *(torch.cat(parts) for parts in zip(*(each[:3] for each in batches), strict=True))
        )
        # Order changes by round, the sum of all inputs only by rounding.
        name = f"{len(samples.labels)} samples, sum {float(samples.inputs.double().sum()):.8g}"
        trained = {each: value.detach() for each, value in params.items()}
        before, gradient = self._differentiate(context.start, samples, context)
        after, gradient_after = self._differentiate(trained, samples, context)
        one_step = {n: value - self._rate * gradient[n] for n, value in context.start.items()}
        step = distance(trained, context.start)
        found = {
            "num_samples": float(len(samples.labels)),
            "objective_before": before,
            "objective_after_one_step": self._evaluate(one_step, samples, context),
            "objective_after_training": after,
            "gradient_norm": norm(gradient),
            "stochastic_gradient_norm": fmean(
                norm(self._differentiate(context.start, batch, context)[1]) for batch in batches
            ),
            "step": step,
            "smoothness": ratio(distance(gradient_after, gradient), step),
            "slope": ratio(abs(after - before), step),
            **self._compare_embeddings(trained, samples, context),
        }
        if name in self._trained:
            # What this round's pool has done to the model of the last round.
            found["pool_on_last_model"] = self._evaluate(*self._trained[name], context)
        self._clients[name] = {n: v if math.isfinite(v) else None for n, v in found.items()}
        self._trained[name] = trained, samples
        for each, slope in gradient.items():
            self._gradients[each] = self._gradients[each] + len(samples.labels) * slope
        return super().finish(params, context, num_steps)

    def remarks(self, broadcast: Any) -> dict[str, Any]:
        """Add the measurements of the round to its record."""
        total = sum(each["num_samples"] or 0.0 for each in self._clients.values())
        told = {
            "learning_rate": self._rate,
            "pool_factor": self._pool_factor,
            "gradient_norm": norm(self._gradients) / total if total else None,
            "clients": self._clients,
        }
        self._clients, self._gradients = {}, defaultdict(int)
        return {**super().remarks(broadcast), "convergence": told}

    def _differentiate(
        self, params: Tensors, batch: Batch, context: Context
    ) -> tuple[float, Tensors]:
        leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        loss = super().loss(leaves, batch, context)
        slopes = torch.autograd.grad(
            loss, list(leaves.values()), allow_unused=True, materialize_grads=True
        )
        return float(loss.detach()), dict(zip(leaves, slopes, strict=True))

    @torch.no_grad()
    def _evaluate(self, params: Tensors, batch: Batch, context: Context) -> float:
        return float(super().loss(params, batch, context))

    def _compare_embeddings(
        self, trained: Tensors, samples: Batch, context: Context
    ) -> dict[str, float]:
        """Return how far embeddings moved per unit that their parameters did, and their norm."""
        leaves = {name: value.detach().requires_grad_() for name, value in trained.items()}
        first = context.apply(leaves, samples.inputs[:1])[0].sum()
        slopes = torch.autograd.grad(first, list(leaves.values()), allow_unused=True)
        # All but the classifier's.
        names = [name for name, slope in zip(leaves, slopes, strict=True) if slope is not None]
        moved = distance({n: trained[n] for n in names}, context.start)
        with torch.no_grad():
            old, new = (
                prototype_rule(self).project(context.apply(params, samples.inputs)[0])
                for params in (context.start, trained)
            )
        farthest = float((new - old).norm(dim=1).max())
        return {
            "embedding_slope": ratio(farthest, moved),
            "embedding_length": float(new.norm(dim=1).mean()),
        }


class MeasuredMpFedCL(Measured, find_method("mp-fedcl")):  # type: ignore[misc]
    """MP-FedCL, measured."""

    name = "measured-mp-fedcl"


class MeasuredFedAvg(Measured, find_method("fedavg")):  # type: ignore[misc]
    """FedAvg, measured."""

    name = "measured-fedavg"


def norm(tensors: Mapping[str, Tensor]) -> float:
    """Return the norm of all tensors as one vector."""
    squares = [value.square().sum(dtype=torch.float64) for value in tensors.values()]
    return math.sqrt(float(torch.stack(squares).sum())) if squares else 0.0


def distance(left: Tensors, right: Tensors) -> float:
    """Return the norm of the difference, over the names of the first."""
    return norm({name: value - right[name] for name, value in left.items()})


# From records to tables and a figure


def read_rounds(records: Sequence[Record]) -> list[Round]:
    """Return the measured rounds; the last one only completes the one before it."""
    told = [record["remarks"]["convergence"] for record in records]
    rounds = []
    for now, following in pairwise(told):
        clients = {}
        for name, each in now["clients"].items():
            later = following["clients"].get(name, {})
            values = {
                **each,
                "objective_after_pool": later.get("pool_on_last_model"),
                "objective_after_aggregation": later.get("objective_before"),
            }
            values.pop("pool_on_last_model", None)
            clients[name] = Measurement(**{n: to_float(v) for n, v in values.items()})
        factors = (to_float(now["pool_factor"]), to_float(now["gradient_norm"]))
        rounds.append(Round(now["learning_rate"], *factors, clients))
    return rounds


def to_float(value: float | None) -> float:
    """Return a value from JSON; null is NaN."""
    return math.nan if value is None else value


def summarize(rounds: Sequence[Round]) -> dict[str, Any]:
    """Return how often each bound held, how large the constants came out, and mean sizes.

    `final` puts the constants of the whole run into every round.
    """
    constants = Constants()
    running = []
    for measured in rounds:
        constants = constants.raised(measured)
        running += [judge(measured, each, constants) for each in measured.clients.values()]
    pairs = [(measured, each) for measured in rounds for each in measured.clients.values()]
    final = [judge(*pair, constants) for pair in pairs]
    overall = [judge(each, each.mean, constants) for each in rounds]
    bounds = [(client, find_bounds(each, client, constants)) for each, client in pairs]
    limits = [b.largest_learning_rate for _, b in bounds if math.isfinite(b.largest_learning_rate)]
    judged = [(client, b) for client, b in bounds if math.isfinite(b.increase)]
    return {
        "held": {
            name: {
                "so far": count(each[name] for each in running),
                "final": count(each[name] for each in final),
                "mean": count(each[name] for each in overall),
            }
            for name in BOUNDS
        },
        "sizes": {
            "L_1": constants.smoothness,
            "ζ": constants.slope,
            "δ²": constants.dissimilarity,
            "G": constants.stochastic_gradient_norm,
            "L_2": constants.embedding_slope,
            "fall of L in training, measured": _mean(
                c.objective_before - c.objective_after_training for c, _ in bounds
            ),
            "in one plain step, measured": _mean(
                c.objective_before - c.objective_after_one_step for c, _ in bounds
            ),
            "claimed by Lemma 1": _mean(b.decrease for _, b in bounds),
            "rise by the new pool, measured": _mean(
                c.objective_after_pool - c.objective_after_training for c, _ in judged
            ),
            "allowed by Lemma 2": _mean(b.increase for _, b in judged),
            "number of plain steps as long as one training": _mean(
                ratio(c.step, each.learning_rate * c.gradient_norm) for each, c in pairs
            ),
            "largest η by Corollary 1, median": median(limits) if limits else math.nan,
        },
    }


def count(verdicts: Iterable[bool | None]) -> tuple[int, int]:
    """Return how many verdicts hold, and how many there are."""
    known = [verdict for verdict in verdicts if verdict is not None]
    return sum(known), len(known)


def _mean(values: Iterable[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else math.nan


def draw(rounds: Sequence[Round], title: str, path: Path) -> None:
    """Draw the mean objective around each round's training, and below it which bounds held."""
    numbers = numpy.arange(1, len(rounds) + 1)
    stages = ("before", "after_training", "after_pool")
    values = numpy.array([[getattr(r.mean, f"objective_{s}") for s in stages] for r in rounds])
    shares = []
    constants = Constants()
    for measured in rounds:
        constants = constants.raised(measured)
        held = [judge(measured, each, constants) for each in measured.clients.values()]
        counts = [count(each[name] for each in held) for name in STRIPES]
        shares.append([good / known if known else math.nan for good, known in counts])
    layout: dict[str, Any] = {"figsize": (7.2, 5.6), "sharex": True, "height_ratios": [3, 1.3]}
    with figure_file(path, 2, 1, **layout) as (figure, (upper, lower)):
        places = numbers[:, None] + numpy.array([-0.35, 0.0, 0.35])
        upper.plot(places.flatten(), values.flatten(), color="#bbbbbb", lw=0.8)
        for index, stage in enumerate(stages):
            look = {"color": COLORS[index], "marker": "osv"[index], "ms": 2, "lw": 0}
            label = {"before": "before training", "after_pool": "after the new pool"}.get(stage)
            label = label or "after training"
            upper.plot(places[:, index], values[:, index], label=label, **look)
        upper.set(ylabel="objective, mean over clients", title=title)
        upper.set_ylim(bottom=0)
        # Hatched where a bound is not defined: nothing is painted over it.
        lower.patch.set(facecolor="white", edgecolor="#cccccc", hatch="////")
        lower.grid(visible=False)
        extent = (0.5, len(rounds) + 0.5, len(STRIPES) - 0.5, -0.5)
        image = lower.imshow(
            numpy.array(shares).T, aspect="auto", extent=extent, cmap="YlGnBu", vmin=0, vmax=1
        )
        lower.set_yticks(range(len(STRIPES)), list(STRIPES.values()))
        lower.set(xlabel="round")
        lower.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.colorbar(image, ax=lower, label="holds for", ticks=[0, 1], format="{x:.0%}")
        figure.legend(loc="outside lower center", ncols=3)


def main(runs: Runs) -> None:
    """Run MP-FedCL and FedAvg in three settings, print the tables and draw the figure."""
    seeds = (0,) if runs.quick else (0, 1, 2)
    plain: dict[str, Any] = {"train__batch_size": 100_000, "train__momentum": 0.0}
    office: dict[str, Any] = {"dataset__name": "office10", "partition__kind": "feature"}
    settings: dict[str, dict[str, Any]] = {"mnist-sample": {}, "one plain step": plain}
    settings |= {"office10": office} if "office10" in Sets().titles else {}
    columns: dict[str, list[dict[str, Any]]] = {}
    for place, changes in settings.items():
        for method in ("MeasuredMpFedCL", "MeasuredFedAvg"):
            base = Experiment(method=f"reproduction.convergence:{method}", engine="loop", workers=1)
            base = base.replace(rounds=61, evaluate_every=61, personal_models=False, **changes)
            rounds = [read_rounds(each) for each in runs.by_seed(base, seeds)]
            columns[f"{place}, {method.removeprefix('Measured')}"] = [*map(summarize, rounds)]
            if len(columns) == 1:
                path = (
                    runs.folder / "convergence.png"
                    if runs.quick
                    else DOCS / "images/convergence.png"
                )
                draw(rounds[0], "MP-FedCL on mnist-sample, local objectives", path)

    def share(found: Sequence[Mapping[str, Any]], name: str, kind: str) -> str:
        held, known = (
            sum(part) for part in zip(*(r["held"][name][kind] for r in found), strict=True)
        )
        return f"{100 * held / known:.0f}" if known else "-"

    kinds = ("final", "so far", "mean")
    print("Share of client-rounds in %: final constants / constants so far / mean over clients\n")
    rows = [
        [words, *(" / ".join(share(each, name, k) for k in kinds) for each in columns.values())]
        for name, words in BOUNDS.items()
    ]
    print(markdown(["", *columns], rows))
    sizes = [
        [name, *(f"{fmean(run['sizes'][name] for run in each):.3g}" for each in columns.values())]
        for name in next(iter(columns.values()))[0]["sizes"]
    ]
    print(markdown(["", *columns], sizes))
