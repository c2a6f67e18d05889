"""What the clients of a process read after a round: their own models, and the averaged one."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain

import torch

from mpfedcl.data.client_data import FederatedData
from mpfedcl.engines.trained_clients import TrainedClients, distinct_groups, predict_clients
from mpfedcl.methods import TESTS, Method, Test
from mpfedcl.models import Model
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.calibration_error import BinSums, add_bins
from mpfedcl.rounds.evaluation import (
    AccuracyTable,
    ClientReader,
    ConfusionCounts,
    Evaluator,
    Predictions,
    as_stack,
    count_confusions,
    estimate_own_priors,
)
from mpfedcl.tensors import Tensors

_SCORES_AT_ONCE = 2**24
"""Of classes, images and clients that are read together where only scores differ."""


def read_clients(
    method: Method,
    model: Model,
    data: FederatedData,
    averaged: Tensors | None,
    reference: PrototypePool | None,
    trained: Mapping[str, TrainedClients],
    *,
    with_confusion: bool = False,
) -> tuple[dict[str, AccuracyTable], dict[str, ConfusionCounts], dict[Test, BinSums]]:
    """Return every client's readings, and what is counted: confusions, probabilities by test.

    `trained` are the clients whose personal models are read, each in its group.
    """
    evaluator = Evaluator(
        data.test_inputs,
        data.test_labels,
        method.project,
        reference,
        method.experiment.contrast.temperature,
    )
    shared = None
    if averaged is not None:
        (shared,) = evaluator.predict(
            lambda inputs: as_stack(model.apply(averaged, inputs)), with_similarities=True
        )
    if not method.trains:
        # Features are the same for everybody: only scores are personal, and they are small.
        at_once = _SCORES_AT_ONCE // data.num_classes
        evaluator = replace(evaluator, reference=None, read_at_once=at_once)
    reader = ClientReader(evaluator.labels, shared, len(data.clients))
    judged = {test: method.reading_on(test) for test in TESTS}
    estimated = estimate_own_priors(shared, {each.name: each.test for each in data.clients})
    tables: dict[str, AccuracyTable] = {}
    confusion: dict[str, ConfusionCounts] = {}
    bins: dict[Test, BinSums] = {}
    unread = ((name, None) for name in data.names if name not in trained)
    for name, personal in chain(_predict_personally(method, evaluator, trained), unread):
        client = data.client(name)
        counts = torch.bincount(client.labels, minlength=data.num_classes)
        tables[name], said = reader.tables(personal, client.test, counts, estimated.get(name))
        if with_confusion and judged["own"] in said and len(client.test):
            truth = evaluator.labels[client.test]
            confusion[name] = count_confusions(said[judged["own"]], truth, data.num_classes)
        if with_confusion:
            for test, part in reader.bins(judged, personal, client.test, counts).items():
                bins[test] = add_bins([bins.get(test, add_bins([])), part])
    in_order = [name for name in data.names if name in confusion]
    return {n: tables[n] for n in data.names}, {n: confusion[n] for n in in_order}, bins


def _predict_personally(
    method: Method, evaluator: Evaluator, trained: Mapping[str, TrainedClients]
) -> Iterator[tuple[str, Predictions]]:
    """Yield what each client's model answers; few are held at a time."""
    alone: dict[str, Evaluator] = {}
    if (everyones := evaluator.reference) is not None:
        own = {name: method.own_reference(everyones, name) for name in trained}
        alone = {n: replace(evaluator, reference=e) for n, e in own.items() if e is not everyones}
    for group in distinct_groups(trained.values()):
        yield from predict_clients(group, evaluator, trained.keys() - alone.keys())
    for name, reads in alone.items():
        yield from predict_clients(trained[name], reads, [name])
