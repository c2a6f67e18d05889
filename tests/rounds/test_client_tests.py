"""Readings of many clients at once are, bit for bit, those of a loop over clients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mpfedcl.methods import PREDICTORS, TESTS, PredictorName, Test
from mpfedcl.rounds import client_tests
from mpfedcl.rounds.calibration_error import BinSums, add_bins, count_bins
from mpfedcl.rounds.client_tests import ClientTests, GlobalReader, PersonalReader
from mpfedcl.rounds.evaluation import Column, Predictions, percent_correct
from mpfedcl.rounds.label_prior import estimate_priors, log_prior

AVERAGED = [each for each in PREDICTORS if each.startswith("global")]
PERSONAL = [each for each in PREDICTORS if each.startswith("personal")]


class Loop:
    """The oracle: client by client, and each reading as its name says."""

    def __init__(self, labels: Tensor, counts: Tensor, own: list[Tensor]) -> None:
        self.labels, self.counts, self.own = labels, counts, own

    def say(
        self, said: Predictions, client: int, images: Tensor, predictor: PredictorName
    ) -> Tensor | None:
        """Return the classes said of some images with one client's prior."""
        scores = said.similarities if "prototype" in predictor else said.scores
        if predictor.endswith("_prior"):
            prior = log_prior(self.counts[client])
            return None if scores is None else (scores[images] + prior.to(scores)).argmax(dim=1)
        if predictor.endswith("_estimated"):
            # All clients' at once: their steps end together.
            sizes = torch.tensor([len(each) for each in self.own])
            owners = torch.arange(len(sizes)).repeat_interleave(sizes)
            found = estimate_priors(said.scores[torch.cat(self.own)], owners, len(sizes))
            return (said.scores[images] + found[client].to(said.scores)).argmax(dim=1)
        answer = said.prototype if "prototype" in predictor else said.classifier
        return None if answer is None else answer[images]

    def column(self, said: Predictions, test: Test, predictor: PredictorName) -> Column:
        """Return one predictor of all clients."""
        found: Column = []
        for client, own in enumerate(self.own):
            images = own if test == "local_test" else torch.arange(len(self.labels))
            answer = self.say(said, client, images, predictor)
            if answer is None or (test == "global_test" and predictor.endswith("_estimated")):
                found.append(None)
            else:
                found.append(percent_correct(answer == self.labels[images]))
        return found

    def bins(self, said: Predictions, test: Test, predictor: PredictorName) -> BinSums:
        """Return all clients' probabilities."""
        parts = []
        for client, own in enumerate(self.own):
            images = own if test == "local_test" else torch.arange(len(self.labels))
            scores = said.scores[images]
            if predictor.endswith("_prior"):
                scores = scores.double() + log_prior(self.counts[client])
            parts.append(count_bins(scores, self.labels[images]))
        return add_bins(parts)


@st.composite
def situations(draw: st.DrawFn) -> tuple[Loop, Predictions]:
    """Draw clients with tests of all sizes, none among them, and what a model says."""
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
    said = Predictions(
        scores.argmax(1),
        similarities.argmax(1) if has_pool else None,
        scores,
        similarities if has_pool else None,
    )
    labels = torch.randint(num_classes, (num_images,), generator=generator)
    counts = torch.randint(4, (num_clients, num_classes), generator=generator)
    return Loop(labels, counts, [some() for _ in range(num_clients)]), said


@settings(max_examples=60, deadline=None)
@given(situations(), st.sampled_from([1, 7, 2**22]))
def test_all_clients_at_once_are_a_loop_over_clients(
    situation: tuple[Loop, Predictions], at_once: int
) -> None:
    loop, said = situation
    tests = ClientTests.of(loop.labels, loop.counts, loop.own)
    averaged = GlobalReader(tests, said, torch.arange(len(loop.own)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_tests, "_SCORES_AT_ONCE", at_once)
        for test in TESTS:
            for predictor in AVERAGED:
                assert averaged.column(test, predictor) == loop.column(said, test, predictor), (
                    predictor
                )
            for predictor in ("global_classifier", "global_classifier_prior"):
                assert averaged.bins(test, predictor) == loop.bins(said, test, predictor), predictor


@settings(max_examples=30, deadline=None)
@given(situations())
def test_one_clients_own_model_with_and_without_the_images_of_others(
    situation: tuple[Loop, Predictions],
) -> None:
    loop, said = situation
    tests = ClientTests.of(loop.labels, loop.counts, loop.own)
    for client, own in enumerate(loop.own):
        whole = PersonalReader(tests, client, said, is_whole=True)
        alone = PersonalReader(tests, client, said.select(own), is_whole=False)
        for predictor in PERSONAL:
            wanted = loop.column(said, "local_test", predictor)[client]
            assert (
                whole.percent("local_test", predictor)
                == alone.percent("local_test", predictor)
                == wanted
            )
            assert (
                whole.percent("global_test", predictor)
                == loop.column(said, "global_test", predictor)[client]
            )


def test_beyond_the_limit_priors_are_read_of_those_with_a_personal_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scores = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    said = Predictions(scores.argmax(1), None, scores)
    labels, everybody = torch.arange(10) % 3, [torch.arange(10)] * 4
    tests = ClientTests.of(labels, torch.eye(4, 3, dtype=torch.long), everybody)
    reader = GlobalReader(tests, said, torch.tensor([1, 3]))
    whole = reader.column("local_test", "global_classifier_prior")
    assert None not in whole
    monkeypatch.setattr(client_tests, "_MOST_PRIOR_SCORES", 2 * 10 * 3)
    for test in TESTS:
        found = reader.column(test, "global_classifier_prior")
        assert found == [None, whole[1], None, whole[3]]
    # What needs no prior of theirs is still read of all.
    assert None not in reader.column("local_test", "global_classifier")
    assert None not in reader.column("local_test", "global_classifier_estimated")
