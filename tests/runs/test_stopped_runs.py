"""The rounds of a stopped run are on disk, and records do not fill the memory."""

import gc
from pathlib import Path

import pytest

from mpfedcl import resume, run
from mpfedcl.runs.checkpoint import load_checkpoint
from mpfedcl.runs.observer import Observer
from small_experiments import assert_same_run, read_records, small

TINY = (16, 8)


@pytest.mark.whole
@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_stopped_run_has_its_last_round_on_disk(
    images: Path, tmp_path: Path, error: type[BaseException] | None
) -> None:
    experiment = small(images, "fedproto", rounds=5, model__hidden=TINY)
    run(experiment, tmp_path / "whole")
    done: list[object] = []

    def on_round(record: object) -> None:
        done.append(record)
        if error is not None and len(done) == 3:
            raise error

    observer = Observer(on_round=on_round, should_stop=lambda: len(done) == 3)
    try:
        run(experiment, tmp_path / "stopped", observer)
    except KeyboardInterrupt:
        assert error is not None
    assert [each["round"] for each in read_records(tmp_path / "stopped")] == [1, 2, 3]
    found, problems = load_checkpoint(tmp_path / "stopped" / "checkpoint")
    assert found is not None
    assert (found.state.round, problems) == (3, [])
    resume(tmp_path / "stopped")
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.whole
def test_no_record_stays_in_memory(images: Path, tmp_path: Path) -> None:
    alive: list[int] = []

    def on_round(_: object) -> None:
        gc.collect()
        alive.append(
            sum(type(each) is dict and "loss_per_client" in each for each in gc.get_objects())
        )

    experiment = small(images, "fedavg", rounds=6, model__hidden=TINY)
    result = run(experiment, tmp_path / "run", Observer(on_round=on_round))
    assert alive[1] == alive[-1]
    assert result.history == read_records(tmp_path / "run")
