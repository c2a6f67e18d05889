"""Predictors against loops in plain Python, for one client and for many at once."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from mpfedcl.methods import PREDICTORS, TESTS, PredictorKind, PredictorName, Test
from mpfedcl.prototypes import PrototypePool, Prototypes
from mpfedcl.rounds import scoring as predictions_module
from mpfedcl.rounds.evaluation import AccuracyTable
from mpfedcl.rounds.metrics import BinSums, add_bins, count_bins, percent_correct
from mpfedcl.rounds.scoring import (
    ClientTests,
    Column,
    Evaluator,
    GlobalScorer,
    PersonalScorer,
    Predictions,
    as_stack,
    estimate_prior,
    estimate_priors,
    log_prior,
)

NUM_CLASSES = 4
COUNTS = torch.tensor([7, 0, 2, 0])
OWN = torch.tensor([1, 3, 4, 8, 9, 13])


def predictions(seed: int, *, with_prototypes: bool = True) -> Predictions:
    """Return possible predictions of a model for 16 images."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(16, NUM_CLASSES, generator=generator)
    if not with_prototypes:
        return Predictions(scores.argmax(1), None, scores)
    similarities = torch.randn(16, NUM_CLASSES, generator=generator)
    # No client has a prototype of this class.
    similarities[:, 1] = -torch.inf
    return Predictions(scores.argmax(1), similarities.argmax(1), scores, similarities)


def evaluate(
    personal: Predictions | None, averaged: Predictions | None, own: Tensor = OWN
) -> tuple[AccuracyTable, dict[PredictorName, Tensor]]:
    """Return the accuracies of one of three clients, and its predictions on its local test set."""
    others = [torch.arange(5), torch.tensor([2])]
    tests = ClientTests.of(labels(), torch.stack([COUNTS] * 3), [own, *others])
    table: AccuracyTable = {test: dict.fromkeys(PREDICTORS) for test in TESTS}
    predicted: dict[PredictorName, Tensor | None] = {}
    for predictor in PREDICTORS:
        if predictor.startswith("global") and averaged is not None:
            scorer = GlobalScorer(tests, averaged, torch.zeros(0, dtype=torch.long))
            for test in TESTS:
                table[test][predictor] = scorer.column(test, predictor)[0]
            predicted[predictor] = scorer.predict(predictor, 0)
        elif predictor.startswith("personal") and personal is not None:
            alone = PersonalScorer(tests, 0, personal, is_whole=True)
            for test in TESTS:
                table[test][predictor] = alone.percent(test, predictor)
            predicted[predictor] = alone.predict("local_test", predictor)
    return table, {predictor: each for predictor, each in predicted.items() if each is not None}


def labels() -> Tensor:
    return torch.randint(NUM_CLASSES, (16,), generator=torch.Generator().manual_seed(9))


def count_right(scores: Tensor, images: Sequence[int], prior: Sequence[float]) -> float:
    """Return the percentage of correct predictions, image by image; no scores are equal."""
    truth, right = labels().tolist(), 0
    for image in images:
        row = [float(score) + added for score, added in zip(scores[image], prior, strict=True)]
        right += row.index(max(row)) == truth[image]
    return 100 * right / len(images)


def find_prior_slowly(scores: Tensor) -> list[float]:
    """Return the same fixed point from the formula of EM in many plain steps."""
    rows = [[math.exp(float(score)) for score in row] for row in scores]
    shares = [1 / NUM_CLASSES] * NUM_CLASSES
    for _ in range(1000):
        expected = [0.1] * NUM_CLASSES
        for row in rows:
            joint = [likely * share for likely, share in zip(row, shares, strict=True)]
            for place, each in enumerate(joint):
                expected[place] += each / sum(joint)
        shares = [each / sum(expected) for each in expected]
    return [math.log(share) for share in shares]


def test_every_predictor_equals_a_loop() -> None:
    personal, averaged = predictions(1), predictions(2)
    table, predicted = evaluate(personal, averaged)
    assert personal.similarities is not None
    assert averaged.similarities is not None
    none = [0.0] * NUM_CLASSES
    prior = [math.log((count + 0.1) / (9 + 0.4)) for count in COUNTS.tolist()]
    scores = {
        "personal_classifier": (personal.scores, none),
        "personal_prototype": (personal.similarities, none),
        "global_classifier": (averaged.scores, none),
        "global_prototype": (averaged.similarities, none),
        "personal_classifier_prior": (personal.scores, prior),
        "personal_prototype_prior": (personal.similarities, prior),
        "global_classifier_prior": (averaged.scores, prior),
        "global_prototype_prior": (averaged.similarities, prior),
    }
    images = {"local_test": OWN.tolist(), "global_test": list(range(16))}
    for test, chosen in images.items():
        for predictor, (each, added) in scores.items():
            assert table[test][predictor] == pytest.approx(count_right(each, chosen, added)), (
                predictor
            )
    found = find_prior_slowly(averaged.scores[OWN])
    estimated = count_right(averaged.scores, images["local_test"], found)
    assert table["local_test"]["global_classifier_estimated"] == pytest.approx(estimated)
    # The estimate is made from a client's local test set, so it has no global accuracy.
    assert table["global_test"]["global_classifier_estimated"] is None
    assert {*predicted} == {*PREDICTORS} == {*table["local_test"]} == {*table["global_test"]}
    assert all(len(each) == len(OWN) for each in predicted.values())


def test_missing_models_have_no_accuracy() -> None:
    nothing, predicted = evaluate(None, None)
    assert nothing == {test: dict.fromkeys(PREDICTORS) for test in ("local_test", "global_test")}
    assert predicted == {}
    table, _ = evaluate(predictions(1, with_prototypes=False), None)
    for test in ("local_test", "global_test"):
        known = {predictor for predictor, value in table[test].items() if value is not None}
        assert known == {"personal_classifier", "personal_classifier_prior"}
    table, predicted = evaluate(None, predictions(2, with_prototypes=False))
    known = {predictor for predictor, value in table["local_test"].items() if value is not None}
    classifier = {"global_classifier", "global_classifier_prior"}
    assert known == {*predicted} == {*classifier, "global_classifier_estimated"}
    assert {r for r, value in table["global_test"].items() if value is not None} == classifier


def test_client_without_test_images_has_no_local_accuracy() -> None:
    nothing = torch.tensor([], dtype=torch.long)
    table, _ = evaluate(predictions(1), predictions(2), nothing)
    assert table["local_test"] == dict.fromkeys(PREDICTORS)
    assert table["global_test"]["personal_classifier"] is not None


def test_priors_on_the_global_test_set_are_limited_by_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    personal, averaged = predictions(1), predictions(2)
    whole, _ = evaluate(personal, averaged)
    # Three clients, 16 images, four classes: as many scores are just allowed.
    monkeypatch.setattr(predictions_module, "_MOST_PRIOR_SCORES", 3 * 16 * 4)
    assert evaluate(personal, averaged)[0] == whole
    monkeypatch.setattr(predictions_module, "_MOST_PRIOR_SCORES", 3 * 16 * 4 - 1)
    cut, _ = evaluate(personal, averaged)
    # No personal model is listed as evaluated; a personal model costs no more with a prior.
    left_out = {
        predictor: None
        for predictor in PREDICTORS
        if predictor.endswith("prior") and predictor.startswith("global")
    }
    assert cut == {
        "local_test": whole["local_test"],
        "global_test": whole["global_test"] | left_out,
    }


def test_closeness_prefers_the_nearest_prototype_whatever_its_norm() -> None:
    generator = torch.manual_seed(5)
    vectors = 3 * torch.randn(5, 3, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 0, 2, 2, 3])
    rows = Prototypes(vectors, labels, torch.ones(5, dtype=torch.long))
    pool = PrototypePool.gather({"a": rows}, num_classes=NUM_CLASSES, num_prototypes=2)
    inputs = 3 * torch.randn(20, 3, generator=generator, dtype=torch.float64)
    evaluator = Evaluator(
        inputs, torch.zeros(20).long(), lambda z: z, pool, 0.5, keeps_projected=True
    )
    logits = torch.zeros(20, NUM_CLASSES)
    (predicted,) = evaluator.predict(lambda z: as_stack((z, logits)))
    found = predicted.probabilities(PredictorKind("personal", "prototype"), None)
    assert found is not None
    assert predicted.prototype is not None
    assert torch.equal(found.argmax(1), predicted.prototype)
    wanted = (-pool.distances_by_class(inputs).square() / (2 * 0.5)).softmax(1)
    torch.testing.assert_close(found, wanted)


def test_similarities_are_the_nearest_prototype_of_each_class() -> None:
    vectors = normalize(torch.randn(5, 3, generator=torch.manual_seed(3)), dim=1)
    rows = Prototypes(vectors, torch.tensor([0, 0, 2, 2, 3]), torch.ones(5, dtype=torch.long))
    pool = PrototypePool.gather({"a": rows}, num_classes=NUM_CLASSES, num_prototypes=2)
    inputs = normalize(torch.randn(6, 3, generator=torch.manual_seed(4)), dim=1)
    labels = torch.zeros(6, dtype=torch.long)
    evaluator = Evaluator(inputs, labels, lambda z: z, pool, 0.5, keeps_similarities=True)
    logits = torch.zeros(6, NUM_CLASSES)
    (predicted,) = evaluator.predict(lambda z: as_stack((z, logits)))
    assert predicted.similarities is not None
    assert predicted.prototype is not None
    for image, row in enumerate(predicted.similarities.tolist()):
        for label, similarity in enumerate(row):
            products = [
                sum(a * b for a, b in zip(inputs[image].tolist(), vector.tolist(), strict=True))
                for vector, of in zip(vectors, [0, 0, 2, 2, 3], strict=True)
                if of == label
            ]
            wanted = max(products) / 0.5 if products else -math.inf
            assert similarity == pytest.approx(wanted, abs=1e-5)
        # Among prototypes of equal norm, the nearest one is the most similar.
        assert row.index(max(row)) == predicted.prototype[image]


def test_prior_of_counts_matches_a_hand_computation() -> None:
    found = log_prior(torch.tensor([[3, 0, 1], [0, 0, 0]]))
    wanted = [[3.1 / 4.3, 0.1 / 4.3, 1.1 / 4.3], [1 / 3, 1 / 3, 1 / 3]]
    torch.testing.assert_close(found.exp(), torch.tensor(wanted, dtype=torch.float64))


@pytest.mark.parametrize("prior", [(0.7, 0.25, 0.05), (0.1, 0.1, 0.8), (1 / 3, 1 / 3, 1 / 3)])
def test_prior_is_estimated_without_labels(prior: tuple[float, ...]) -> None:
    generator = torch.Generator().manual_seed(5)
    means = torch.tensor([[1.2, 0.0], [-0.6, 1.0], [-0.6, -1.0]], dtype=torch.float64)
    shares = torch.tensor(prior, dtype=torch.float64)
    truth = torch.multinomial(shares, 6000, replacement=True, generator=generator)
    points = means[truth] + torch.randn(6000, 2, generator=generator, dtype=torch.float64)
    # Log-likelihoods of the classes plus an arbitrary offset per sample.
    distances = (points.unsqueeze(1) - means).square().sum(2)
    scores = -distances / 2 + torch.randn(6000, 1, generator=generator)
    found = estimate_prior(scores).exp()
    assert float(found.sum()) == pytest.approx(1)
    torch.testing.assert_close(found, shares, atol=0.03, rtol=0)
    # The prior increases the accuracy unless all classes are equally frequent.
    right = (scores + found.log()).argmax(1) == truth
    assert right.sum() >= (scores.argmax(1) == truth).sum() - 10


def test_estimated_priors_of_several_clients_are_independent() -> None:
    averaged = predictions(2)
    own = {"a": OWN, "b": torch.tensor([0]), "c": torch.tensor([2, 5, 6, 7]), "d": OWN[:0]}
    owners = torch.arange(4).repeat_interleave(torch.tensor([len(each) for each in own.values()]))
    found = estimate_priors(averaged.scores[torch.cat(list(own.values()))], owners, 4)
    for prior, images in zip(found, own.values(), strict=True):
        alone = estimate_prior(averaged.scores[images])
        # Iteration ends when the steps of all clients are small.
        torch.testing.assert_close(prior.exp(), alone.exp(), atol=1e-3, rtol=0)


def test_prior_of_impossible_classes_is_finite() -> None:
    scores = torch.tensor([[0.0, -1e30, 2.0], [1.0, -1e30, 0.0]])
    found = estimate_prior(scores).exp()
    assert bool(found.isfinite().all())
    assert float(found[1]) == pytest.approx(0.1 / 2.3)


AVERAGED = [each for each in PREDICTORS if each.startswith("global")]
PERSONAL = [each for each in PREDICTORS if each.startswith("personal")]


class Loop:
    """Reference implementation: client by client and predictor by predictor."""

    def __init__(self, labels: Tensor, counts: Tensor, own: list[Tensor]) -> None:
        self.labels, self.counts, self.own = labels, counts, own

    def predict(
        self, predicted: Predictions, client: int, images: Tensor, predictor: PredictorName
    ) -> Tensor | None:
        """Return the classes predicted for some images with one client's prior."""
        scores = predicted.similarities if "prototype" in predictor else predicted.scores
        if predictor.endswith("_prior"):
            prior = log_prior(self.counts[client])
            return None if scores is None else (scores[images] + prior.to(scores)).argmax(dim=1)
        if predictor.endswith("_estimated"):
            # All clients at once, since their steps end together.
            sizes = torch.tensor([len(each) for each in self.own])
            owners = torch.arange(len(sizes)).repeat_interleave(sizes)
            found = estimate_priors(predicted.scores[torch.cat(self.own)], owners, len(sizes))
            return (predicted.scores[images] + found[client].to(predicted.scores)).argmax(dim=1)
        answer = predicted.prototype if "prototype" in predictor else predicted.classifier
        return None if answer is None else answer[images]

    def column(self, predicted: Predictions, test: Test, predictor: PredictorName) -> Column:
        """Return the accuracy of one predictor for each client."""
        found: Column = []
        for client, own in enumerate(self.own):
            images = own if test == "local_test" else torch.arange(len(self.labels))
            answer = self.predict(predicted, client, images, predictor)
            if answer is None or (test == "global_test" and predictor.endswith("_estimated")):
                found.append(None)
            else:
                found.append(percent_correct(answer == self.labels[images]))
        return found

    def bins(self, predicted: Predictions, test: Test, predictor: PredictorName) -> BinSums:
        """Return the calibration bins of all clients."""
        parts = []
        for client, own in enumerate(self.own):
            images = own if test == "local_test" else torch.arange(len(self.labels))
            scores = predicted.scores[images]
            if predictor.endswith("_prior"):
                scores = scores.double() + log_prior(self.counts[client])
            parts.append(count_bins(scores, self.labels[images]))
        return add_bins(parts)


@st.composite
def situations(draw: st.DrawFn) -> tuple[Loop, Predictions]:
    """Draw clients with test sets of any size, also empty ones, and predictions of a model."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    num_images, num_classes = draw(st.integers(1, 40)), draw(st.integers(1, 5))
    num_clients = draw(st.integers(1, 6))
    is_shared = draw(st.booleans())

    def some() -> Tensor:
        size = num_images if is_shared else draw(st.integers(0, num_images))
        return torch.randperm(num_images, generator=generator)[:size].sort().values

    scores = torch.randn(num_images, num_classes, generator=generator)
    similarities = torch.randn(num_images, num_classes, generator=generator)
    similarities[:, draw(st.integers(0, num_classes - 1))] = -torch.inf
    has_pool = draw(st.booleans())
    predicted = Predictions(
        scores.argmax(1),
        similarities.argmax(1) if has_pool else None,
        scores,
        similarities if has_pool else None,
    )
    labels = torch.randint(num_classes, (num_images,), generator=generator)
    counts = torch.randint(4, (num_clients, num_classes), generator=generator)
    return Loop(labels, counts, [some() for _ in range(num_clients)]), predicted


@pytest.mark.whole
@settings(max_examples=60, deadline=None)
@given(situations(), st.sampled_from([1, 7, 2**22]))
def test_evaluation_of_all_clients_equals_a_loop_over_clients(
    situation: tuple[Loop, Predictions], at_once: int
) -> None:
    loop, predicted = situation
    tests = ClientTests.of(loop.labels, loop.counts, loop.own)
    averaged = GlobalScorer(tests, predicted, torch.arange(len(loop.own)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predictions_module, "_SCORES_AT_ONCE", at_once)
        for test in TESTS:
            for predictor in AVERAGED:
                assert averaged.column(test, predictor) == loop.column(
                    predicted, test, predictor
                ), predictor
            for predictor in ("global_classifier", "global_classifier_prior"):
                assert averaged.bins(test, predictor) == loop.bins(predicted, test, predictor), (
                    predictor
                )


@settings(max_examples=30, deadline=None)
@given(situations())
def test_personal_scores_do_not_depend_on_the_images_of_others(
    situation: tuple[Loop, Predictions],
) -> None:
    loop, predicted = situation
    tests = ClientTests.of(loop.labels, loop.counts, loop.own)
    for client, own in enumerate(loop.own):
        whole = PersonalScorer(tests, client, predicted, is_whole=True)
        alone = PersonalScorer(tests, client, predicted.select(own), is_whole=False)
        for predictor in PERSONAL:
            wanted = loop.column(predicted, "local_test", predictor)[client]
            assert (
                whole.percent("local_test", predictor)
                == alone.percent("local_test", predictor)
                == wanted
            )
            assert (
                whole.percent("global_test", predictor)
                == loop.column(predicted, "global_test", predictor)[client]
            )


def test_priors_beyond_the_limit_are_only_for_evaluated_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scores = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    predicted = Predictions(scores.argmax(1), None, scores)
    labels, images = torch.arange(10) % 3, [torch.arange(10)] * 4
    tests = ClientTests.of(labels, torch.eye(4, 3, dtype=torch.long), images)
    reader = GlobalScorer(tests, predicted, torch.tensor([1, 3]))
    whole = reader.column("local_test", "global_classifier_prior")
    assert None not in whole
    monkeypatch.setattr(predictions_module, "_MOST_PRIOR_SCORES", 2 * 10 * 3)
    for test in TESTS:
        found = reader.column(test, "global_classifier_prior")
        assert found == [None, whole[1], None, whole[3]]
    # Predictors without a prior are still evaluated for all clients.
    assert None not in reader.column("local_test", "global_classifier")
    assert None not in reader.column("local_test", "global_classifier_estimated")
