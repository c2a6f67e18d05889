"""Audits of the mechanisms as runs use them: 2,000 releases with one unit and 2,000 without it.

The attacker knows everything but whether one image, or one client, takes part, and asks the best
question there is: how far the release lies along what that unit adds. By Clopper and Pearson, what
it achieves is a lower bound of epsilon, which must not exceed the claim. With a third of the noise
the same audit must find the fault. One bound holds for any mechanism, but 2,000 runs cannot show
more than some 2 with it; the other takes the noise for Gaussian, as it is claimed to be.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import beta, norm
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.data.loading import load_federated_data
from mpfedcl.gaussian import mechanism
from mpfedcl.gaussian.mechanism import gaussian_epsilon
from mpfedcl.methods import find_method
from mpfedcl.methods.messages import Update
from mpfedcl.models import Mlp
from mpfedcl.privacy import private_rounds
from mpfedcl.privacy.private_rounds import PrivateRounds
from mpfedcl.privacy.secure_aggregation import layout
from mpfedcl.privacy.secure_aggregation.layout import SumLayout, fix_noise
from mpfedcl.rounds.loop import RoundLoop
from mpfedcl.rounds.processors.clip import PrivateStatistics
from small_experiments import assemble_federation, small

pytestmark = pytest.mark.thorough

RUNS, EPSILON, DELTA = 2000, 2.0, 1e-5
_CHOOSING = 500
"""Runs on which the best threshold is chosen; it is judged on the others."""
_CONFIDENCE = 0.9999
"""So high that a correct mechanism fails once in a thousand runs of this file."""
HONEST = 2
Release = Callable[[], Tensors]

ONE_SHOT = {"privacy__dimensions": 3, "privacy__moments": True}
CASES = [
    *((source, unit) for source in ("central", "local", "distributed") for unit in ("record",)),
    *((source, "client") for source in ("central", "local", "distributed")),
    ("central rounds", "client"),
    ("distributed rounds", "client"),
]


def federation(root: Path, case: tuple[str, str], *, drops_image: bool = False) -> RoundLoop:
    """Return a federation of three clients; the first may lack its last image."""
    source, unit = case
    trains = source.endswith("rounds")
    changes: dict[str, Any] = {"privacy__clip": 0.01} if trains else dict(ONE_SHOT)
    if source.startswith("distributed"):
        changes |= {"secure_aggregation": True, "secure__honest_clients": HONEST}
    experiment = small(
        root,
        "fedavg" if trains else "fedlda",
        rounds=1,
        dtype="float64",
        privacy__epsilon=EPSILON,
        privacy__delta=DELTA,
        privacy__unit=unit,
        privacy__model="local" if source == "local" else "central",
        **changes,
    )
    experiment = fix_noise(experiment.resolved(find_method(experiment.method).defaults))
    data = load_federated_data(experiment)
    if drops_image:
        first, *others = data.clients
        first = replace(first, inputs=first.inputs[:-1], labels=first.labels[:-1])
        data = replace(data, clients=(first, *others))
    return assemble_federation(experiment, data, Mlp((data.input_size, 8, 4), data.num_classes))


def updates_of(loop: RoundLoop) -> list[Update]:
    names = sorted(loop.engine.sizes)
    found = loop.engine.train(loop.broadcast(), names, keep=[])
    return [each.written_out() for each in found if isinstance(each, Update)]


def zeros(update: Update) -> Update:
    """Return the update of a client without images."""
    return replace(update, summed={name: torch.zeros_like(v) for name, v in update.summed.items()})


def prepare(root: Path, case: tuple[str, str]) -> tuple[Release, Release]:
    """Return what makes one release with the unit, and what makes one without it."""
    source, unit = case
    loop = federation(root, case)
    if source == "central rounds":
        return _rounds(loop, updates_of(loop)), _rounds(loop, updates_of(loop)[1:])
    bare = federation(root, ("distributed rounds" if "rounds" in source else "central", unit))
    others = updates_of(loop if "rounds" in source or unit == "client" else bare)
    if source == "distributed rounds":
        start = {name: each.clone() for name, each in loop.state.server.params.items()}
        still = replace(others[0], averaged=start)
        return _sums(loop, others[0], others[1]), _sums(loop, still, others[1])
    if unit == "client":
        # Sums before a client's part in the privacy of its statistics.
        others = updates_of(federation(root, ("central", "record")))
        missing = zeros(others[0])
    else:
        missing = updates_of(federation(root, ("central", "record"), drops_image=True))[0]
    bound = PrivateStatistics.of(loop._assembly.experiment)
    assert bound is not None
    if source == "local":
        return (
            lambda: dict(bound.outgoing(others[0], loop.broadcast()).summed),
            lambda: dict(bound.outgoing(missing, loop.broadcast()).summed),
        )
    present, absent, other = (
        bound.outgoing(each, loop.broadcast()) for each in (others[0], missing, others[1])
    )
    if source == "distributed":
        return _sums(loop, present, other), _sums(loop, absent, other)
    fewer = federation(root, case, drops_image=unit == "record")
    return _central(loop, [present, other]), _central(fewer, [absent, other])


def _central(loop: RoundLoop, updates: list[Update]) -> Release:
    """Return the release of a one-shot method by a trusted server."""
    collector = _collect(loop, updates)
    private = PrivateRounds(loop._assembly.method, 3, 4)
    return lambda: private._noisy_sums(loop._assembly.method, collector)  # type: ignore[arg-type]


def _rounds(loop: RoundLoop, updates: list[Update]) -> Release:
    """Return the release of a round by a trusted server: what it adds to the model."""
    collector, start = _collect(loop, updates), dict(loop.state.server.params)
    private = PrivateRounds(loop._assembly.method, 3, 4)
    private.begin()
    assert private.ledger is not None
    ledger = private.ledger
    return lambda: private._noisy_means(start, collector, ledger)


def _collect(loop: RoundLoop, updates: list[Update]) -> Any:
    collector = loop._make_collector(loop.broadcast(), [each.client for each in updates])
    for update in updates:
        collector.add(update)
    collector.settle()
    assert len(collector.accepted) == len(updates)
    return collector


def _sums(loop: RoundLoop, *updates: Update) -> Release:
    """Return the opened sum of two honest clients; the server takes away those of the others."""
    sums = SumLayout(loop._assembly)
    assert len(updates) == HONEST

    def release() -> Tensors:
        total = numpy.zeros(sums.size, dtype=numpy.uint64)
        for update in updates:
            total += sums.encode(update, 3)
        opened = sums.total(total, [each.client for each in updates], 0)
        return {**opened.summed, **opened.averaged}

    return release


# The attack


def _vector(release: Mapping[str, Tensor], scale: Mapping[str, float]) -> NDArray[Any]:
    parts = [(release[name].double() * scale[name]).flatten() for name in scale]
    return torch.cat(parts).numpy()


def scores(root: Path, case: tuple[str, str], share: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the attacker's scores with the unit and without it, at a share of the noise."""
    exact, drawn = mechanism.add_exact_noise, mechanism.draw_noise

    def weaken(patch: pytest.MonkeyPatch, factor: float) -> None:
        patch.setattr(
            mechanism,
            "add_exact_noise",
            lambda v, sigma: exact(v, sigma * factor) if factor else v.double(),
        )
        for module in (mechanism, private_rounds, layout):
            patch.setattr(module, "draw_noise", lambda sigma, shape: drawn(sigma * factor, shape))

    with pytest.MonkeyPatch.context() as patch:
        weaken(patch, 0.0)
        releases = prepare(root, case)
        present, absent = (release() for release in releases)
        # In second moments one number stands for two; noise off the diagonal is sqrt(2) as large.
        scale = dict.fromkeys((n for n in present if n not in ("noises", "moment")), 1.0)
        if "moment" in present:
            size = present["sums"].shape[1]
            weights = mechanism._weights(size) / 2
            for each in (present, absent):
                each["moment"] = each["moment"].double() * weights
            scale["moment"] = 1.0
        direction = _vector(present, scale) - _vector(absent, scale)
    found = []
    for release in releases:
        with pytest.MonkeyPatch.context() as patch:
            weaken(patch, share)
            rows = []
            for _ in range(RUNS):
                made = dict(release())
                if "moment" in made:
                    made["moment"] = made["moment"].double() * weights
                rows.append(float(_vector(made, scale) @ direction))
        found.append(numpy.array(rows))
    return found[0], found[1]


def bounds(present: NDArray[Any], absent: NDArray[Any]) -> tuple[float, float]:
    """Return two lower bounds of epsilon: for any mechanism, and for one with Gaussian noise."""

    def rates(threshold: float, rows: slice) -> tuple[float, float]:
        """Return the least rate of hits and the largest of false alarms."""
        hits, alarms = (int((each[rows] > threshold).sum()) for each in (present, absent))
        count, tail = len(present[rows]), (1 - _CONFIDENCE) / 2
        least = float(beta.ppf(tail, hits, count - hits + 1)) if hits else 0.0
        most = float(beta.ppf(1 - tail, alarms + 1, count - alarms)) if alarms < count else 1.0
        return least, most

    def ratio(threshold: float, rows: slice) -> float:
        least, most = rates(threshold, rows)
        return math.log(max(least - DELTA, 1e-12) / most)

    chosen, judged = slice(0, _CHOOSING), slice(_CHOOSING, RUNS)
    thresholds = numpy.quantile(absent[chosen], [0.9, 0.95, 0.97, 0.98, 0.99, 0.995])
    best = max(thresholds, key=lambda each: ratio(each, chosen))
    # Two Gaussians that are `shift` standard deviations apart are best told apart in the middle.
    middle = float(numpy.median(numpy.concatenate([present, absent])))
    least, most = rates(middle, slice(None))
    shift = float(norm.isf(most) - norm.isf(least))
    return ratio(best, judged), gaussian_epsilon(1 / shift, DELTA) if shift > 0 else 0.0


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_no_attack_exceeds_the_claimed_epsilon(images: Path, case: tuple[str, str]) -> None:
    plain, gaussian = bounds(*scores(images, case, 1.0))
    print(f"{' '.join(case)}: epsilon at least {plain:.2f}, {gaussian:.2f} if Gaussian")
    assert plain <= EPSILON
    # Not vacuous either: the unit that is missing here is the worst there is.
    assert 0.1 * EPSILON < gaussian <= EPSILON


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_audit_detects_a_third_of_the_noise(images: Path, case: tuple[str, str]) -> None:
    plain, gaussian = bounds(*scores(images, case, 1 / 3))
    print(f"{' '.join(case)}: epsilon at least {plain:.2f}, {gaussian:.2f} if Gaussian")
    assert gaussian > 2 * EPSILON
