"""FedNH, FPL, FedPLVM and FedTGP: losses by plain loops and by the authors' code, and servers."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from identities import after_rounds, assert_same_model, begin, both_engines, models_of, server_of
from tiny_method_inputs import draw
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from mpfedcl import Experiment, resume, run
from mpfedcl.core.errors import InvalidInput
from mpfedcl.methods import Batch, Context, Server, Tally, find_method
from mpfedcl.methods.fedtgp import _PROTOTYPES, _make_prototypes
from mpfedcl.methods.messages import Broadcast
from mpfedcl.prototypes import PrototypePool, Prototypes
from small_experiments import small

LABELS = (0, 1, 2, 1, 0)
CLUSTERS = {0: draw(2, 2, 3), 1: draw(3, 1, 3), 2: draw(4, 3, 3)}
"""Cluster prototypes of each class."""


def make(name: str, **settings: Any) -> Any:
    found = find_method(name)
    return found(Experiment(method=name).replace(**settings).resolved(found.defaults), 3)


def pool_of(clusters: dict[int, Tensor]) -> PrototypePool:
    vectors = torch.cat(list(clusters.values()))
    labels = torch.tensor([c for c, each in clusters.items() for _ in each])
    shared = Prototypes(vectors, labels, torch.ones_like(labels))
    return PrototypePool.gather({"global": shared}, num_classes=3)


def loss_of(method: Any, embeddings: Tensor, pool: PrototypePool, logits: Tensor) -> float:
    """Return the loss for given embeddings and logits."""
    labels = torch.tensor(LABELS)
    batch = Batch(embeddings, labels, torch.ones_like(labels, dtype=torch.bool))
    received = method.prepare(Broadcast(2, {}, {}, pool))
    context = Context(lambda _, inputs: (inputs, logits), {}, received, {})
    return float(method.loss({}, batch, context))


# FPL


def test_fpl_loss_equals_the_authors_code() -> None:
    method = make("fpl", fpl__temperature=0.3)
    z, logits = draw(1, 5, 3), draw(9, 5, 3)
    found = loss_of(method, z, pool_of(CLUSTERS), logits)
    # `hierarchical_info_loss` of the authors' models/fpl.py on these values.
    wanted = 2.898268686065348 + float(cross_entropy(logits, torch.tensor(LABELS)))
    assert found == pytest.approx(wanted, rel=1e-12)


@both_engines
def test_fpl_starts_as_fedavg(images: Path, engine: str) -> None:
    found = after_rounds(images, "fpl", 1, engine=engine)
    assert_same_model(found, after_rounds(images, "fedavg", 1, engine=engine), engine)


# FedPLVM


def test_fedplvm_loss_equals_the_authors_code() -> None:
    method = make("fedplvm", fedplvm__temperature=0.2, fedplvm__weight=3.0)
    clusters, logits = {c: v.abs() for c, v in CLUSTERS.items()}, draw(9, 5, 3)
    found = loss_of(method, draw(1, 5, 3).abs(), pool_of(clusters), logits)
    # `criterion_InfoNCE_alpha` and `criterion_correction` of the authors' utils/update.py.
    both = 1.288897905980586 + 0.058247695345462036
    wanted = float(cross_entropy(logits, torch.tensor(LABELS))) + 3 * both
    # Their masks and targets are in single precision.
    assert found == pytest.approx(wanted, rel=1e-6)


def test_fedplvm_leaves_classes_without_prototypes_out() -> None:
    method = make("fedplvm")
    some = pool_of({0: CLUSTERS[0], 1: CLUSTERS[1]})
    logits, z = draw(9, 5, 3), draw(1, 5, 3)
    entropy = float(cross_entropy(logits, torch.tensor(LABELS)))
    found, rows = loss_of(method, z, some, logits) - entropy, [0, 1, 3, 4]
    unit = normalize(some.vectors, dim=1)
    means = {c: normalize(v.mean(0), dim=0) for c, v in CLUSTERS.items()}
    total = []
    for row in rows:
        one, label = normalize(z[row], dim=0), LABELS[row]
        powers = [math.exp(max(float(one @ u), 1e-6) ** 0.25 / 0.07) for u in unit]
        own = [p for p, c in zip(powers, some.labels.tolist(), strict=True) if c == label]
        total.append(math.log(sum(powers) / sum(own)) + 2 * (1 - float(one @ means[label])) ** 2)
    assert found == pytest.approx(float(numpy.mean(total)), rel=1e-10)


# FedNH


def test_fednh_prototypes_start_orthonormal_and_move_by_the_formula(images: Path) -> None:
    federation = begin(images, "fednh", fednh__smoothing=0.6)
    before = server_of(federation)["classifier.weight"]
    torch.testing.assert_close(before @ before.T, torch.eye(len(before), dtype=before.dtype))
    federation.run_round(evaluate=False)
    sent = {name: rows for name, (_, rows) in federation.state.prototypes.items()}
    after = server_of(federation)["classifier.weight"]
    for label, old in enumerate(before):
        total, count = torch.zeros_like(old), 0
        for rows in sent.values():
            for vector, each, size in zip(rows.vectors, rows.labels, rows.counts, strict=True):
                if int(each) == label:
                    total, count = total + int(size) * vector / vector.norm(), count + int(size)
        new = old if not count else 0.6 * old + 0.4 * total / count
        torch.testing.assert_close(after[label], new / new.norm(), rtol=1e-10, atol=1e-12)


@both_engines
def test_fednh_clients_do_not_move_the_prototypes(images: Path, engine: str) -> None:
    federation = begin(images, "fednh", engine=engine, fednh__smoothing=1.0)
    before = server_of(federation)
    federation.run_round(evaluate=False, keep_models=True)
    for model in [server_of(federation), *models_of(federation).values()]:
        torch.testing.assert_close(model["classifier.weight"], before["classifier.weight"])
        assert not model["classifier.bias"].any()
        assert not torch.equal(model["hidden.0.weight"], before["hidden.0.weight"])


def test_fednh_rejects_an_embedding_with_fewer_dimensions_than_classes(
    images: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match="embedding has 2 dimensions; with method fednh it must"):
        run(small(images, "fednh", model__hidden=(8, 2)), tmp_path / "run")


# FedTGP


class Network(nn.Module):
    """The network as one would write it in PyTorch."""

    def __init__(self, net: dict[str, Tensor]) -> None:
        super().__init__()
        size = net["embedding"].shape[1]
        self.embedding = nn.Parameter(net["embedding"])
        self.hidden, self.out = nn.Linear(size, size), nn.Linear(size, size)
        self.hidden.weight = nn.Parameter(net["hidden"])
        self.hidden.bias = nn.Parameter(net["bias"])
        self.out.weight = nn.Parameter(net["out"])
        self.out.bias = nn.Parameter(net["offset"])

    def forward(self) -> Tensor:
        found: Tensor = self.out(self.hidden(self.embedding).relu())
        return found


def test_fedtgp_server_equals_a_plain_loop() -> None:
    method = make("fedtgp", fedtgp__epochs=20, fedtgp__margin=0.5)
    prototypes = {
        "a": Prototypes(draw(1, 2, 4), torch.tensor([0, 1]), torch.tensor([5, 3])),
        "b": Prototypes(draw(2, 3, 4), torch.tensor([0, 1, 2]), torch.tensor([1, 9, 9])),
    }
    tally = Tally(["a", "b"], [8, 19], [8, 19], [0.0, 0.0], 1.0, prototypes, {})
    first = method._first_network(PrototypePool.gather(prototypes, num_classes=3))
    network = Network({n: w.clone() for n, w in first.items() if n != "rounds"})
    optimizer = torch.optim.SGD(network.parameters(), lr=method.settings.lr)
    points = torch.cat([each.vectors for each in prototypes.values()])
    labels = torch.cat([each.labels for each in prototypes.values()])
    for _ in range(20):
        # All five are one batch, so that their order does not matter.
        distances = (points.unsqueeze(1) - network().unsqueeze(0)).norm(dim=2)
        margins = 0.5 * nn.functional.one_hot(labels, 3)
        loss = cross_entropy(-(distances + margins), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    server = method.reduce(Server({}), {}, tally)
    torch.testing.assert_close(
        server.extra[_PROTOTYPES], network().detach(), rtol=1e-10, atol=1e-12
    )
    # A second round continues with the trained network.
    assert int(server.private["rounds"]) == 1
    trained = {n: w for n, w in server.private.items() if n != "rounds"}
    torch.testing.assert_close(_make_prototypes(trained), server.extra[_PROTOTYPES])


def test_fedtgp_pulls_embeddings_to_the_trained_prototypes() -> None:
    method = make("fedtgp", fedtgp__weight=2.0)
    z, logits, vectors = draw(1, 5, 3), draw(9, 5, 3), draw(7, 3, 3)
    labels = torch.tensor(LABELS)
    batch = Batch(z, labels, torch.ones_like(labels, dtype=torch.bool))
    empty = PrototypePool.empty(3, 3, 1, dtype=torch.float64)
    received = method.prepare(Broadcast(2, {}, {_PROTOTYPES: vectors}, empty))
    context = Context(lambda _, inputs: (inputs, logits), {}, received, {})
    wanted = cross_entropy(logits, labels) + 2 * nn.functional.mse_loss(z, vectors[labels])
    torch.testing.assert_close(method.loss({}, batch, context), wanted)
    start = replace(context, received=method.prepare(Broadcast(1, {}, {}, empty)))
    torch.testing.assert_close(method.loss({}, batch, start), cross_entropy(logits, labels))


def test_fedtgp_resumes_with_its_network(images: Path, tmp_path: Path) -> None:
    experiment = small(images, "fedtgp", rounds=2, fedtgp__epochs=5)
    whole = run(experiment.replace(rounds=3), tmp_path / "whole")
    run(experiment, tmp_path / "part")
    again = resume(tmp_path / "part", rounds=3)
    assert again.summary is not None
    assert whole.summary is not None
    assert again.summary["predictors"] == whole.summary["predictors"]
