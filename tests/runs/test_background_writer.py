"""What is written beside the next round is whole, in order, and never lost without a word."""

import gc
import threading
from pathlib import Path

import pytest

from mpfedcl import resume, run
from mpfedcl.runs.checkpoint import BackgroundWriter, load_checkpoint
from mpfedcl.runs.observer import Observer
from small_experiments import assert_same_run, read_records, small

TINY = (16, 8)


def test_writes_are_in_order_and_finished_at_the_end() -> None:
    done: list[int] = []
    may_go_on = threading.Event()

    def slowly() -> None:
        may_go_on.wait(30)
        done.append(2)

    with BackgroundWriter() as writer:
        writer.begin(lambda: done.append(1))
        assert done == [1], "the first one is waited for"
        writer.begin(slowly)
        assert done == [1], "the others are not"
        may_go_on.set()
        writer.begin(lambda: done.append(3))
        assert done[:2] == [1, 2]
    assert done == [1, 2, 3]


def fail() -> None:
    raise OSError(28, "No space left on device")


def test_failure_is_raised_once_by_the_next_wait() -> None:
    with BackgroundWriter() as writer:
        with pytest.raises(OSError, match="No space"):
            writer.begin(fail)
        writer.begin(fail)
        with pytest.raises(OSError, match="No space"):
            writer.wait()
        writer.wait()
    with pytest.raises(OSError, match="No space"):
        fail_last(None)


def test_error_of_the_run_takes_precedence_over_a_failed_write() -> None:
    with pytest.raises(KeyboardInterrupt):
        fail_last(KeyboardInterrupt())


def fail_last(error: BaseException | None) -> None:
    with BackgroundWriter() as writer:
        writer.begin(lambda: None)
        writer.begin(fail)
        if error is not None:
            raise error


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
