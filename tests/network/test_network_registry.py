"""The client registry: agreed classes, clients with npz files or encoders, unknown nodes."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from federations import LoopbackFederation, folder_experiment, save_pictures
from hypothesis import given
from hypothesis import strategies as st

from mpfedcl import Predictor
from mpfedcl.core.errors import InvalidInput, RunCutShort
from mpfedcl.data.samples import ImageFormat
from mpfedcl.experiment import Experiment
from mpfedcl.network.packing import Introduction
from mpfedcl.network.server.registry import ClientRegistry, agree_on_classes
from mpfedcl.network.server.status import Status
from mpfedcl.network.transport import KILLED, AnswerLimit, Kind, Message, Reply
from small_experiments import VirtualTime, read_records, save_images

DIGITS = tuple("0123456789")
TWELVE = tuple(f"{number:02d}" for number in range(12))


def member(name: str, *classes: str, input_size: int = 9, encoder: str = "") -> Introduction:
    counts = (1,) * len(classes)
    return Introduction(name, classes, counts, 0, input_size, encoder, "images", (), own_data=True)


def agreed(*lists: tuple[str, ...]) -> tuple[str, ...]:
    experiment, odd = agree_on_classes(Experiment(), named(*lists))
    assert odd == {}
    return experiment.dataset.classes


def named(*lists: tuple[str, ...]) -> dict[str, Introduction]:
    return {f"client-{n}": member(f"client-{n}", *each) for n, each in enumerate(lists)}


def test_classes_of_clients_are_merged_in_order() -> None:
    assert agreed(("dog", "cat"), ("ant", "dog")) == ("ant", "cat", "dog")
    # Labels of npz files: a client with fewer classes has the first ones.
    assert agreed(DIGITS[:3], DIGITS, DIGITS[:5]) == DIGITS
    assert agreed(DIGITS[:2], ("cat", "dog")) == ("0", "1", "cat", "dog")


@pytest.mark.parametrize(
    ("lists", "reason"),
    [
        (
            (DIGITS, DIGITS, TWELVE),
            "it has classes by number, 00, 01, 02, 03, 04, 05, 06, 07, 08, 09, 10, 11, which are "
            "not the first of all clients' classes, 0, 00, 01, 02, 03, 04, 05, 06, 07, 08, 09, 1 "
            "and 10 more: dataset.classes must name the classes in order",
        ),
        (
            (("cat", "dog"), ("dog", "+fox"), DIGITS[:2]),
            "it has classes by number, 0, 1, which are not the first of all clients' classes, "
            "+fox, 0, 1, cat, dog: dataset.classes must name the classes in order",
        ),
        (
            (DIGITS[:2], DIGITS[:3], ("+a", "b")),
            "with it client-0 has classes by number, 0, 1, which are not the first of all clients' "
            "classes, +a, 0, 1, 2, b: dataset.classes must name the classes in order",
        ),
    ],
)
def test_client_with_incompatible_labels_is_excluded(
    lists: tuple[tuple[str, ...], ...], reason: str
) -> None:
    """Label 2 of an npz file is the third class: it must not become another's first."""
    experiment, odd = agree_on_classes(Experiment(), named(*lists))
    assert odd == {"client-2": reason}
    assert experiment.dataset.classes == agreed(*lists[:2])


@given(
    st.lists(
        st.one_of(st.sampled_from([*DIGITS, *TWELVE, "cat", "+a"]), st.text("01٣²ab", min_size=1)),
        min_size=1,
        max_size=4,
        unique=True,
    )
)
def test_one_client_cannot_break_class_agreement_of_two_others(odd_classes: list[str]) -> None:
    """The class numbers of accepted clients do not change."""
    members = named(("0", "1", "2"), tuple(odd_classes), ("0", "1"))
    experiment, odd = agree_on_classes(Experiment(), members)
    classes = list(experiment.dataset.classes)
    assert odd.keys() <= {"client-1"}
    kept = [each for name, each in members.items() if name not in odd]
    assert classes == sorted({name for each in kept for name in each.classes})
    for each in kept:
        if all(name.isdecimal() for name in each.classes):
            assert list(each.classes) == classes[: len(each.classes)]


def test_shares_of_one_dataset_have_exactly_its_classes() -> None:
    shares = {n: replace(each, own_data=False) for n, each in named(*[DIGITS[:3]] * 2).items()}
    assert agree_on_classes(Experiment(), shares)[1] == {}
    malicious = member("a", *DIGITS[:3], "zebra")
    experiment, odd = agree_on_classes(Experiment(), {**shares, "a": malicious})
    assert odd.keys() == {"a"}
    assert experiment.dataset.classes == DIGITS[:3]


def test_configured_classes_are_kept() -> None:
    given_classes = Experiment().replace(dataset__classes=("b", "a"))
    members = {"x": member("x", "a", "c")}
    assert agree_on_classes(given_classes, members) == (given_classes, {})


def test_client_with_too_many_classes_is_excluded() -> None:
    many = tuple(f"class {number:05d}" for number in range(10_000))
    members = {**named(("cat", "dog"), ("cat", "fox")), "a": member("a", *many[:999])}
    experiment, odd = agree_on_classes(Experiment(), members)
    assert experiment.dataset.classes == ("cat", "dog", "fox")
    limit = "at most 1,000 unless dataset.classes names them"
    assert odd == {"a": f"with its 999 classes there are 1,002; {limit}"}
    experiment, odd = agree_on_classes(Experiment(), {**members, "a": member("a", *many)})
    assert experiment.dataset.classes == ("cat", "dog", "fox")
    assert odd == {"a": f"with its 10,000 classes there are 10,003; {limit}"}
    experiment, odd = agree_on_classes(Experiment(), {**members, "a": member("a", *many[:997])})
    assert (len(experiment.dataset.classes), odd) == (1000, {})
    with pytest.raises(
        InvalidInput, match=r"^all clients are refused\. a: with its 10,000 classes"
    ):
        agree_on_classes(Experiment(), {"a": member("a", *many)})


class KilledOnce:
    """A transport with one node, which is killed when it is first asked who it is."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def connected_nodes(self) -> Mapping[int, str]:
        return {1: "good"}

    def send(
        self, kind: Kind, messages: Mapping[int, Message], timeout: float, *, seconds: float
    ) -> dict[int, str]:
        self.sent += messages
        return {node: str(node) for node in messages}

    def receive(self, limits: Mapping[str, AnswerLimit], seconds: float) -> list[Reply]:
        if len(self.sent) == 1:
            return [Reply(each, failure="failed", reason=KILLED) for each in limits]
        return [Reply(each, member("good", "a", "b").to_message()) for each in limits]


def test_client_killed_during_introduction_does_not_use_up_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    virtual, transport = VirtualTime(), KilledOnce()
    monkeypatch.setattr("mpfedcl.network.server.registry.time", virtual)
    experiment = Experiment(clients=1).replace(network__patience=60.0)
    registry = ClientRegistry(experiment, transport, Status(None))
    registry.wait_for_clients()
    assert list(registry.members) == ["good"]
    assert registry.refused == {}
    assert transport.sent == [1, 1]
    assert virtual.now < 10


class Answers:
    """A transport whose nodes answer as given: an introduction, or the reason of a refusal."""

    def __init__(self, answers: Mapping[str, str]) -> None:
        self.answers = dict(answers)

    def connected_nodes(self) -> Mapping[int, str]:
        return dict(enumerate(self.answers, 1))

    def send(
        self, kind: Kind, messages: Mapping[int, Message], timeout: float, *, seconds: float
    ) -> dict[int, str]:
        return {node: self.connected_nodes()[node] for node in messages}

    def receive(self, limits: Mapping[str, AnswerLimit], seconds: float) -> list[Reply]:
        return [
            Reply(name, failure="failed", reason=why)
            if (why := self.answers[name])
            else Reply(name, member(name, "a", "b").to_message())
            for name in limits
        ]


def registry_of(
    answers: Mapping[str, str], monkeypatch: pytest.MonkeyPatch, **changes: int
) -> tuple[ClientRegistry, VirtualTime]:
    virtual = VirtualTime()
    monkeypatch.setattr("mpfedcl.network.server.registry.time", virtual)
    experiment = Experiment(clients=3, **changes).replace(network__patience=300.0)
    return ClientRegistry(experiment, Answers(answers), Status(None)), virtual


NO = "its policy allows no such method."


@pytest.mark.parametrize(
    ("answers", "min_clients"),
    [
        ({"a": NO, "b": NO, "c": NO}, 1),
        # One takes part, but two refuse, and the run needs two.
        ({"a": NO, "b": NO, "c": ""}, 2),
        # The third has not come, and would not be enough.
        ({"a": NO, "b": NO}, 2),
    ],
)
def test_run_ends_at_once_if_too_many_clients_refuse(
    monkeypatch: pytest.MonkeyPatch, answers: Mapping[str, str], min_clients: int
) -> None:
    registry, virtual = registry_of(answers, monkeypatch, min_clients=min_clients)
    with pytest.raises(RunCutShort) as caught:
        registry.wait_for_clients()
    assert virtual.now < 5
    reason = f"min_clients is {min_clients}; too many clients refuse or cannot take part."
    refusals = "".join(f" {name}: {NO}" for name, why in answers.items() if why)
    assert str(caught.value).startswith(f"{reason}{refusals}")


@pytest.mark.parametrize(
    "answers", [{"a": NO, "b": NO}, {"a": NO, "b": ""}, dict.fromkeys("abc", KILLED)]
)
def test_run_waits_while_enough_clients_may_come(
    monkeypatch: pytest.MonkeyPatch, answers: Mapping[str, str]
) -> None:
    registry, virtual = registry_of(answers, monkeypatch)
    if "" in answers.values():
        registry.wait_for_clients()
    else:
        with pytest.raises(RunCutShort, match=r"fewer were connected after 300 s of waiting\. a:"):
            registry.wait_for_clients()
    assert virtual.now >= 300


def test_run_under_way_ends_at_once_if_all_clients_begin_to_refuse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = {"a": "", "b": "", "c": ""}
    registry, virtual = registry_of(answers, monkeypatch)
    transport = registry._transport
    assert isinstance(transport, Answers)
    registry.wait_for_clients()
    assert len(registry.find_connected()) == 3
    transport.answers |= dict.fromkeys(answers, NO)
    registry.ask_for_introduction(list(answers))
    with pytest.raises(RunCutShort, match=r"too many clients refuse or cannot take part\. a: its"):
        registry.find_connected()
    assert virtual.now < 5


@pytest.mark.whole
@pytest.mark.usefixtures("quick_network")
def test_clients_with_own_npz_files_take_part(tmp_path: Path) -> None:
    save_images(tmp_path / "few/x.npz", num_train=9, num_test=6, num_classes=3)
    save_images(tmp_path / "many/x.npz", num_train=15, num_test=5, num_classes=5)
    federation = LoopbackFederation(folder_experiment(clients=2), tmp_path, count=0)
    federation.bring(1, "few", tmp_path / "few")
    federation.bring(2, "many", tmp_path / "many" / "x.npz")
    run = federation.serve()
    assert run.experiment.dataset.classes == tuple("01234")
    held = json.loads((run.path / "partition.json").read_text())["clients"]
    assert held["few"] == {"train": [3, 3, 3, 0, 0], "test": 6}
    assert held["many"] == {"train": [3] * 5, "test": 5}
    assert read_records(run.path)[1]["clients"]["answered"] == ["few", "many"]


@pytest.mark.whole
@pytest.mark.usefixtures("quick_network", "own_places")
def test_random_filters_need_images_of_one_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The method brings the encoder along; images must be of one size, which is on record."""
    (tmp_path / "filtered.py").write_text(
        "from mpfedcl.methods.fedavg import FedAvg\n"
        "class Filtered(FedAvg):\n"
        "    name = 'filtered'\n"
        "    defaults = {**FedAvg.defaults, 'encoder__name': 'random-filters'}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    changes = {
        "dataset__name": "mnist-sample",
        "encoder__name": None,
        "rounds": 1,
        "clients": 3,
        "min_clients": 2,
    }
    experiment = folder_experiment("filtered:Filtered", **changes)
    federation = LoopbackFederation(experiment, tmp_path, count=0)
    for node, (name, size) in enumerate({"one": 10, "two": 10, "wide": 12}.items(), 1):
        place = save_pictures(tmp_path / name, "cat", "dog", count=6, size=size)
        federation.bring(node, name, place, methods="filtered:Filtered")
    result = federation.serve()
    assert result.experiment.encoder.name == "random-filters"
    assert result.history[0]["clients"]["answered"] == ["one", "two"]
    known = json.loads((federation.path / "federation.json").read_text())
    assert (known["input_size"], known["image_shape"]) == (1024, [10, 10])
    assert len(federation.resume(rounds=2).history) == 2
    predictor = Predictor.load(federation.path)
    assert predictor.trained.input_format == ImageFormat(10, 10, is_color=False)
    (said,) = predictor.predict([tmp_path / "wide" / "cat" / "0.png"])
    assert said.classifier.label in ("cat", "dog")
    alone = LoopbackFederation(experiment.replace(min_clients=3), tmp_path / "alone", count=0)
    alone.grid.nodes = federation.grid.nodes
    with pytest.raises(RunCutShort, match="wide: its images are 12 x 12, the others' 10 x 10"):
        alone.serve()


@pytest.mark.whole
@pytest.mark.usefixtures("quick_network", "own_places", "drawn_once")
def test_encoder_accepts_images_of_any_size(tmp_path: Path) -> None:
    """Pictures of any size become features of one length; the server needs no encoder."""
    changes = {"encoder__name": "random-resnet18", "rounds": 1, "clients": 2}
    federation = LoopbackFederation(folder_experiment("mp-fedcl", **changes), tmp_path, count=0)
    for node, (name, size) in enumerate({"small": 20, "large": 40}.items(), 1):
        place = save_pictures(tmp_path / name, "cat", "dog", count=6, size=size)
        federation.bring(node, name, place)
    (record,) = federation.serve().history
    assert record["clients"]["answered"] == ["large", "small"]
    form = json.loads((federation.path / "federation.json").read_text())
    assert form["input_size"] == 512
    assert len(form["encoder"]) > 10
    assert numpy.isfinite(record["loss"])
