"""Clients with their own folders: admission, joining and leaving."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from federations import LoopbackFederation, before_rounds, folder_experiment, rewrite, save_pictures
from flwr.app import Message as FlowerMessage

from mpfedcl.core.errors import InvalidInput, RunCutShort
from small_experiments import Json, Say, read_records

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("quick_network")]


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """Folders of three clients; none has all classes."""
    return {
        "north": save_pictures(tmp_path / "images-north", "cat", "dog"),
        "south": save_pictures(tmp_path / "images-south", "dog", "fox", count=4),
        "west": save_pictures(tmp_path / "images-west", "cat", "fox"),
    }


def gathered(tmp_path: Path, places: dict[str, Path], **changes: Any) -> LoopbackFederation:
    federation = LoopbackFederation(
        folder_experiment(**{"clients": len(places)} | changes), tmp_path, count=0
    )
    for node, (name, place) in enumerate(places.items(), 1):
        federation.bring(node, name, place)
    return federation


def refused(record: Json) -> dict[str, str]:
    found: dict[str, str] = record["remarks"].get("refused", {})
    return found


def answered(path: Path) -> list[list[str]]:
    return [record["clients"]["answered"] for record in read_records(path)]


def test_classes_are_those_of_all_clients(
    tmp_path: Path, places: dict[str, Path], said: Say
) -> None:
    run = gathered(tmp_path, places).serve()
    assert run.experiment.dataset.classes == ("cat", "dog", "fox")
    assert answered(run.path) == [["north", "south", "west"]] * 2
    partition = json.loads((run.path / "partition.json").read_text())
    assert partition["classes"] == ["cat", "dog", "fox"]
    for name, sizes in {"south": [0, 4, 4], "west": [6, 0, 6]}.items():
        told = partition["clients"][name]
        assert sum(told["train"]) + told["test"] == sum(sizes)
        assert all(count <= size for count, size in zip(told["train"], sizes, strict=True))
    assert run.summary is not None
    assert list(run.summary["accuracy_per_client"]) == ["north", "south", "west"]
    confusion = json.loads((run.path / "confusion.json").read_text())
    tested = sum(map(sum, confusion["clients"]["south"]))
    assert tested == partition["clients"]["south"]["test"] > 0
    code, out, err = said("report", run.path, "--out", tmp_path / "report.html")
    assert (code, err) == (0, ""), out
    page = (tmp_path / "report.html").read_text()
    assert "fox" in page


def test_client_with_a_class_outside_dataset_classes_is_refused(
    tmp_path: Path, places: dict[str, Path]
) -> None:
    places["odd"] = save_pictures(tmp_path / "images-odd", "cat", "owl")
    run = gathered(tmp_path, places, dataset__classes=("cat", "dog", "fox")).serve()
    assert answered(run.path)[0] == ["north", "south", "west"]
    (reason,) = refused(read_records(run.path)[0]).values()
    assert reason == "it has the class 'owl', which the experiment does not have."


def test_late_client_with_unknown_class_is_refused(tmp_path: Path, places: dict[str, Path]) -> None:
    odd = save_pictures(tmp_path / "images-odd", "cat", "owl")
    federation = gathered(tmp_path, places, rounds=3)
    run = federation.serve(before_rounds({2: lambda: federation.bring(9, "odd", odd)}))
    assert answered(run.path) == [["north", "south", "west"]] * 3
    assert "'owl'" in refused(read_records(run.path)[1])["odd"]


def test_refused_client_is_asked_again(tmp_path: Path, places: dict[str, Path]) -> None:
    places["odd"] = save_pictures(tmp_path / "images-odd", "cat", "owl")
    federation = gathered(
        tmp_path, places, dataset__classes=("cat", "dog", "fox"), rounds=3, clients=3
    )
    mend = before_rounds({2: lambda: shutil.rmtree(places["odd"] / "owl")})
    assert [len(each) for each in answered(federation.serve(mend).path)] == [3, 4, 4]
    assert refused(read_records(federation.path)[2]) == {}


@pytest.mark.parametrize("first", ["odd", "others"])
def test_most_common_data_format_wins(tmp_path: Path, places: dict[str, Path], first: str) -> None:
    odd = save_pictures(tmp_path / "images-odd", "cat", "dog", size=8)
    federation = gathered(tmp_path, places)
    node = 0 if first == "odd" else 9
    federation.grid.nodes = {node: ("", {}), **federation.grid.nodes}
    federation.bring(node, "odd", odd)
    federation.experiment = federation.experiment.replace(clients=4)
    run = federation.serve()
    assert answered(run.path) == [["north", "south", "west"]] * 2
    for record in read_records(run.path):
        assert "its inputs have 64 values, the others' 36" in refused(record)["odd"]


def test_another_encoder_is_refused(tmp_path: Path, places: dict[str, Path]) -> None:
    def tamper(client: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if client == "west" and str(request.metadata.message_type) == "query":
            return rewrite(reply, request, values=lambda v: {**v, "encoder": "another"})
        return reply

    federation = gathered(tmp_path, places, rounds=1)
    federation.grid._tamper = tamper
    (record,) = federation.serve().history
    assert record["clients"]["answered"] == ["north", "south"]
    assert refused(record) == {"west": "its encoder is not the others'"}


def test_client_reconnects_under_a_new_node(tmp_path: Path, places: dict[str, Path]) -> None:
    federation = gathered(tmp_path, places, method="fedproto", rounds=4)

    def move() -> None:
        del federation.grid.nodes[1]
        federation.bring(77, "north", places["north"])

    moved = federation.serve(before_rounds({3: move}))
    stayed = gathered(tmp_path / "stayed", places, method="fedproto", rounds=4).serve()
    assert [r["accuracy"] for r in moved.history] == [r["accuracy"] for r in stayed.history]
    assert answered(moved.path) == answered(stayed.path)


def test_clients_join_and_leave_between_rounds(tmp_path: Path, places: dict[str, Path]) -> None:
    federation = gathered(tmp_path, places, rounds=4, dataset__classes=("cat", "dog", "fox"))
    late = federation.grid.nodes.pop(3)
    actions = {
        2: lambda: federation.grid.nodes.pop(1),
        3: lambda: federation.grid.nodes.update({3: late}),
    }
    run = federation.serve(before_rounds(actions))
    assert answered(run.path) == [
        ["north", "south"],
        ["south"],
        ["south", "west"],
        ["south", "west"],
    ]
    records = read_records(run.path)
    assert [r["clients"]["missing"] for r in records] == [[], ["north"], ["north"], ["north"]]
    assert records[1]["remarks"]["missing"] == {"north": "not connected"}
    assert records[3]["remarks"]["closing"]["missing"] == {"north": "not connected"}
    # The label counts of a client that has left are kept.
    partition = json.loads((run.path / "partition.json").read_text())
    assert list(partition["clients"]) == ["north", "south", "west"]


def test_run_is_cut_short_without_clients(tmp_path: Path, places: dict[str, Path]) -> None:
    federation = gathered(tmp_path, places, rounds=3)
    nodes = dict(federation.grid.nodes)
    with pytest.raises(RunCutShort) as end:
        federation.serve(before_rounds({2: federation.grid.nodes.clear}))
    assert str(end.value) == (
        f"min_clients is 1; fewer are left after 0.3 s of waiting. Resume it with --resume "
        f"{federation.path}"
    )
    federation.grid.nodes = nodes
    assert federation.resume().summary is not None
    assert len(read_records(federation.path)) == 3


def test_too_few_clients_end_the_run(tmp_path: Path, places: dict[str, Path]) -> None:
    federation = gathered(tmp_path, places, min_clients=4, clients=4)
    with pytest.raises(RunCutShort, match=r"^min_clients is 4; fewer were connected after 0.3 s"):
        federation.serve()
    assert not federation.path.exists()


def test_client_without_introduction_does_not_delay_the_run(
    tmp_path: Path, places: dict[str, Path]
) -> None:
    federation = gathered(tmp_path, places, rounds=1)
    federation.grid._tamper = lambda client, _, reply: None if client == "west" else reply
    assert answered(federation.serve().path) == [["north", "south"]]


@pytest.mark.parametrize(
    ("enough", "why"), [(0.6, "enough others had answered"), (1.0, "no answer within 20 s")]
)
def test_round_closes_by_enough_answers_or_deadline(
    tmp_path: Path, places: dict[str, Path], enough: float, why: str
) -> None:
    changes = {"network__enough": enough, "network__round_timeout": 20.0, "rounds": 1}
    federation = gathered(tmp_path, places, **changes)

    def hang(client: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage | None:
        is_training = str(request.metadata.message_type) == "train"
        return None if client == "north" and is_training else reply

    federation.grid._tamper = hang
    (record,) = federation.serve().history
    assert record["clients"] == {
        "answered": ["south", "west"],
        "missing": ["north"],
        "rejected": {},
    }
    assert record["remarks"]["missing"] == {"north": why}
    # The closing evaluation waits for all clients, whatever is enough for a round.
    assert list(record["accuracy_per_client"]) == ["north", "south", "west"]


def test_changed_data_during_a_run_costs_one_round(tmp_path: Path, places: dict[str, Path]) -> None:
    """An outdated introduction costs the client one round, not all of them."""
    federation = gathered(tmp_path, places, rounds=4)
    more = before_rounds({2: lambda: save_pictures(places["north"], "cat", count=40)})
    run = federation.serve(more)
    assert [len(each) for each in answered(run.path)] == [3, 2, 3, 3]
    reason = read_records(run.path)[1]["clients"]["rejected"]["north"]
    found = re.fullmatch(r"num_samples is (\d+); this client has (\d+)", reason)
    assert found is not None
    partition = json.loads((run.path / "partition.json").read_text())
    assert sum(partition["clients"]["north"]["train"]) == int(found[1]) > int(found[2])


def test_clients_are_sampled_from_connected_ones(tmp_path: Path, places: dict[str, Path]) -> None:
    federation = gathered(tmp_path, places, method="fedavg", rounds=5, fraction=0.34)
    leave = before_rounds({2: lambda: [federation.grid.nodes.pop(n) for n in (1, 2)]})
    run = federation.serve(leave)
    assert answered(run.path)[1:] == [["west"]] * 4
    assert read_records(run.path)[4]["clients"]["missing"] == ["north", "south"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"train": [10**12, 0, 0]}, "1000000000000 samples; network.max_images is 10000000"),
        ({"train": [0, 0, 0]}, "train must have at least one image"),
        ({"train": [-1, 5, 1]}, "train.0 is -1: "),
        ({"train": [True, 5, 1]}, "train.0 is True: "),
        ({"classes": ["cat", "c\nt"]}, "classes.1 is 'c\\nt': "),
        ({"classes": ["cat", "cat"]}, "classes must be named once each"),
        ({"classes": ["x" * 10**6, "y"]}, "classes.0 is 'xxx"),
        ({"classes": [str(n) for n in range(10**5)]}, "classes is ['0', '1'"),
        ({"input_size": 2**31}, "input_size is 2147483648: "),
        ({"encoder": "x" * 1000}, "encoder is 'xxx"),
        ({"test": "all"}, "test is 'all': "),
        ({"train": [10**400, 5, 1]}, "train.0 is 1000"),
        ({"classes": [["cat"], "dog"]}, "classes.0 is ['cat']: "),
        ({"image_shape": {"height": 6}}, "image_shape is {'height': 6}: "),
        ({"image_shape": 6}, "image_shape is 6: "),
        ({"samples": {}}, "samples is {}: "),
    ],
)
def test_malformed_introduction_is_refused(
    tmp_path: Path, places: dict[str, Path], changes: Json, reason: str
) -> None:
    def boast(client: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if client == "west" and str(request.metadata.message_type) == "query":
            return rewrite(reply, request, values=lambda v: {**v, **changes})
        return reply

    known = {"dataset__classes": ("cat", "dog", "fox"), "network__patience": 0.05}
    federation = gathered(tmp_path, places, method="fedavg", rounds=1, **known)
    federation.grid._tamper = boast
    (record,) = federation.serve().history
    assert record["clients"]["answered"] == ["north", "south"]
    (reported,) = refused(record).values()
    assert reason in reported


def test_federation_with_one_class_is_refused(tmp_path: Path) -> None:
    federation = LoopbackFederation(folder_experiment(clients=1), tmp_path, count=0)
    federation.bring(1, "north", save_pictures(tmp_path / "images", "cat"))
    with pytest.raises(InvalidInput, match="the clients have only the class cat"):
        federation.serve()


@pytest.mark.parametrize("method", ["mp-fedcl", "fedavg", "fedgauss"])
def test_client_without_test_samples_takes_part(
    tmp_path: Path, places: dict[str, Path], method: str
) -> None:
    places["tiny"] = save_pictures(tmp_path / "images-tiny", "cat", "dog", count=1)
    federation = gathered(tmp_path, places, method=method)
    del federation.grid.nodes[4]
    policy = {"data": {"test_fraction": 1e-9}}
    federation.bring(4, "tiny", places["tiny"], policy=policy)
    run = federation.serve()
    assert {tuple(each) for each in answered(run.path)} == {("north", "south", "tiny", "west")}
    record = read_records(run.path)[-1]
    assert not record["clients"]["rejected"]
    assert record["accuracy_per_client"]["tiny"] is None
    assert run.summary is not None
    assert run.summary["accuracy"] is not None
