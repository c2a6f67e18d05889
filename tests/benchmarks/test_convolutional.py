"""The loops that the benchmark is measured against do the same work."""

import json
import sys
from pathlib import Path

import pytest

import mpfedcl

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path += [str(BENCHMARKS)]

import convolutional
from convolutional import BASE, LAYOUTS, MODELS, SETTINGS, tabulate, take_turns, write_by_hand

pytestmark = pytest.mark.whole


def small(name: str, dtype: str) -> mpfedcl.Experiment:
    """Return a round on few drawn images."""
    return mpfedcl.Experiment(method="fedavg", rounds=1, dtype=dtype).replace(
        **BASE,
        dataset__name="convolutional:draw_images",
        dataset__train_size=100,
        model__name=name,
    )


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS.values())
def test_loops_and_run_train_the_same_weights(name: str) -> None:
    experiment, said = small(name, "float64"), list[str]()
    _, times = take_turns(experiment, SETTINGS[0], write_by_hand(experiment), said.append)
    assert {each: len(values) for each, values in times.items()} == dict.fromkeys(
        ["mpfedcl", *LAYOUTS], 1
    )
    assert sum("weights differ by" in each for each in said) == len(LAYOUTS)


def test_other_work_is_detected() -> None:
    experiment = small("cnn-small", "float64")
    loops = write_by_hand(experiment.replace(train__lr=0.011))
    with pytest.raises(SystemExit, match="weights differ"):
        take_turns(experiment, SETTINGS[0], loops, lambda _: None)


def test_ratios_by_hand() -> None:
    def row(cores: int, run: float, *loops: float) -> dict[str, object]:
        seconds = {"mpfedcl": [run, run], "a": [loops[0]] * 2, "b": [loops[1]] * 2}
        return {"name": f"{run}", "cores": cores, "seconds": seconds}

    table = tabulate("model", [row(1, 3.0, 2.0, 4.0), row(2, 2.0, 1.0, 4.0), row(2, 1.5, 4.0, 3.0)])
    assert [cells[-1] for cells in table.rows] == ["1.50", "2.00", "0.50"]
    assert table.note.endswith("1.50 on 1 core, 1.50 on 2 cores.")


@pytest.mark.thorough
def test_whole_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["convolutional.py", "--quick", "--out", str(tmp_path)])
    convolutional.main()
    found = json.loads((tmp_path / "convolutional.json").read_text())
    assert [table["title"] for table in found["tables"]] == list(MODELS)
    assert found["quick"] is True
