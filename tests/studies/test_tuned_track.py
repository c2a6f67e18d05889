"""The tuned track: searched on other draws, run as chosen, and told in the result."""

from dataclasses import replace
from typing import Any

import pytest

from mpfedcl.api import RUNNER
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.studies.jobs import JobOptions
from mpfedcl.studies.paper import find_items
from mpfedcl.studies.paper.datasets import PaperDatasets
from mpfedcl.studies.paper.items import select_tracks
from mpfedcl.studies.paper.paper_runs import TUNING_SEEDS, PaperRuns
from mpfedcl.studies.tuning.result import load_tuning

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("small_models")]

METHODS = ("fedavg", "mp-fedcl")
PREDICTORS = {"fedavg": "global_classifier", "mp-fedcl": "personal_prototype"}
"""The paper's, though all clients share a test here."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> PaperRuns:
    """Two methods under label skew on the digits inside the package, a few rounds."""
    folder = tmp_path_factory.mktemp("paper")
    (whole,) = find_items(["label"], PaperDatasets(folder / "no data"))
    item = select_tracks(whole, ["tuned"])
    cells = tuple(cell for cell in item.cells if cell.row in METHODS)
    runs = PaperRuns(folder, [replace(item, cells=cells)], (0,), folder / "no data", quick=True)
    assert runs.tune(runs.searches(), JobOptions(RUNNER))
    assert runs.run(runs.planned_runs("tuned"), JobOptions(RUNNER))
    return runs


@pytest.mark.thorough
def test_settings_are_chosen_on_validation_images_of_other_draws(runs: PaperRuns) -> None:
    for base in runs.tuned_experiments():
        folder = runs.tuning_folder(base)
        found = load_tuning(folder)
        assert found is not None
        assert found.seeds == [TUNING_SEEDS[0]]
        assert found.predictor == PREDICTORS[base.method]
        for name in found.trials[0].runs:
            tried = RunDirectory(folder / name).read_experiment()
            assert (tried.seed, tried.partition.validation) == (TUNING_SEEDS[0], 0.2)


def test_whole_searches_are_over_three_draws_that_no_table_reports(runs: PaperRuns) -> None:
    (search, _) = replace(runs, folder=runs.folder / "whole", quick=False).searches()
    assert tuple(search.seeds) == TUNING_SEEDS == (100, 101, 102)


def test_chosen_settings_are_what_is_run_and_what_is_told(runs: PaperRuns) -> None:
    result = runs.write_result(runs.items[0])
    chosen: dict[str, Any] = {each["row"]: each for each in result["chosen"]}
    assert list(chosen) == list(METHODS)
    searched = 0.0
    for base, planned in zip(runs.tuned_experiments(), runs.planned_runs("tuned"), strict=True):
        found = load_tuning(runs.tuning_folder(base))
        assert found is not None
        searched += found.seconds
        ran = RunDirectory(planned.path).read_experiment()
        assert (ran.seed, ran.partition.validation) == (0, 0.0)
        assert ran.replace(**found.search_space) == ran
        told = chosen[base.method]
        assert told["set"] == "MNIST sample"
        assert (told["changes"], told["score"]) == (found.changes, found.score)
    assert {(cell["track"], cell["test"]) for cell in result["cells"]} == {
        ("tuned", "local test set"),
        ("tuned", "global test set"),
    }
    assert {cell["row"]: cell["predictor"] for cell in result["cells"]} == PREDICTORS
    # The time of the searches counts.
    assert result["seconds"] > searched


def test_what_is_searched_is_not_searched_again(runs: PaperRuns) -> None:
    assert runs.searches() == []
