"""What TensorBoard reads of a run, through its own readers."""

import time
from pathlib import Path
from typing import Any

import numpy
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from mpfedcl import Experiment, resume, run
from mpfedcl.report.tracking import round_scalars
from mpfedcl.runs.observer import Observer
from small_experiments import Warnings, read_records, small

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("small_models")]


def read_events(folder: Path) -> Any:
    # 0: keep all, not a sample.
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def read_curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = read_events(folder)
    return {
        tag: [(each.step, each.value) for each in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def expected_curves(path: Path) -> dict[str, list[tuple[int, float]]]:
    """The same from the records, in the precision TensorBoard has."""
    found: dict[str, list[tuple[int, float]]] = {}
    for record in read_records(path):
        for name, value in round_scalars(record).items():
            found.setdefault(name, []).append((record["round"], float(numpy.float32(value))))
    return found


def stopped_after(rounds: int) -> Observer:
    done: list[Any] = []
    return Observer(on_round=done.append, should_stop=lambda: len(done) == rounds)


def test_a_run_on_the_embedded_digits_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "run"
    experiment = Experiment(rounds=3, evaluate_every=2, track=("tensorboard",))
    result = run(experiment, path)
    curves = read_curves(path / "tensorboard")
    assert curves == expected_curves(path)
    assert [step for step, _ in curves["loss"]] == [1, 2, 3]
    assert [step for step, _ in curves["clients/client-0"]] == [2, 3]
    assert curves["accuracy/local_test/global_prototype"][-1][1] == pytest.approx(result.accuracy)
    assert curves["attendance/answered"] == [(1, 5.0), (2, 5.0), (3, 5.0)]
    assert curves["seconds/train"][0][1] > 0
    (text,) = read_events(path / "tensorboard").Tensors("experiment/text_summary")
    written = tensor_util.make_ndarray(text.tensor_proto).item().decode()
    assert "rounds = 3" in written


def test_a_resumed_run_has_each_round_once(images: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(small(images, rounds=4, track=("tensorboard",)), path, stopped_after(2))
    old = next((path / "tensorboard").glob("events.*"))
    # As a kill leaves it: a round told of whose checkpoint was lost, and half a round after it.
    old.write_bytes(old.read_bytes() + old.read_bytes()[-40:] + b"\x10\x00\x00")
    resume(path)
    assert old.exists()
    assert read_curves(path / "tensorboard") == expected_curves(path)
    times = [each.wall_time for each in read_events(path / "tensorboard").Scalars("loss")]
    assert times == sorted(times)


def test_one_that_looks_on_sees_each_round_once(images: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(small(images, rounds=3, track=("tensorboard",)), path, stopped_after(2))
    looking_on = read_events(path / "tensorboard")
    resume(path)
    looking_on.Reload()
    assert [each.step for each in looking_on.Scalars("loss")] == [1, 2, 3]


def test_runs_that_share_a_folder_keep_apart(images: Path, tmp_path: Path) -> None:
    shared = tmp_path / "tracks"
    experiment = small(images, track=("tensorboard",), track_to=shared)
    run(experiment, tmp_path / "a" / "run")
    run(experiment.replace(rounds=1), tmp_path / "b" / "run")
    resume(tmp_path / "b" / "run", 3)
    assert read_curves(shared / "tensorboard" / "run") == expected_curves(tmp_path / "a" / "run")
    other = shared / "tensorboard" / "run-2"
    assert read_curves(other) == expected_curves(tmp_path / "b" / "run")


def test_a_full_disk_costs_the_tracker_alone(images: Path, tmp_path: Path) -> None:
    shared = tmp_path / "tracks"
    shared.mkdir()
    # A file where its folder should be: nothing can be made below it.
    (shared / "tensorboard").write_text("")
    warnings = Warnings()
    experiment = small(images, track=("tensorboard",), track_to=shared)
    result = run(experiment, tmp_path / "run", warnings.observer())
    assert result.summary is not None
    assert [each[:27] for each in warnings] == ["Tracker tensorboard failed "]


def test_a_resume_within_the_same_second_writes_a_later_file(images: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(small(images, rounds=2, track=("tensorboard",)), path, stopped_after(1))
    (old,) = (path / "tensorboard").glob("events.*")
    # The last number of the next name may be smaller by text, as 10 is smaller than 9.
    prefix, _, _ = old.name.rpartition(".")
    now = f"events.out.tfevents.{int(time.time()):010d}"
    old.rename(old.with_name(f"{now}.{prefix.split('.', 4)[4]}.999999"))
    resume(path)
    names = sorted(each.name for each in (path / "tensorboard").glob("events.*"))
    assert names[0].endswith(".999999")
    assert read_curves(path / "tensorboard") == expected_curves(path)
