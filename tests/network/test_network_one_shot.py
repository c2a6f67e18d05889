"""One exchange over a network: the simulation's result, and sums that no samples have."""

import re
from pathlib import Path
from typing import Any

import numpy
import pytest
from bad_answers import BadReply, arrays, values
from federations import (
    LoopbackFederation,
    assert_same_predictors,
    float64_experiment,
    folder_experiment,
    is_training,
    save_pictures,
)
from flwr.app import Message as FlowerMessage
from safetensors.torch import load_file

from equivalent_runs import assert_close_tensors
from mpfedcl import run
from mpfedcl.core.errors import RunCutShort
from mpfedcl.core.tensors import Tensors
from mpfedcl.gaussian import ABSENT
from mpfedcl.network.flower.records import from_records
from mpfedcl.network.message import Arrays
from small_experiments import assert_same_results, read_records, read_summary, save_shifted_vectors

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("quick_network")]

EXACT = 1e-10


def without_absent(params: Tensors) -> Tensors:
    """Return a classifier without the scores of absent parts, beside which all others are 0."""
    return params | {"bias": params["bias"].masked_fill(params["bias"] == ABSENT, 0)}


def kept_model(folder: Path) -> Tensors:
    """Return the own model that a client has kept of its only run."""
    (file,) = folder.glob("*/round-*.safetensors")
    own = load_file(file).items()
    return {n.removeprefix("personal/"): v for n, v in own if n.startswith("personal/")}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_mixture_over_clients_is_the_simulations(tmp_path: Path, dtype: str) -> None:
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
    # Each client has its own classifier at home once the run is over.
    for share in range(3):
        own = load_file(theirs / "models" / f"site-{share}.safetensors")
        kept = kept_model(federation.state_folder(share))
        assert_close_tensors(without_absent(kept), without_absent(own), tolerance)
    (record,), (simulated,) = read_records(ours), read_records(theirs)
    assert_same_predictors(record, simulated, "fedgauss")
    assert record["bytes"] == simulated["bytes"]
    assert record["remarks"]["fit"] == simulated["remarks"]["fit"]
    assert read_summary(ours)["predictor"] == "personal_classifier_prior"


def test_clients_with_pictures_of_their_own(tmp_path: Path) -> None:
    """Their classes differ, one keeps a rare class at home, and each has a test of its own."""
    experiment = folder_experiment("fedgauss", clients=2, partition__test="shared")
    federation = LoopbackFederation(experiment, tmp_path, count=0)
    federation.bring(1, "north", save_pictures(tmp_path / "n", "cat", "dog", count=8))
    place = save_pictures(tmp_path / "s", "bird", "cat", count=8)
    save_pictures(tmp_path / "s", "dog", count=4)
    federation.bring(2, "south", place, registered="", **{"min-cluster-size": 3})
    path = federation.serve().path
    (record,) = read_records(path)
    assert record["clients"]["answered"] == ["north", "south"]
    assert read_summary(path)["predictor"] == "personal_classifier_prior"
    sent = {
        name: from_records(reply.content).arrays["summed/counts"].tolist()
        for name, reply in federation.grid.replies
        if is_training(reply)
    }
    assert sent == {"north": [0, 4, 4], "south": [4, 4, 0]}
    # Known to the others, and to its owner alone.
    assert (kept_model(tmp_path / "memory-south")["bias"] > ABSENT).all()


def test_a_run_that_nobody_has_read_is_closed_later(images: Path, tmp_path: Path) -> None:
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


# Sums that no samples have


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
        r"the sum of class \d has length .*; at most its count, \d",
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
    "weights beside": (
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


def test_impossible_sums_cost_their_client_alone(many_images: Path, tmp_path: Path) -> None:
    changes = {"clients": len(HONEST) + len(BAD_SUMS), "partition__kind": "iid"}
    experiment = float64_experiment(many_images, "fedgauss", **changes)
    found = LoopbackFederation(experiment, tmp_path / "spoilt", spoil).serve().path
    (record,) = read_records(found)
    assert record["clients"]["answered"] == list(HONEST)
    rejected = record["clients"]["rejected"]
    assert rejected.keys() == BAD_CLIENTS.keys()
    for client, name in BAD_CLIENTS.items():
        assert re.search(BAD_SUMS[name][1], rejected[client]), (name, rejected[client])
    # The others get what they would have got alone.
    alone = LoopbackFederation(
        experiment.replace(network__patience=0.1), tmp_path / "alone", count=len(HONEST)
    )
    assert_same_results(found, alone.serve().path)


def test_a_moment_that_is_not_positive_semidefinite(images: Path, tmp_path: Path) -> None:
    def twist_first(client: str, request: FlowerMessage, reply: FlowerMessage) -> Any:
        is_bad = client == "client-0" and is_training(request)
        return summed("moment", twist)(request, reply) if is_bad else reply

    experiment = float64_experiment(images, "fedridge")
    (record,) = LoopbackFederation(experiment, tmp_path, twist_first).serve().history
    assert record["clients"]["rejected"] == {
        "client-0": "the second moment is not positive semidefinite"
    }
    assert record["clients"]["answered"] == ["client-1", "client-2"]
