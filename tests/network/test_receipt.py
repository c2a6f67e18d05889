"""The receipt lists exactly the fields of a federation's messages."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from asking_server_messages import LyingServer
from federations import (
    LoopbackFederation,
    float64_experiment,
    folder_experiment,
    save_pictures,
)

from command_results import Refused, Said
from mpfedcl.experiment import Experiment
from mpfedcl.methods import find_method
from mpfedcl.network.client.policy import ClientPolicy
from mpfedcl.network.receipt import Receipt, make_receipt
from mpfedcl.network.setup.folders import ClientSettings, make_federation
from mpfedcl.network.transport import Message
from opened_records import from_records
from small_experiments import Say

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("quick_network")]

KINDS = {"query": "hello", "train": "round", "evaluate": "close"}


def receipt_for(experiment: Experiment, share: int, least: int = 1) -> Receipt:
    settings = ClientSettings(
        name="client-0",
        state=Path("nowhere"),
        share=share,
        data=experiment.dataset.root,
        policy=ClientPolicy(data={"min_class_count": least}),
    )
    return make_receipt(experiment, settings)


def sizes(message: Message) -> dict[str, int]:
    arrays = {name: array.nbytes for name, array in message.arrays.items()}
    return {name: len(json.dumps(value)) for name, value in message.values.items()} | arrays


@pytest.mark.parametrize("method", ["fedgauss", "mp-fedcl"])
@pytest.mark.parametrize("epsilon", [None, 3.0])
def test_receipt_lists_exactly_the_bytes_that_are_sent(
    images: Path, tmp_path: Path, method: str, epsilon: float | None
) -> None:
    experiment = float64_experiment(images, method, rounds=1, privacy__epsilon=epsilon)
    federation = LoopbackFederation(experiment, tmp_path)
    federation.serve()
    receipt = receipt_for(experiment.resolved(find_method(method).defaults), 0)
    for name, reply in federation.grid.replies:
        if name != "client-0":
            continue
        kind = KINDS[str(reply.metadata.message_type)]
        sent = sizes(from_records(reply.content))
        listed = {each.name: each.num_bytes for each in receipt.fields if each.message == kind}
        assert listed.keys() == sent.keys()
        # Losses and evaluations differ by some digits, because the model is a different one.
        free = {"late", "loss"}
        assert {n: s for n, s in listed.items() if n not in free} == {
            n: s for n, s in sent.items() if n not in free
        }
    assert receipt.epsilon == (None if epsilon is None else pytest.approx(3.0, abs=1e-3))
    assert not Path("nowhere").exists()


def test_int8_scales_depend_on_all_training_samples(images: Path) -> None:
    experiment = float64_experiment(images, "mp-fedcl", update__compress="int8")
    receipt = receipt_for(experiment.resolved(), 0)
    least = {each.name: each.least for each in receipt.fields}
    scales = [name for name in least if name.startswith("coding/averaged/")]
    assert scales
    assert {least[name] for name in scales} == {receipt.train}


def test_fields_of_only_the_last_round_are_listed(images: Path) -> None:
    listed: dict[str, dict[str, int]] = {}
    for method in ("mpfed", "mp-fedcl", "fedavg"):
        experiment = float64_experiment(images, method, rounds=3)
        receipt = receipt_for(experiment.resolved(find_method(method).defaults), 0)
        listed[method] = {e.name: e.num_bytes for e in receipt.fields if e.message == "round"}
    vectors = {method: sizes["prototypes/vectors"] for method, sizes in listed.items()}
    assert vectors["mpfed"] == vectors["mp-fedcl"] > vectors["fedavg"]


def least_of(receipt: Receipt) -> dict[str, int | None]:
    return {f"{each.message} {each.name}": each.least for each in receipt.fields}


def test_receipt_states_the_fewest_samples_behind_a_value(tmp_path: Path) -> None:
    images = numpy.random.default_rng(0).integers(0, 255, (14, 6, 6), dtype=numpy.uint8)
    # With a test set of its own: 4 and 3 images train, 7 test.
    labels = numpy.array([0] * 4 + [1] * 3)
    split: dict[str, Any] = {
        "x_train": images[:7],
        "y_train": labels,
        "x_test": images[7:],
        "y_test": labels,
    }
    numpy.savez(tmp_path / "own.npz", **split)
    experiment = Experiment(method="fedlda").replace(encoder__name="none")
    settings = ClientSettings(name="me", state=tmp_path, data=tmp_path / "own.npz")
    found = least_of(make_receipt(experiment, settings))
    assert found["hello train"] == 3
    assert found["hello test"] == 7
    assert found["round num_samples"] == 7
    assert found["round summed/counts"] == found["round summed/sums"] == 3
    assert found["round summed/within"] == found["round summed/scatter"] == 7
    # An entry of the confusion matrix may count a single image.
    assert found["close late"] == 1
    kept = make_receipt(
        experiment,
        replace(settings, policy=ClientPolicy(data={"min_class_count": 4})),
    )
    assert kept.least == 4
    assert kept.below(4) == []
    assert {each.name for each in kept.below(5)} == {
        "train", "num_samples", "summed/counts", "summed/sums", "summed/scatter", "summed/within",
    }  # fmt: skip


def write_settings(path: Path, **changes: Any) -> Path:
    experiment = Experiment(method="mp-fedcl").replace(
        **{"encoder__name": "none", "model__hidden": (8,)} | changes
    )
    path.write_text(experiment.to_toml())
    return path


def test_receipt_command_shows_every_field(tmp_path: Path, said: Say) -> None:
    save_pictures(tmp_path / "local_test", "cat", "dog", count=12)
    file = write_settings(tmp_path / "settings.toml", method="fedncm", privacy__epsilon=2.0)
    code, out, _ = said("privacy", "receipt", file, "--data", tmp_path / "local_test")
    assert code == 0
    assert "summed/counts" in out
    assert "Privacy budget: epsilon 2 at delta 1e-05 for one image" in out
    assert "max_epsilon_per_run = 3.0" in out
    # The server adds the noise, so only the noisy answer is covered.
    covered, _, rest = out.partition("not covered: sent as it is")
    assert "late" in covered
    assert "summed/counts" in rest
    assert "Nothing was sent." in out


def test_receipt_of_a_client_has_its_policy_split_and_ledger(tmp_path: Path, said: Say) -> None:
    folder = make_federation(tmp_path / "lab", ["north"], None, 9800).root / "clients" / "north"
    data = save_pictures(tmp_path / "own", "cat", "dog", count=12)
    changes = {"privacy__epsilon": 2.0, "privacy__model": "local"}
    server = LyingServer(folder_experiment("fedncm", **changes), data, folder / "memory", {})
    server.ask()
    before = {path.name: path.read_bytes() for path in (folder / "memory").glob("*.*")}
    (folder / "policy.toml").write_text("[budget]\nmax_epsilon = 5\n[evaluation]\nanswers = 'none'")
    file = write_settings(tmp_path / "settings.toml", method="fedncm", **changes)
    words = ("privacy", "receipt", file, "--data", data, "--client", folder)
    code, out, _ = said(*words, "--json")
    assert code == 0
    receipt = json.loads(out)
    assert server.client.loaded is not None
    assert receipt["train"] == len(server.client.loaded[1].clients[0].labels)
    assert receipt["policy"]["budget"]["max_epsilon"] == 5
    assert receipt["spent"]["training sample"] == pytest.approx(2, abs=1e-3)
    costs = {each["name"]: each["epsilon"] for each in receipt["fields"]}
    assert costs["summed/sums"] == pytest.approx(2, abs=1e-3)
    assert costs["late"] is costs["classes"] is None
    # A dry run spends nothing.
    assert before == {path.name: path.read_bytes() for path in (folder / "memory").glob("*.*")}
    (folder / "policy.toml").write_text("[budget]\nmax_epsilon = 2\nmax_epsilon_per_run = 2")
    code, _, err = said(*words)
    assert code == 2
    assert "policy [budget] max_epsilon is 2; the server asked for" in err


def test_receipt_command_fails_if_no_class_reaches_the_threshold(
    tmp_path: Path, refused: Refused
) -> None:
    # Each class has only twelve images, fewer than the threshold.
    save_pictures(tmp_path / "local_test", "cat", "dog", count=12)
    file = write_settings(tmp_path / "settings.toml")
    words = ("privacy", "receipt", file, "--data", tmp_path / "local_test", "--threshold", 13)
    assert "train must have at least one image" in refused(*words)


def test_receipt_as_json_has_the_same_fields(tmp_path: Path, said: Say) -> None:
    save_pictures(tmp_path / "local_test", "cat", "dog", count=12)
    file = write_settings(tmp_path / "settings.toml")
    words = (
        "privacy",
        "receipt",
        file,
        "--data",
        tmp_path / "local_test",
        "--threshold",
        2,
        "--json",
    )
    code, out, _ = said(*words)
    assert code == 0
    receipt = json.loads(out)
    assert receipt["epsilon"] is None
    assert receipt["policy"]["data"]["min_class_count"] == 2
    assert receipt["spent"] == {
        "training sample": 0, "all training samples": 0, "test sample": 0
    }  # fmt: skip
    assert receipt["least"] >= 2
    assert {"message", "name", "numbers", "num_bytes", "least", "epsilon"} == set(
        receipt["fields"][0]
    )


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["privacy", "receipt", "nowhere.toml", "--share", "0"], "nowhere.toml does not exist"),
        (["privacy", "receipt", "nowhere.toml"], "one of --data and --share must be given"),
        (
            ["privacy", "receipt", "x", "--share", "0", "--threshold", "0"],
            "threshold is 0; it must be at least 1",
        ),
        (["privacy", "plan", "--epsilon", "0"], "privacy.epsilon is 0"),
        (["privacy", "plan", "--images", "0"], "images is 0"),
    ],
)
def test_bad_input_is_rejected_in_one_line(words: list[str], reason: str, refused: Refused) -> None:
    assert reason in refused(*words)


def test_privacy_plan_is_printed(said: Say) -> None:
    code, out, _ = said("privacy", "plan", "--images", "10000", "--epsilon", "1", "3")
    assert code == 0
    assert "10,000 images" in out
    # Only the table; the explanation is wrapped separately.
    assert max(len(line) for line in out.splitlines() if line.startswith(" ")) <= 100
    code, out, _ = said(
        *("privacy", "plan", "--unit", "client", "--clients", "2000", "--rounds", "5"),
        *("--epsilon", "3", "--json"),
    )
    assert json.loads(out)["budgets"][0]["advice"] in ("model", "nothing")
    assert isinstance(Said, type)


@pytest.mark.parametrize("method", ["fedavg", "fedgauss"])
def test_receipt_lists_the_messages_of_secure_aggregation(
    images: Path, tmp_path: Path, method: str
) -> None:
    """The client runs all stages of secure aggregation with simulated other clients."""
    experiment = float64_experiment(
        images,
        method,
        rounds=1,
        secure_aggregation=True,
        privacy__epsilon=3.0,
        encoder__name="none",
    )
    receipt = receipt_for(experiment, 0)
    federation = LoopbackFederation(experiment, tmp_path)
    federation.serve()
    sent = [from_records(m.content) for name, m in federation.grid.replies if name == "client-0"]
    masked = next(each for each in sent if "masked" in each.arrays)
    listed = {each.name: each for each in receipt.fields if each.message == "round"}
    assert {name: each.num_bytes for name, each in listed.items()} == sizes(masked)
    assert listed["masked"].least is None
    secure = {each.name for each in receipt.fields if each.message == "secure"}
    assert secure == {"advert", "sealed", "signature", "seeds", "keys"}
    assert receipt.model == "sum"
