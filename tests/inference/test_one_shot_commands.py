"""join, leave, contribution and advise on a one-shot run, from the command line."""

import json
import shutil
from pathlib import Path

import numpy
import pytest
import torch

from command_results import Cli, Refused, assert_fits
from mpfedcl import run
from mpfedcl.data.loading import load_federated_data
from mpfedcl.inference.advice import advise, compare_answers
from mpfedcl.inference.contribution import find_contributions
from mpfedcl.inference.one_shot import open_federation
from mpfedcl.rounds.metrics import percent_correct
from one_shot_runs import choose, federation, save_client
from small_experiments import small

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("own_places", "elsewhere")]


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("clients")
    for seed, name in enumerate("abcd"):
        save_client(root / f"{name}.npz", seed)
    return root


@pytest.fixture(scope="module")
def finished(clients: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("federation")
    return run(federation(choose(clients, root / "data", "abc")), root / "run").path


@pytest.fixture
def path(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_client_joins_and_leaves(path: Path, clients: Path, cli: Cli) -> None:
    words = ["join", path, "--data", clients / "d.npz", "--name", "d"]
    tried = cli(*words)
    assert tried.code == 0, tried.err
    assert "federation with d" in tried.out
    assert "The federation is unchanged; --add adds these statistics" in tried.out
    assert_fits(tried.out)
    assert "joined; remove it with: mpfedcl leave" in cli(*words, "--add").out
    assert "replaced; remove it with" in cli(*words, "--add", "--replace").out
    assert (
        "d has left; the pool holds 9 prototypes of 3 clients"
        in cli("leave", path, "--name", "d").out
    )
    assert json.loads(cli("leave", path, "--name", "a", "--json").out)["pool"] == ["b", "c"]


def test_client_leaves_a_run_with_a_prototype_pool(images: Path, tmp_path: Path, cli: Cli) -> None:
    old = run(small(images, rounds=1), tmp_path / "old").path
    late = next(images.glob("*.npz"))
    cli("join", old, "--data", late, "--name", "late", "--epochs", 0, "--add")
    assert "late has left" in cli("leave", old, "--name", "late").out


def test_bad_arguments_are_rejected_in_one_line(
    path: Path, clients: Path, refused: Refused
) -> None:
    data = clients / "d.npz"
    assert "name is missing" in refused("leave", path)
    assert "it must be one of a, b, c." in refused("leave", path, "--name", "z")
    assert "--data is missing; it must be given" in refused("advise", path)
    words = ["join", path, "--data", data, "--name", "d"]
    assert "trains nothing" in refused(*words, "--epochs", 5)
    # The default is rejected as well if it is given.
    assert "epochs is given" in refused(*words, "--epochs", 1)
    assert "lr is given" in refused(*words, "--lr", 0.1)
    assert "must be a folder that holds a run" in refused("contribution", clients)
    words = ["join", path, "--data", data, "--name", "d", "--test-fraction", 2]
    assert "must be greater than 0" in refused(*words)


def test_contribution_writes_table_and_json(path: Path, cli: Cli, refused: Refused) -> None:
    shown = cli("contribution", path)
    assert shown.code == 0, shown.err
    assert "negative if they do better without it" in shown.out
    assert_fits(shown.out)
    told = json.loads((path / "contribution.json").read_text())
    assert sorted(each["client"] for each in told["clients"]) == ["a", "b", "c"]
    points = [each["global_test"]["difference"] for each in told["clients"]]
    assert points == sorted(points, reverse=True)
    # Data that are no longer there.
    experiment = (path / "experiment.toml").read_text()
    gone = experiment.replace(str(path.parent), str(path.parent / "gone"))
    data = str(open_federation(path).experiment.dataset.root)
    (path / "experiment.toml").write_text(gone.replace(data, data + "-gone"))
    assert "contributions are measured on them" in refused("contribution", path)


def test_contribution_equals_the_accuracy_of_runs_without_the_client(
    path: Path, clients: Path, tmp_path: Path
) -> None:
    found = {each.client: each for each in find_contributions(path).clients}
    data = load_federated_data(federation(clients).resolved())
    for gone, others in (("a", "bc"), ("c", "ab")):
        chosen = choose(clients, tmp_path / others, others)
        without = run(federation(chosen), tmp_path / f"run-{others}")
        assert without.summary is not None
        assert found[gone].global_test.without == pytest.approx(without.summary["accuracy_global"])
        assert found[gone].local_test.without == pytest.approx(without.accuracy)
        # With it: the whole federation's classifier on the tests of the others.
        exchange = open_federation(path)
        rows = torch.cat([data.client(name).test for name in others])
        scores = exchange.scores(exchange.server.params, data.test_inputs[rows])
        right = percent_correct(scores.argmax(1) == data.test_labels[rows])
        assert found[gone].global_test.whole == pytest.approx(right)


def test_contribution_needs_three_clients_and_their_statistics(
    clients: Path, tmp_path: Path, cli: Cli
) -> None:
    two = run(federation(choose(clients, tmp_path / "two", "ab")), tmp_path / "run").path
    assert "there must be at least 3" in cli("contribution", two).err
    data = choose(clients, tmp_path / "three", "abc")
    pooled = federation(data, "fedncm", statistics__keep="pooled")
    path = run(pooled, tmp_path / "pooled").path
    assert "only pooled statistics were kept" in cli("contribution", path).err


def test_advise_changes_nothing(path: Path, clients: Path, cli: Cli) -> None:
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    shown = cli("advise", path, "--data", clients / "d.npz")
    assert shown.code == 0, shown.err
    assert "Each vector was tested once" in shown.out
    assert "Nothing was sent or written." in shown.out
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
    told = json.loads(cli("advise", path, "--data", clients / "d.npz", "--json").out)
    assert told["accuracy"].keys() == {"local", "global", "personal"}
    assert told["samples"] == 36
    assert told["verdict"].split(":")[0] in (
        "Join",
        "It makes no clear difference to you",
        "Do not join for your own sake",
    )


def test_advice_is_to_join_with_too_few_samples(clients: Path, tmp_path: Path) -> None:
    """Six noisy samples per class: the federation's classifier is better."""
    random = numpy.random.default_rng(3)
    labels = numpy.arange(18) % 3
    vectors = random.normal(0, 0.6, (18, 7))
    vectors[numpy.arange(18), labels] += 1
    numpy.savez(tmp_path / "few.npz", x_train=vectors, y_train=labels)
    pooled = run(federation(clients, "fedlda"), tmp_path / "pooled").path
    found = advise(pooled, tmp_path / "few.npz")
    assert found.compared == "global"
    assert (found.folds, found.samples) == (5, 18)
    assert found.verdict.startswith("Join: ")
    assert sum(each.local for each in found.classes) == round(0.18 * found.accuracy["local"])


def test_interval_has_its_coverage() -> None:
    """About 95 % of the intervals contain the known difference."""
    generator = torch.Generator().manual_seed(0)
    for pairs in (20, 100):
        held = 0
        for _ in range(400):
            draw = torch.rand(pairs, generator=generator)
            first, second = (draw < 0.2) | (draw > 0.5), draw > 0.3
            # Only first: 0 to 0.2; only second: 0.3 to 0.5, so the difference is 0.
            found = compare_answers(first, second)
            held += found.low <= 0 <= found.high
        assert 0.92 <= held / 400 <= 0.99
    alike = compare_answers(torch.ones(50) > 0, torch.ones(50) > 0)
    assert alike.mean == 0
    assert alike.low < 0 < alike.high
