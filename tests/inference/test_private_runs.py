"""A finished run with a privacy budget: its reports, and operations that are rejected."""

from pathlib import Path

import numpy
import pytest
import torch

from command_results import Refused
from mpfedcl import run
from mpfedcl.gaussian import project_features
from small_experiments import HIDDEN, Say, flags, save_vectors, small

pytestmark = pytest.mark.whole

BUDGET = {"privacy__epsilon": 4.0, "model__hidden": HIDDEN}


@pytest.fixture(scope="module")
def exchange(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A one-shot run under a budget, in fewer dimensions than there are features."""
    root = tmp_path_factory.mktemp("private")
    save_vectors(root / "data/one.npz", width=12, num_train=600)
    experiment = small(root / "data", "fedgauss", privacy__dimensions=6, **BUDGET)
    return run(experiment, root / "run").path


@pytest.fixture(scope="module")
def rounds(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of MP-FedCL under a budget."""
    return run(small(images, "mp-fedcl", **BUDGET), tmp_path_factory.mktemp("rounds") / "run").path


def test_card_states_the_privacy_budget(exchange: Path) -> None:
    card = (exchange / "CARD.md").read_text()
    assert "Differential privacy: epsilon 4 of 4 spent at delta 1e-05" in card
    assert "for adding or removing one image" in card
    assert "There is no privacy guarantee" not in card
    # A card may be published, so it does not contain the clients' sample counts.
    assert "numbers of samples are not shown under a privacy budget" in card
    assert "per client" not in card


def test_report_states_the_privacy_budget(
    exchange: Path, rounds: Path, tmp_path: Path, said: Say
) -> None:
    assert said("report", exchange, rounds, "--out", tmp_path / "report.html")[0] == 0
    page = (tmp_path / "report.html").read_text()
    assert "Differential privacy: epsilon 4 of 4 spent at delta 1e-05" in page
    assert "for adding or removing one image" in page
    assert "for adding or removing all images of one client" in page
    assert "Under a privacy budget the data of clients are not shown." in page


def test_predictions_in_the_projected_space(exchange: Path, said: Say) -> None:
    archive = exchange.parent / "data/one.npz"
    code, out, _ = said("predict", exchange, archive, "--json")
    assert code == 0
    assert len(out.splitlines()) == 30
    with numpy.load(archive) as found:
        assert found["x_test"].shape == (30, 12)


@pytest.mark.parametrize("words", [["leave", "--name", "client-0"], ["contribution"]])
def test_leave_and_contribution_are_rejected_under_a_budget(
    exchange: Path, refused: Refused, words: list[str]
) -> None:
    assert "has spent its privacy budget" in refused(words[0], exchange, *words[1:])


def test_join_is_rejected_under_a_budget(
    exchange: Path, rounds: Path, images: Path, refused: Refused
) -> None:
    for path, data in ((exchange, exchange.parent / "data"), (rounds, images)):
        words = ("join", path, "--data", data, "--name", "new", "--add")
        assert "another release costs as much again" in refused(*words)


@pytest.mark.parametrize(
    "words", [("tune", "--methods", "fedavg"), ("compare", "--methods", "fedavg", "--seeds", "0")]
)
def test_tune_and_compare_are_rejected_under_a_budget(
    images: Path, tmp_path: Path, refused: Refused, words: tuple[str, ...]
) -> None:
    given = (*words, *flags(images), "--privacy.epsilon", "3", "--out", tmp_path / "out")
    assert "privacy.epsilon is 3" in refused(*given)


def test_projection_depends_on_the_seed_only(exchange: Path) -> None:

    rows = torch.rand(20, 12)
    found = project_features(rows, 6, seed=1)
    assert torch.equal(found, project_features(rows, 6, seed=1))
    assert not torch.equal(found, project_features(rows, 6, seed=2))
    assert torch.allclose(found.norm(dim=1), torch.ones(20))
    # What all coordinates have in common says nothing.
    assert torch.allclose(found, project_features(rows + 3, 6, seed=1), atol=1e-4)
    assert project_features(rows, 12, seed=1) is rows
