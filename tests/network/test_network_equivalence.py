"""A run over a network equals its simulation: rounds, one-shot methods, and vectors."""

import json
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
from bad_answers import BadReply, arrays, values
from federations import (
    LoopbackFederation,
    assert_like_simulation,
    assert_same_personal_models,
    assert_same_predictors,
    float64_experiment,
    folder_experiment,
    is_training,
    save_pictures,
)
from flwr.app import Message as FlowerMessage
from safetensors.torch import load_file

from equivalent_runs import assert_close_tensors
from mpfedcl import Predictor, run
from mpfedcl.core.errors import RunCutShort
from mpfedcl.core.tensors import Tensors
from mpfedcl.data.loading import load_federated_data
from mpfedcl.data.samples import ArrayFormat
from mpfedcl.gaussian import ABSENT
from mpfedcl.inference.membership import join
from mpfedcl.methods import Asynchronous, built_in_methods
from mpfedcl.network.transport import Arrays
from opened_records import from_records
from small_experiments import (
    METHODS,
    assert_same_results,
    read_records,
    read_summary,
    save_shifted_vectors,
    save_vectors,
)

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("quick_network")]

SCAFFOLD, PULL = "custom_method:Scaffold", "pull_method:Pull"
IN_ROUNDS = [
    name
    for name, cls in built_in_methods().items()
    # fedbn's model has layers that this one has not.
    if not issubclass(cls, Asynchronous) and name != "fedbn"
]
RAGGED = {"partition__kind": "quantity", "partition__alpha": 1.0, "clients": 6}
ONES = {"partition__kind": "quantity", "partition__alpha": 0.8, "clients": 6}


def test_settings_of_a_custom_method_reach_the_clients(images: Path, tmp_path: Path) -> None:
    changes = {"pull__beta": 0.3, "pull__norm": "absolute", "pull__layers": ("hidden",)}
    experiment = float64_experiment(images, PULL, **changes)
    federation = LoopbackFederation(experiment, tmp_path, methods=PULL)
    found, wanted = federation.serve(), run(experiment, tmp_path / "simulation")
    assert_like_simulation(found.path, wanted.path, experiment)
    other = run(experiment.replace(pull__beta=0.0), tmp_path / "other")
    with pytest.raises(AssertionError):
        assert_like_simulation(found.path, other.path, experiment)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("method", [*IN_ROUNDS, SCAFFOLD])
def test_every_method_equals_simulation(images: Path, tmp_path: Path, method: str) -> None:
    experiment = float64_experiment(images, method, partition__test="matched")
    federation = LoopbackFederation(experiment, tmp_path, methods=SCAFFOLD)
    found, wanted = federation.serve(), run(experiment, tmp_path / "simulation")
    assert_like_simulation(found.path, wanted.path, experiment)
    assert_same_personal_models(federation, wanted.path)
    for ours, theirs in zip(read_records(found.path), read_records(wanted.path), strict=True):
        assert_same_predictors(ours, theirs, method)
    ours_confused = (found.path / "confusion.json").read_text()
    assert ours_confused == (wanted.path / "confusion.json").read_text()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("mp-fedcl", ONES),
        ("fedproto", RAGGED | {"evaluate_every": 2}),
        ("mp-fedcl", RAGGED | {"evaluate_every": 2, "prototypes__per_class": 4}),
        ("dp-fedcl", RAGGED | {"share_model": False}),
        ("mp-fedcl", {"prototypes__min_cluster_size": 3, "contrast__form": "pooled"}),
        ("mp-fedcl", RAGGED | {"aggregation__rule": "median", "update__clip": 0.05}),
        ("fedavg", {"update__clip": 0.05}),
        ("mp-fedcl", {"update__compress": "topk", "rounds": 3}),
        ("fedproto", {"update__compress": "half", "prototypes__pool_size": 2}),
        ("mp-fedcl", {"update__compress": "half", "prototypes__pool_size": 2}),
    ],
)
def test_other_clients_and_settings_equal_simulation(
    images: Path, tmp_path: Path, method: str, changes: dict[str, Any]
) -> None:
    experiment = float64_experiment(images, method, **changes)
    sizes = [len(client.labels) for client in load_federated_data(experiment).clients]
    assert changes != ONES or sizes.count(1) > 1
    found = LoopbackFederation(experiment, tmp_path).serve()
    wanted = run(experiment, tmp_path / "simulation")
    assert_like_simulation(found.path, wanted.path, experiment)
    clipped = [each["processed"] for each in read_records(found.path)]
    assert clipped == [each["processed"] for each in read_records(wanted.path)]
    assert any(clipped) == ("update__clip" in changes)
    for ours, theirs in zip(read_records(found.path), read_records(wanted.path), strict=True):
        assert (ours["accuracy"] is None) == (theirs["accuracy"] is None)
        if theirs["accuracy"] is not None:
            assert_same_predictors(ours, theirs, method)


@pytest.mark.parametrize("method", ["mp-fedcl", "fedgauss"])
def test_network_runs_bound_updates_by_default(images: Path, tmp_path: Path, method: str) -> None:
    changes = {
        "validation__bounds": "auto",
        "validation__clip_factor": 0.8,
        "aggregation__rule": "median",
    }
    experiment = float64_experiment(images, method, **RAGGED | changes)
    found = LoopbackFederation(experiment, tmp_path).serve()
    wanted = run(experiment.replace(validation__bounds="on"), tmp_path / "simulation")
    assert_like_simulation(found.path, wanted.path, experiment)
    processed = [[each["processed"] for each in read_records(r.path)] for r in (found, wanted)]
    assert processed[0] == processed[1]
    assert any("bound on norm" in each for each in processed[0]) == (method == "mp-fedcl")


@pytest.mark.parametrize("method", ["mp-fedcl", "fedproto", SCAFFOLD])
def test_sampled_clients_equal_simulation(images: Path, tmp_path: Path, method: str) -> None:
    changes = {"clients": 5, "fraction": 0.4, "prototypes__pool_ttl": 2, "rounds": 4}
    experiment = float64_experiment(images, method, **changes)
    federation = LoopbackFederation(experiment, tmp_path, methods=SCAFFOLD)
    found, wanted = federation.serve(), run(experiment, tmp_path / "simulation")
    for ours, theirs in zip(read_records(found.path), read_records(wanted.path), strict=True):
        assert ours["clients"] == theirs["clients"]
        assert len(ours["clients"]["answered"]) == 2
    # All clients evaluate the global model at the end; those that trained, personal models too.
    if method != "fedproto":
        assert_like_simulation(found.path, wanted.path, experiment)
    last, theirs = read_records(found.path)[-1], read_records(wanted.path)[-1]
    assert_same_predictors(last, theirs, method)
    # Before that only clients that train next evaluate a round.
    for before, after in zip(read_records(found.path), read_records(found.path)[1:], strict=False):
        assert list(before["accuracy_per_client"]) == after["clients"]["answered"]
        for name, value in before["accuracy_per_client"].items():
            assert value in (
                None,
                read_records(wanted.path)[before["round"] - 1]["accuracy_per_client"][name],
            )


def test_convolutions_and_local_norms_equal_simulation(images: Path, tmp_path: Path) -> None:
    changes = {"model__name": "cnn", "model__hidden": (6,), "model__norm": "group", "rounds": 2}
    experiment = float64_experiment(images, "fedbn", partition__test="matched", **changes)
    federation = LoopbackFederation(experiment, tmp_path)
    found, wanted = federation.serve(), run(experiment, tmp_path / "simulation")
    assert_same_personal_models(federation, wanted.path)
    for ours, theirs in zip(read_records(found.path), read_records(wanted.path), strict=True):
        assert ours["bytes"] == theirs["bytes"]
        assert_same_predictors(ours, theirs, "fedbn")
    averaged = float64_experiment(images, "fedavg", **changes)
    served = LoopbackFederation(averaged, tmp_path / "averaged").serve()
    assert Predictor.load(served.path).trained.input_format.shape == (6, 6)


EXACT = 1e-10


def without_absent(params: Tensors) -> Tensors:
    """Return a classifier without the scores of absent parts."""
    return params | {"bias": params["bias"].masked_fill(params["bias"] == ABSENT, 0)}


def kept_model(folder: Path) -> Tensors:
    """Return the personal model that a client has stored of its only run."""
    (file,) = folder.glob("*/round-*.safetensors")
    own = load_file(file).items()
    return {n.removeprefix("personal/"): v for n, v in own if n.startswith("personal/")}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_mixture_over_clients_equals_simulation(tmp_path: Path, dtype: str) -> None:
    sites = save_shifted_vectors(tmp_path / "sites")
    changes = {"partition__kind": "feature", "partition__test": "matched", "clients": None}
    experiment = float64_experiment(sites, "fedgauss", dtype=dtype, **changes)
    federation = LoopbackFederation(experiment.replace(clients=3), tmp_path, count=0)
    for share in range(3):
        federation.join(share, name=f"site-{share}")
    ours, theirs = federation.serve().path, run(experiment, tmp_path / "simulation").path
    tolerance = EXACT if dtype == "float64" else 1e-5
    wanted = load_file(theirs / "model.safetensors")
    assert wanted["bias"].shape == (4, 3)
    found = load_file(ours / "model.safetensors")
    assert_close_tensors(without_absent(found), without_absent(wanted), tolerance)
    pool, wanted_pool = (load_file(path / "pool.safetensors") for path in (ours, theirs))
    assert_close_tensors(pool, wanted_pool, tolerance)
    # Each client has stored its personal classifier when the run has ended.
    for share in range(3):
        own = load_file(theirs / "models" / f"site-{share}.safetensors")
        kept = kept_model(federation.state_folder(share))
        assert_close_tensors(without_absent(kept), without_absent(own), tolerance)
    (record,), (simulated,) = read_records(ours), read_records(theirs)
    assert_same_predictors(record, simulated, "fedgauss")
    assert record["bytes"] == simulated["bytes"]
    assert record["remarks"]["fit"] == simulated["remarks"]["fit"]
    assert read_summary(ours)["predictor"] == "personal_classifier_prior"


def test_clients_with_own_images_and_different_classes_take_part(tmp_path: Path) -> None:
    """Classes differ, one client withholds a rare class, and each has a local test set."""
    experiment = folder_experiment("fedgauss", clients=2, partition__test="shared")
    federation = LoopbackFederation(experiment, tmp_path, count=0)
    federation.bring(1, "north", save_pictures(tmp_path / "n", "cat", "dog", count=20))
    place = save_pictures(tmp_path / "s", "bird", "cat", count=20)
    save_pictures(tmp_path / "s", "dog", count=4)
    federation.bring(2, "south", place, policy={"data": {"min_class_count": 5}})
    path = federation.serve().path
    (record,) = read_records(path)
    assert record["clients"]["answered"] == ["north", "south"]
    assert read_summary(path)["predictor"] == "personal_classifier_prior"
    sent = {
        name: from_records(reply.content).arrays["summed/counts"].tolist()
        for name, reply in federation.grid.replies
        if is_training(reply)
    }
    held = {name: [count > 0 for count in counts] for name, counts in sent.items()}
    assert held == {"north": [False, True, True], "south": [True, True, False]}
    assert sum(map(sum, sent.values())) < 80
    # Its owner knows all classes, including the withheld one.
    assert (kept_model(tmp_path / "memory-south")["bias"] > ABSENT).all()


def test_last_round_is_evaluated_after_resume(images: Path, tmp_path: Path) -> None:
    def be_silent(
        client: str, request: FlowerMessage, reply: FlowerMessage
    ) -> FlowerMessage | None:
        return None if str(request.metadata.message_type) == "evaluate" else reply

    experiment = float64_experiment(images, "fedgauss", network__round_timeout=20.0)
    federation = LoopbackFederation(experiment, tmp_path / "late", be_silent)
    with pytest.raises(RunCutShort, match="no client has evaluated the last round, 1"):
        federation.serve()
    federation.grid._tamper = lambda _client, _request, reply: reply
    resumed = federation.resume(rounds=5)
    whole = LoopbackFederation(experiment, tmp_path / "whole").serve()
    assert resumed.summary is not None
    assert resumed.accuracy == whole.accuracy
    assert_same_results(resumed.path, whole.path)
    for share in range(3):
        assert kept_model(federation.state_folder(share)).keys() == {"weight", "bias"}


# Impossible statistics


def summed(name: str, change: Any) -> BadReply:
    """Change one of the sums, given all that was sent."""
    key = f"summed/{name}"
    return arrays(lambda found: {**found, key: change(found[key])})


def move_a_sample(counts: Any) -> Any:
    """Count a sample of the first class as one of the second."""
    return counts + numpy.array([-1, 1, 0])


def twist(packed: Any) -> Any:
    """Leave the diagonal as it is and make all else ten times the trace."""
    size = int((2 * len(packed)) ** 0.5)
    rows, columns = numpy.triu_indices(size)
    return numpy.where(rows == columns, packed, 10 * packed[rows == columns].sum())


def drop_scatter(found: Arrays) -> Arrays:
    return {name: each for name, each in found.items() if name != "summed/scatter"}


BAD_SUMS: dict[str, tuple[BadReply, str]] = {
    "longer than their count": (
        summed("sums", lambda x: 3 * x),
        r"the sum of class \d has the norm .*; at most its count, \d",
    ),
    "a trace too large": (summed("within", lambda x: 2 * x), "the second moment has the trace"),
    "not positive semidefinite": (
        summed("within", twist),
        "the second moment is not positive semidefinite",
    ),
    "a scatter of its own": (summed("scatter", lambda x: 2 * x), r"the scatter is .*; its matrix"),
    "a sample moved": (
        summed("counts", move_a_sample),
        r"class 0 has the count \d; this client has announced \d",
    ),
    "half a sample more": (summed("counts", lambda x: x + 0.5), "class 0 has the count .*5; this"),
    "less than nothing": (summed("counts", lambda x: -x), "class 0 has the count -"),
    "NaN": (summed("within", lambda x: x * float("nan")), "the sums within hold values that are"),
    "infinity": (summed("sums", lambda x: x + float("inf")), "the sums sums hold values that are"),
    "a matrix cut off": (summed("within", lambda x: x[:5]), r"tensor within has shape \[5\]"),
    "single precision": (summed("sums", lambda x: x.astype("f4")), "sums has type torch.float32"),
    "no scatter": (arrays(drop_scatter), r"tensors \['scatter'\] are missing or unknown"),
    "additional weights": (
        arrays(lambda found: {**found, "averaged/weight": numpy.zeros(3)}),
        r"tensors \['weight'\] are missing or unknown",
    ),
    "a loss": (values(loss=float("nan")), "loss is nan; it must be finite"),
    "withheld": (values(withheld=True), "this method never does"),
}
HONEST = ("client-0", "client-1")
BAD_CLIENTS = {f"client-{number}": name for number, name in enumerate(BAD_SUMS, len(HONEST))}


def spoil(client: str, request: FlowerMessage, reply: FlowerMessage) -> Any:
    if client in HONEST or not is_training(request):
        return reply
    return BAD_SUMS[BAD_CLIENTS[client]][0](request, reply)


def test_impossible_statistics_affect_only_their_client(many_images: Path, tmp_path: Path) -> None:
    changes = {"clients": len(HONEST) + len(BAD_SUMS), "partition__kind": "iid"}
    experiment = float64_experiment(many_images, "fedgauss", **changes)
    found = LoopbackFederation(experiment, tmp_path / "spoilt", spoil).serve().path
    (record,) = read_records(found)
    assert record["clients"]["answered"] == list(HONEST)
    rejected = record["clients"]["rejected"]
    assert rejected.keys() == BAD_CLIENTS.keys()
    for client, name in BAD_CLIENTS.items():
        assert re.search(BAD_SUMS[name][1], rejected[client]), (name, rejected[client])
    # The results equal those of a run with only the honest clients.
    alone = LoopbackFederation(
        experiment.replace(network__patience=0.1), tmp_path / "alone", count=len(HONEST)
    )
    assert_same_results(found, alone.serve().path)


def test_indefinite_second_moment_is_rejected(images: Path, tmp_path: Path) -> None:
    def twist_first(client: str, request: FlowerMessage, reply: FlowerMessage) -> Any:
        is_bad = client == "client-0" and is_training(request)
        return summed("moment", twist)(request, reply) if is_bad else reply

    experiment = float64_experiment(images, "fedridge")
    (record,) = LoopbackFederation(experiment, tmp_path, twist_first).serve().history
    assert record["clients"]["rejected"] == {
        "client-0": "the second moment is not positive semidefinite"
    }
    assert record["clients"]["answered"] == ["client-1", "client-2"]


Json = dict[str, Any]


def federate(folder: Path, *widths: int, **changes: Any) -> LoopbackFederation:
    """Let clients come with vectors of these widths, the first from a folder, others with files."""
    settings = {"encoder__name": None, "clients": len(widths), **changes}
    federation = LoopbackFederation(folder_experiment(**settings), folder, count=0)
    for number, width in enumerate(widths):
        file = folder / f"site-{number}" / "v.npz"
        save_vectors(file, width=width)
        federation.bring(number + 1, f"client-{number}", file if number else file.parent)
    return federation


def read(path: Path, name: str) -> Json:
    content: Json = json.loads((path / name).read_text())
    return content


def test_clients_with_vectors_need_no_encoder(tmp_path: Path) -> None:
    federation = federate(tmp_path, 5, 5)
    result = federation.serve()
    assert result.experiment.encoder.name == "none"
    assert read_records(federation.path)[1]["clients"]["answered"] == ["client-0", "client-1"]
    form = read(federation.path, "federation.json")
    assert (form["input_size"], form["encoder"], form["samples"]) == (5, "", "vectors")
    assert read(federation.path, "partition.json")["input_shape"] == [5]
    resumed = federation.resume(rounds=3)
    assert len(resumed.history) == 3


def test_dataset_of_the_server_is_ignored_for_clients_with_own_data(tmp_path: Path) -> None:
    """The experiment's dataset settings do not apply to clients with their own data."""
    changes = {
        "dataset__name": "mnist-sample",
        "partition__min_size": None,
        "model__hidden": (),
    }
    federation = federate(tmp_path, 5, 5, **changes)
    model = federation.serve().path / "model.safetensors"
    assert load_file(model)["hidden.0.weight"].shape == (256, 5)


def test_run_on_vectors_predicts_and_accepts_new_clients(tmp_path: Path) -> None:
    federation = federate(tmp_path, 5, 5)
    federation.serve()
    predictor = Predictor.load(federation.path)
    assert predictor.trained.input_format == ArrayFormat((5,), "float64")
    assert len(predictor.predict(numpy.eye(5))) == 5
    assert join(federation.path, tmp_path / "site-0" / "v.npz", "late").noun == "vector"
    assert "own vectors" in (federation.path / "CARD.md").read_text(encoding="utf-8")


def test_client_with_another_vector_width_is_refused(tmp_path: Path) -> None:
    federation = federate(tmp_path, 5, 4, 5, min_clients=2)
    result = federation.serve()
    assert result.history[0]["clients"]["answered"] == ["client-0", "client-2"]
    alone = federate(tmp_path / "alone", 5, 4, min_clients=2)
    reason = "client-1: its inputs have 4 values, the others' 5: vectors must be of one width"
    with pytest.raises(RunCutShort, match=reason):
        alone.serve()


@pytest.mark.usefixtures("own_places")
@pytest.mark.parametrize("encoder", ["none", "random-resnet18"])
def test_clients_with_images_and_vectors_cannot_mix(tmp_path: Path, encoder: str) -> None:
    federation = federate(tmp_path, 36, 36, clients=3, min_clients=3, encoder__name="none")
    federation.bring(3, "pictures", save_pictures(tmp_path / "pictures", "0", "1", "2", count=4))
    if encoder != "none":
        federation.experiment = federation.experiment.replace(encoder__name=encoder)
    with pytest.raises(RunCutShort) as caught:
        federation.serve()
    refused = {
        "none": "pictures: it has images, the others vectors",
        "random-resnet18": "client-0: it has vectors, but encoder.name is 'random-resnet18', and",
    }
    assert refused[encoder] in str(caught.value)


def test_client_rejects_an_encoder_for_vectors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation = LoopbackFederation(folder_experiment(clients=1), tmp_path, count=0)
    save_vectors(tmp_path / "v.npz")
    federation.bring(1, "odd", tmp_path / "v.npz", encoder="random-resnet18")
    with pytest.raises(RunCutShort, match="it cannot use its data, its encoder or its model"):
        federation.serve()
    assert "encoder.name is 'random-resnet18', but the samples are vectors" in caplog.text


@pytest.mark.parametrize("method", METHODS)
def test_shares_of_a_vector_dataset_equal_simulation(
    vectors: Path, tmp_path: Path, method: str
) -> None:
    experiment = float64_experiment(vectors, method, rounds=2, clients=3, encoder__name=None)
    federation = LoopbackFederation(experiment, tmp_path)
    ours = federation.serve()
    theirs = run(experiment, tmp_path / "simulated")
    assert ours.accuracy == theirs.accuracy
    for left, right in zip(ours.history, theirs.history, strict=True):
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-9)


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
def test_metrics_of_clients_equal_simulation(images: Path, tmp_path: Path, method: str) -> None:
    """Clients send values and counts, from which AUROC and ECE over all of them do not follow."""
    experiment = float64_experiment(images, method, partition__test="matched", metric="macro_f1")
    found = read_summary(LoopbackFederation(experiment, tmp_path).serve().path)["metrics"]
    wanted = read_summary(run(experiment, tmp_path / "simulation").path)["metrics"]
    assert found["per_client"].keys() == wanted["per_client"].keys()
    for name, each in wanted["per_client"].items():
        assert found["per_client"][name] == pytest.approx(each)
    assert set(found["global_test"].values()) == {None}
    expected = wanted["local_test"] | {"auroc": None, "ece": None}
    assert found["local_test"] == pytest.approx(expected)
    assert expected["macro_f1"] == read_records(tmp_path / "simulation")[-1]["metric"]["local_test"]
