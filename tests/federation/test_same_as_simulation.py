"""Over Flower, TLS and processes a run gives what the simulation gives."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from laboratory import LONG, Course, Laboratory
from mpfedcl import Experiment, run
from mpfedcl.runs.directory import RunDirectory

pytestmark = pytest.mark.federation


def settings(**changes: Any) -> list[str]:
    return [word for name, value in changes.items() for word in (f"--{name}", str(value))]


def simulate(course: Course, path: Path) -> RunDirectory:
    """Run the same experiment in this process: the one that the run directory names."""
    experiment = RunDirectory(course.path).read_experiment()
    run(Experiment.parse_toml(experiment.to_toml(), path), path)
    return RunDirectory(path)


@pytest.mark.parametrize(("method", "rounds"), [("mp-fedcl", 5), ("fedavg", 3), ("fedproto", 3)])
def test_in_float64_weights_and_readings_are_the_same(
    laboratory: Laboratory, tmp_path: Path, method: str, rounds: int
) -> None:
    changes = settings(method=method, rounds=rounds, dtype="float64")
    course = laboratory.begin(f"double-{method}", *changes)
    assert course.program.wait(LONG) == 0, course.program.said()
    simulated = simulate(course, tmp_path / "simulated")
    over_network = RunDirectory(course.path)
    ours, theirs = (each.read_summary() for each in (over_network, simulated))
    assert ours is not None
    assert theirs is not None
    assert ours["accuracy"] == theirs["accuracy"]
    assert ours["accuracy_per_client"] == theirs["accuracy_per_client"]
    # A client reads what its method has; prototypes for the reading alone it does not make.
    read = {name: value for name, value in ours["readings"]["own"].items() if value is not None}
    assert read
    assert read == {name: theirs["readings"]["own"][name] for name in read}
    files = sorted(each.name for each in course.path.glob("*.safetensors"))
    assert "pool.safetensors" in files or method == "fedavg"
    assert "model.safetensors" in files or method == "fedproto"
    for name in files:
        mine, other = load_file(course.path / name), load_file(simulated.path / name)
        assert mine.keys() == other.keys()
        for key, value in mine.items():
            torch.testing.assert_close(value, other[key], rtol=1e-5, atol=1e-9)


def test_in_float32_the_accuracy_is_within_a_point(laboratory: Laboratory, tmp_path: Path) -> None:
    course = laboratory.begin("single", *settings(method="mp-fedcl", rounds=5))
    assert course.program.wait(LONG) == 0, course.program.said()
    ours = RunDirectory(course.path).read_summary()
    theirs = simulate(course, tmp_path / "simulated").read_summary()
    assert ours is not None
    assert theirs is not None
    assert abs(ours["accuracy"] - theirs["accuracy"]) <= 1
    assert [each["clients"]["answered"] for each in course.records()] == [
        ["client-0", "client-1", "client-2"]
    ] * 5
