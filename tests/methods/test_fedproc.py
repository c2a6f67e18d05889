"""FedProc: its loss by plain loops, its schedule, and the prototypes that the server keeps."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy
import pytest
import torch
from identities import (
    after_rounds,
    assert_same_model,
    begin,
    both_engines,
    differ,
    server_of,
    slopes_of,
)
from tiny_method_inputs import (
    DIMENSION,
    NUM_CLASSES,
    apply,
    draw,
    make_batch,
    make_context,
    make_method,
    make_params,
    make_pool,
)

from mpfedcl import resume, run
from mpfedcl.methods import Method
from mpfedcl.methods._prototypes import CLASS_MEANS, update_class_means
from mpfedcl.methods.fedproc import FedProc
from mpfedcl.methods.messages import Broadcast
from mpfedcl.prototypes import PrototypePool, Prototypes
from mpfedcl.studies.tuning import Search
from small_experiments import assert_same_results, build_federation, small


class ContrastAlone(FedProc):
    """FedProc that never comes to the classifier."""

    def alpha(self, round_number: int) -> float:
        return 1.0


def broadcast_with(method: Method, round_number: int) -> Broadcast:
    """Return a broadcast in which class 3 has no prototype yet."""
    kept = update_class_means(
        {}, {name: make_pool(method).of(name) for name in ("a", "b")}, NUM_CLASSES
    )
    unit = {CLASS_MEANS: torch.nn.functional.normalize(kept[CLASS_MEANS], dim=1)}
    empty = PrototypePool.empty(NUM_CLASSES, DIMENSION, 1, dtype=torch.float64)
    return Broadcast(round_number, make_params(5), unit, empty)


@pytest.mark.parametrize(("number", "alpha"), [(1, 1.0), (4, 0.7), (10, 0.1), (11, 0.0), (25, 0.0)])
def test_loss_matches_a_loop_over_samples(number: int, alpha: float) -> None:
    method = make_method("fedproc", rounds=10, fedproc__temperature=0.4)
    broadcast, params = broadcast_with(method, number), make_params(3)
    batch = make_batch((0, 1, 2, 3, 1))
    means = {c: broadcast.extra[CLASS_MEANS][c].tolist() for c in range(3)}
    embeddings, logits = apply(params, batch.inputs)
    contrasts, entropies = [], []
    for z, scores, label in zip(embeddings.tolist(), logits.tolist(), batch.labels, strict=True):
        unit = [each / math.hypot(*z) for each in z]
        powers = {c: math.exp(numpy.dot(unit, g) / 0.4) for c, g in means.items()}
        if int(label) in means:
            contrasts.append(-math.log(powers[int(label)] / sum(powers.values())))
        entropies.append(math.log(sum(map(math.exp, scores))) - scores[label])
    assert len(contrasts) == 4
    wanted = alpha * numpy.mean(contrasts) + (1 - alpha) * numpy.mean(entropies)
    found = method.loss(params, batch, make_context(method, broadcast))
    assert float(found) == pytest.approx(wanted, rel=1e-12)


@both_engines
def test_rounds_without_contrast_equal_fedavg(images: Path, engine: str) -> None:
    # The first has no prototypes yet, and from the second on the schedule is over.
    found = after_rounds(images, "fedproc", engine=engine, fedproc__rounds=1)
    assert_same_model(found, after_rounds(images, "fedavg", engine=engine), engine)


@both_engines
def test_first_round_equals_fedavg_and_the_second_differs(images: Path, engine: str) -> None:
    found, wanted = (begin(images, each, engine=engine) for each in ("fedproc", "fedavg"))
    for federation in (found, wanted):
        federation.run_round(evaluate=False)
    assert_same_model(found, wanted, engine)
    for federation in (found, wanted):
        federation.run_round(evaluate=False)
    assert differ(server_of(found), server_of(wanted))


@both_engines
def test_contrast_only_does_not_move_the_classifier(images: Path, engine: str) -> None:
    experiment = small(images, "fedproc", dtype="float64", engine=engine, rounds=3)
    federation = build_federation(experiment, method_class=ContrastAlone)
    federation.run_round(evaluate=False)
    before = dict(server_of(federation))
    for _ in range(2):
        federation.run_round(evaluate=False)
    after = server_of(federation)
    moved = {name for name, value in after.items() if not torch.allclose(value, before[name])}
    assert moved == {name for name in after if not name.startswith("classifier")}


def test_gradient_of_the_contrast_excludes_the_classifier() -> None:
    method = ContrastAlone(make_method("fedproc").experiment, NUM_CLASSES)
    context = make_context(method, broadcast_with(method, 3))
    _, slopes = slopes_of(method, make_params(3), make_batch(), context)
    assert not slopes["c"].any()
    assert slopes["w"].any()


def prototypes(means: Mapping[int, tuple[list[float], int]]) -> Prototypes:
    vectors = torch.tensor([vector for vector, _ in means.values()]).double()
    counts = torch.tensor([count for _, count in means.values()])
    return Prototypes(vectors, torch.tensor(list(means)), counts)


def test_class_means_are_sample_weighted_and_old_ones_are_kept() -> None:
    first = {
        "a": prototypes({0: ([1.0, 0.0], 1), 1: ([0.0, 2.0], 5)}),
        "b": prototypes({0: ([0.0, 1.0], 3)}),
    }
    kept = update_class_means({}, first, 3)
    assert kept[CLASS_MEANS].tolist() == [[0.25, 0.75], [0.0, 2.0], [0.0, 0.0]]
    # Only b answers: class 0 is made of b alone, class 1 keeps what a sent, class 2 is new.
    second = {"b": prototypes({0: ([0.5, 0.5], 3), 2: ([7.0, 7.0], 1)})}
    kept = update_class_means(kept, second, 3)
    assert kept[CLASS_MEANS].tolist() == [[0.5, 0.5], [0.0, 2.0], [7.0, 7.0]]
    none = {"a": Prototypes.empty(2, torch.float64)}
    assert update_class_means(kept, none, 3) is kept
    assert update_class_means({}, none, 3) == {}


def test_class_means_of_the_server_have_norm_1(images: Path) -> None:
    federation = after_rounds(images, "fedproc", 2)
    (means,) = federation.state.server.extra.values()
    torch.testing.assert_close(means.norm(dim=1), torch.ones(3, dtype=torch.float64))
    centres = federation.pool.class_centers()
    wanted = centres.vectors / centres.vectors.norm(dim=1, keepdim=True)
    torch.testing.assert_close(means, wanted, rtol=0, atol=1e-12)


def test_broadcast_has_a_model_and_one_vector_per_class(images: Path) -> None:
    federation = begin(images, "fedproc", clients=2)
    first, second = (federation.run_round(evaluate=False).bytes["down"] for _ in range(2))
    model = sum(8 * value.numel() for value in server_of(federation).values())
    assert (first, second) == (2 * model, 2 * (model + 3 * 4 * 8))


@pytest.mark.whole
def test_resumed_run_with_more_rounds_keeps_its_schedule(images: Path, tmp_path: Path) -> None:
    plan = small(images, "fedproc", rounds=2)
    first = run(plan, tmp_path / "more")
    assert first.experiment.setting("fedproc__rounds") == 2
    resume(tmp_path / "more", rounds=4)
    run(plan.replace(rounds=4, fedproc__rounds=2), tmp_path / "whole")
    assert_same_results(tmp_path / "more", tmp_path / "whole")


def test_short_trials_use_the_schedule_of_the_full_run(images: Path, tmp_path: Path) -> None:
    search = Search.prepare(small(images, rounds=16), "fedproc", tmp_path / "search", 4)
    assert [rung.rounds for rung in search.rungs] == [4, 8, 16]
    short = search.planned_run(0, 0, 4).experiment
    assert (short.rounds, short.setting("fedproc__rounds")) == (4, 16)


def test_zero_embeddings_have_a_finite_gradient() -> None:
    method = make_method("fedproc", rounds=10)
    params = {"w": torch.zeros(5, DIMENSION).double(), "c": draw(1, DIMENSION, NUM_CLASSES)}
    context = make_context(method, broadcast_with(method, 2))
    loss, slopes = slopes_of(method, params, make_batch(), context)
    assert loss.isfinite()
    assert all(value.isfinite().all() for value in slopes.values())
