"""Every field that leaves a client is listed, with and without a privacy budget."""

import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import numpy
import pytest
from federations import (
    LoopbackFederation,
    float64_experiment,
    folder_experiment,
    rewrite,
    save_pictures,
)
from flwr.app import Message as FlowerMessage

from mpfedcl.core.errors import RunCutShort
from mpfedcl.core.tensors import load_tensors
from mpfedcl.data.loading import load_federated_data
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.names import METRICS
from mpfedcl.methods import PREDICTORS, collect_statistics, find_method
from mpfedcl.network.flower.records import PACKED
from mpfedcl.network.transport import Arrays, Message
from mpfedcl.privacy.accounting import spent_epsilon
from mpfedcl.privacy.ledger import read_ledger
from opened_records import from_records
from small_experiments import METHODS, read_records, read_summary

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("quick_network")]

DOCUMENT = (Path(__file__).parents[2] / "docs/privacy.md").read_text()
SCAFFOLD = "custom_method:Scaffold"

FLOATS, INTEGERS = "float", "int64"
PARAMETER = r"(hidden\.\d|classifier)\.(weight|bias)"
SENT_ONCE = {
    "fedgauss": {"counts", "sums", "within", "scatter"},
    "fedlda": {"counts", "sums", "within", "scatter"},
    "fedncm": {"counts", "sums"},
    "fedcof": {"counts", "sums"},
    "fedridge": {"counts", "sums", "moment"},
    "local-gauss": set[str](),
}
"""The arrays that one-shot methods send."""
UP: dict[str, dict[str, type]] = {
    "query": {
        "classes": list,
        "train": list,
        "test": int,
        "input_size": int,
        "encoder": str,
        "samples": str,
        "image_shape": list,
        "own_data": bool,
        "model": str,
        "embedding_size": int,
    },
    "query.secure": {"advert": dict, "sealed": dict, "signature": str, "seeds": dict, "keys": dict},
    "train": {
        "num_samples": int,
        "loss": float,
        "withheld": bool,
        "processed": list,
        "late": dict,
        "version": int,
        "dispatch": int,
    },
    "evaluate": {"late": dict},
}
UP_ARRAYS: dict[str, dict[str, tuple[str, int]]] = {
    "query": {},
    "query.secure": {},
    "train": {
        rf"averaged/(control\.|change\.)?{PARAMETER}": (FLOATS, 0),
        "summed/(counts|sums|within|scatter|moment)": (FLOATS, 0),
        "prototypes/vectors": (FLOATS, 2),
        "prototypes/labels": (INTEGERS, 1),
        "prototypes/counts": (INTEGERS, 1),
        "masked": ("uint64", 1),
    },
    "evaluate": {},
}
ASKED = {
    "format": int,
    "experiment": str,
    "run": str,
    "round": int,
    "settled": int,
    "read": bool,
    "names": list,
}
STAGE = {
    "format": int,
    "experiment": str,
    "run": str,
    "round": int,
    "stage": str,
    "adverts": dict,
    "survivors": list,
    "signatures": dict,
}
DOWN = {
    "query": {"format": int, "experiment": str},
    "query.secure": STAGE,
    "train": {**ASKED, "sealed": dict, "version": int, "dispatch": int, "delay": float},
    "evaluate": {**ASKED, "delay": float},
}
POOL: dict[str, tuple[str, int]] = {
    rf"(params|extra)/{PARAMETER}": (FLOATS, 0),
    "params/(weight|bias)": (FLOATS, 0),
    "extra/(covariance|fit)": (FLOATS, 1),
    "pool/vectors": (FLOATS, 2),
    "pool/labels": (INTEGERS, 1),
    "pool/counts": (INTEGERS, 1),
    "pool/owners": (INTEGERS, 1),
    r"units/hidden\.\d": ("uint8", 1),
}
DOWN_ARRAYS: dict[str, dict[str, tuple[str, int]]] = {
    "query": {},
    "query.secure": {},
    "train": POOL,
    "evaluate": POOL,
}


def kind_of(message: FlowerMessage) -> str:
    return str(message.metadata.message_type)


def check(
    sent: FlowerMessage,
    values: dict[str, dict[str, type]],
    arrays: dict[str, dict[str, tuple[str, int]]],
) -> None:
    """Compare a message with the lists: every record, value, array and byte."""
    kind, content = kind_of(sent), sent.content
    assert set(content) == {"values", "arrays"}
    assert set(content.config_records["values"]) == {"json"}
    message = from_records(content)
    assert message.values.keys() <= values[kind].keys()
    for name, value in message.values.items():
        # Methods without training have no loss.
        assert type(value) is values[kind][name] or (name == "loss" and value is None), name
    for name, opened in message.arrays.items():
        (form,) = [each for pattern, each in arrays[kind].items() if re.fullmatch(pattern, name)]
        assert opened.dtype.name.startswith(form[0]), name
        assert form[1] in (0, opened.ndim), name
    assert set(content.array_records["arrays"]) == ({PACKED} if message.arrays else set())
    if message.arrays:
        check_file(content.array_records["arrays"][PACKED].data, message.arrays)


def check_file(data: bytes, arrays: Arrays) -> None:
    """Check that a file of arrays contains exactly the arrays in its header."""
    size = int.from_bytes(data[:8], "little")
    listed = {name: set(entry) for name, entry in json.loads(data[8 : 8 + size]).items()}
    assert listed == {name: {"dtype", "shape", "data_offsets"} for name in arrays}
    assert len(data) == 8 + size + sum(each.nbytes for each in arrays.values())
    assert size <= 130 * len(arrays)


def check_reading(late: dict[str, Any], num_classes: int, *, is_last: bool) -> None:
    assert late.keys() == {"table", "is_personal", "confusion", "metrics"}
    assert type(late["is_personal"]) is bool
    assert late["table"].keys() == {"local_test", "global_test"}
    for row in late["table"].values():
        assert row.keys() == set(PREDICTORS)
        assert all(value is None or 0 <= value <= 100 for value in row.values())
    assert set(late["table"]["global_test"].values()) == {None}
    if is_last:
        assert numpy.shape(late["confusion"]) == (num_classes, num_classes + 1)
        assert late["metrics"].keys() == set(METRICS)
        assert all(type(value) in (float, type(None)) for value in late["metrics"].values())
    else:
        assert late["confusion"] is None
        assert late["metrics"] is None


@pytest.mark.parametrize("method", [*METHODS, *SENT_ONCE, SCAFFOLD, "fed-dropout"])
def test_messages_contain_only_listed_fields(images: Path, tmp_path: Path, method: str) -> None:
    experiment = float64_experiment(images, method, rounds=2)
    federation = LoopbackFederation(experiment, tmp_path, methods=SCAFFOLD)
    federation.serve()
    grid = federation.grid
    # Each client introduces itself, answers each round and evaluates the last: one message each.
    wanted = ["query", *["train"] * (1 if method in SENT_ONCE else 2), "evaluate"]
    for name in ("client-0", "client-1", "client-2"):
        assert [kind_of(m) for n, m in grid.requests if n == name] == wanted
        assert [kind_of(m) for n, m in grid.replies if n == name] == wanted
    for _, request in grid.requests:
        check(request, DOWN, DOWN_ARRAYS)
    for _, reply in grid.replies:
        check(reply, UP, UP_ARRAYS)
        message = from_records(reply.content)
        if "late" in message.values:
            check_reading(message.values["late"], 3, is_last=kind_of(reply) == "evaluate")
        if kind_of(reply) == "train":
            sends_weights = any(name.startswith("averaged/") for name in message.arrays)
            assert sends_weights == (method not in ("local", "fedproto", *SENT_ONCE))
            sums = {name for name in message.arrays if name.startswith("summed/")}
            assert sums == {f"summed/{name}" for name in SENT_ONCE.get(method, ())}
            sends_prototypes = len(message.arrays["prototypes/vectors"]) > 0
            assert sends_prototypes == (method == "fedproto" or method.endswith("fedcl"))
    # There is no round before round 1 to evaluate.
    first = [from_records(m.content) for _, m in grid.replies if kind_of(m) == "train"][:3]
    assert all("late" not in message.values for message in first)


def test_messages_of_asynchronous_methods(images: Path, tmp_path: Path) -> None:
    experiment = float64_experiment(images, "aso-fed", rounds=2, systems__most_per_minute=0.0)
    federation = LoopbackFederation(experiment, tmp_path)
    federation.serve()
    for _, request in federation.grid.requests:
        check(request, DOWN, DOWN_ARRAYS)
    for _, reply in federation.grid.replies:
        check(reply, UP, UP_ARRAYS)
        message = from_records(reply.content)
        if "late" in message.values:
            check_reading(message.values["late"], 3, is_last=kind_of(reply) == "evaluate")


@pytest.mark.parametrize("method", ["fedprox", "fedlda"])
def test_messages_of_secure_aggregation(images: Path, tmp_path: Path, method: str) -> None:
    experiment = float64_experiment(images, method, rounds=2, secure_aggregation=True)
    federation = LoopbackFederation(experiment, tmp_path)
    federation.serve()
    rounds = 1 if method in SENT_ONCE else 2
    secure = "query.secure"
    wanted = ["query", *[secure, secure, "train", secure, secure] * rounds, "evaluate"]
    replies = [message for name, message in federation.grid.replies if name == "client-0"]
    assert [kind_of(message) for message in replies] == wanted
    for _, request in federation.grid.requests:
        check(request, DOWN, DOWN_ARRAYS)
    for _, reply in federation.grid.replies:
        check(reply, UP, UP_ARRAYS)
        message = from_records(reply.content)
        # Only masked values of an update are sent.
        if kind_of(reply) == "train":
            assert set(message.arrays) == {"masked"}
            assert message.values.keys() <= {"late"}


def test_sent_fields_match_the_documentation() -> None:
    rows = re.findall(r"^\| (`[^|]*) \|", DOCUMENT, re.MULTILINE)
    fields = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    fields = {name for name in fields if not name.startswith("--")}
    listed = {name for kinds in (UP, DOWN) for names in kinds.values() for name in names}
    patterns = [*UP_ARRAYS["train"], *POOL]
    plain = {name for name in patterns if re.fullmatch("[a-z/]+", name)}
    families = {"averaged/<parameter>", "summed/<name>", "params/<parameter>", "extra/<name>"}
    # Sent by clients with compression.
    families |= {"coding/<group>/<name>", "coding/prototypes"}
    assert fields == listed | plain | families | {"units/<layer>"}


def test_messages_contain_no_paths(tmp_path: Path) -> None:
    """Neither the paths of the server and the clients nor file names are sent."""
    federation = LoopbackFederation(
        folder_experiment(clients=3, dataset__root=tmp_path / "secret-root").replace(
            encoder__weights=tmp_path / "secret-weights"
        ),
        tmp_path / "secret-runs",
        count=0,
    )
    for node, name in enumerate(("north", "south", "west"), 1):
        place = save_pictures(tmp_path / f"secret-{name}", "cat", "dog")
        (place / "cat/0.png").rename(place / "cat/secret-patient.png")
        federation.bring(node, name, place)
    # One client has an invalid image file, another an empty folder.
    (tmp_path / "secret-south/dog/1.png").write_bytes(b"no picture")
    (tmp_path / "secret-west/owl").mkdir()
    record = federation.serve().history[0]
    assert record["clients"]["answered"] == ["north"]
    reason = "it cannot use its data, its encoder or its model; its own log contains the reason."
    assert record["remarks"]["refused"] == {"south": reason, "west": reason}
    for _, message in [*federation.grid.requests, *federation.grid.replies]:
        is_error = message.has_error()
        text = str(message.error.reason if is_error else from_records(message.content).values)
        assert "secret" not in text
        assert str(tmp_path) not in text


def test_client_min_cluster_size_limits_its_prototypes(images: Path, tmp_path: Path) -> None:
    experiment = float64_experiment(
        images, rounds=1, prototypes__per_class=5, prototypes__min_cluster_size=2
    )
    federation = LoopbackFederation(experiment, tmp_path, count=0)
    for share, least in enumerate((1, 3, 2)):
        federation.join(share, policy={"data": {"min_class_count": least}})
    federation.serve()
    for name, reply in federation.grid.replies:
        if kind_of(reply) == "train":
            counts = from_records(reply.content).arrays["prototypes/counts"]
            assert counts.min() >= (3 if name == "client-1" else 2)


@pytest.mark.parametrize(("method", "most"), [("mp-fedcl", 2), ("fedproto", 1)])
def test_message_sizes_match_the_documentation(tmp_path: Path, method: str, most: int) -> None:
    experiment = Experiment(method=method, rounds=1, clients=2).replace(
        dataset__train_size=200, partition__kind="iid", prototypes__per_class=2
    )
    federation = LoopbackFederation(experiment, tmp_path, data="")
    federation.serve()
    reply = next(m for _, m in federation.grid.replies if kind_of(m) == "train")
    message = from_records(reply.content)
    sizes = {
        group: sum(each.nbytes for name, each in message.arrays.items() if name.startswith(group))
        for group in ("averaged/", "prototypes/")
    }
    packed = reply.content.array_records["arrays"][PACKED].data
    assert len(packed) - sum(sizes.values()) < 110 * len(message.arrays)
    assert len(message.arrays["prototypes/labels"]) == 10 * most
    assert f"{sizes['prototypes/']:,} bytes" in DOCUMENT
    assert (sizes["averaged/"] == 0) == (method == "fedproto")
    if method == "mp-fedcl":
        assert f"{sizes['averaged/']:,} bytes" in DOCUMENT
    assert all(
        len(json.dumps(from_records(m.content).values)) < 1300 for _, m in federation.grid.replies
    )


RELEASED = {"global_classifier", "global_classifier_estimated", "global_prototype"}


def federation(root: Path, folder: Path, method: str, **changes: Any) -> LoopbackFederation:
    settings = {"privacy__epsilon": 3.0, "rounds": 2, "dtype": "float32", "clients": 3}
    return LoopbackFederation(float64_experiment(root, method, **settings | changes), folder)


def answers(found: LoopbackFederation, kind: str) -> dict[str, list[Message]]:
    by_client: dict[str, list[Message]] = {}
    for name, reply in found.grid.replies:
        assert isinstance(reply, FlowerMessage)
        if reply.metadata.message_type == kind:
            by_client.setdefault(name, []).append(from_records(reply.content))
    return by_client


@pytest.mark.parametrize("method", ["fedgauss", "fedncm", "fedridge", "fedavg", "mp-fedcl"])
def test_budget_hides_counts_losses_and_evaluations(
    images: Path, tmp_path: Path, method: str
) -> None:
    found = federation(images, tmp_path, method)
    result = found.serve()
    for hello in chain(*answers(found, "query").values()):
        assert hello.values["train"] == []
        assert hello.values["test"] == 0
    for messages in answers(found, "train").values():
        for message in messages:
            assert message.values["num_samples"] == 1
            assert message.values["loss"] is None
    late = [
        each.values["late"]
        for kind in ("train", "evaluate")
        for messages in answers(found, kind).values()
        for each in messages
        if "late" in each.values
    ]
    assert late
    for predictor in late:
        fields = {
            name for name, value in predictor["table"]["local_test"].items() if value is not None
        }
        assert fields <= RELEASED
        assert predictor["is_personal"] is False
    assert {tuple(each["train"]) for each in partition_of(found)} == {(0, 0, 0)}
    assert result.summary is not None
    assert all(record["clients"]["rejected"] == {} for record in result.history)
    assert result.summary["privacy"]["spent"] <= 3.0


def partition_of(found: LoopbackFederation) -> list[dict[str, Any]]:
    content = json.loads((found.path / "partition.json").read_text())
    return list(content["clients"].values())


@pytest.mark.parametrize("method", ["fedgauss", "fedncm", "fedridge"])
def test_local_model_adds_noise_to_every_value(images: Path, tmp_path: Path, method: str) -> None:
    changes = {"privacy__model": "local", "privacy__moments": True}
    found = federation(images, tmp_path, method, **changes)
    found.serve()
    experiment = found.experiment.resolved(find_method(method).defaults)
    data = load_federated_data(experiment)
    maker = find_method(method)(experiment, data.num_classes)
    for name, (message,) in answers(found, "train").items():
        client = data.client(name)
        exact = collect_statistics(maker, client.inputs, client.labels)
        assert {f"summed/{each}" for each in exact} | {
            f"prototypes/{each}" for each in ("vectors", "labels", "counts")
        } == set(message.arrays)
        assert len(message.arrays["prototypes/labels"]) == 0
        for field, value in exact.items():
            sent = message.arrays[f"summed/{field}"]
            assert sent.dtype == numpy.float32
            # No value is unchanged.
            assert not (sent == value.numpy()).any(), field
        assert message.values["processed"] == ["private statistics"]


@pytest.mark.parametrize("method", ["fedavg", "fedncm"])
def test_resumed_federation_sends_and_uses_the_same_noise(
    images: Path, tmp_path: Path, method: str
) -> None:
    noise_model = "local" if method == "fedncm" else "central"
    found = federation(images, tmp_path, method, privacy__model=noise_model)
    found.serve()
    model, ledger = load_tensors(found.path / "model.safetensors"), read_ledger(found.path)
    sent = answers(found, "train")
    last = 1 if method == "fedncm" else 2
    for file in (found.path / "checkpoint").glob(f"round-{last:06d}*"):
        file.unlink()
    (found.path / "summary.json").unlink()
    found.grid.replies.clear()
    found.resume()
    again = load_tensors(found.path / "model.safetensors")
    assert all(numpy.array_equal(again[name], value) for name, value in model.items())
    assert read_ledger(found.path) == ledger
    assert read_summary(found.path)["privacy"] == read_records(found.path)[-1]["privacy"]
    if method == "fedncm":
        for name, (message,) in answers(found, "train").items():
            for field, array in sent[name][0].arrays.items():
                assert numpy.array_equal(message.arrays[field], array)


def without_counts(_: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
    if request.metadata.message_type != "query":
        return reply
    return rewrite(reply, request, lambda values: values | {"train": []})


def test_client_without_counts_is_refused_without_budget(images: Path, tmp_path: Path) -> None:
    experiment = float64_experiment(images, "fedavg", network__patience=0.3)
    with pytest.raises(RunCutShort, match="it does not report its number of samples"):
        LoopbackFederation(experiment, tmp_path, without_counts).serve()


def test_budget_of_the_policy_limits_a_client_over_all_runs(images: Path, tmp_path: Path) -> None:
    changes = {"privacy__model": "local", "privacy__epsilon": 3.0, "network__patience": 0.3}
    experiment = float64_experiment(images, "fedncm", **changes)
    policy = {"budget": {"max_epsilon": 4.0, "required": True}}
    first = LoopbackFederation(experiment, tmp_path, policy=policy)
    first.serve()
    first.path = tmp_path / "second"
    (record,) = first.serve().history
    assert record["clients"]["answered"] == []
    (reason,) = set(record["clients"]["rejected"].values())
    assert reason.startswith("policy [budget] max_epsilon is 4; the server asked for 4.46 in total")
    ledger = json.loads((first.state_folder(0) / "released.json").read_text())
    (release,) = ledger["releases"]
    assert spent_epsilon({release["multiplier"]: 1}, 1e-5) == pytest.approx(3.0, abs=1e-3)
