"""`--diagnostics convergence` in whole runs: off it costs nothing, on it changes nothing."""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from command_processes import call
from command_results import without_progress
from mpfedcl import Experiment, InvalidInput, resume, run
from mpfedcl.convergence import BOUNDS
from mpfedcl.engines import Engine
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.runs.observer import Observer
from small_experiments import (
    EXAMPLES,
    METHODS,
    Json,
    MeddledEngine,
    assert_same_results,
    assert_same_run,
    build_federation,
    flags,
    read_records,
    small,
    without_timings,
)
from worker_processes import run_together

pytestmark = pytest.mark.whole

TINY: dict[str, Any] = {"model__hidden": (16, 8)}
ON: dict[str, Any] = {"diagnostics": ("convergence",), **TINY}


def told(record: Json) -> Json:
    found: Json = record["diagnostics"]["convergence"]
    return found


def read_convergence(path: Path) -> Json:
    found: Json = json.loads((path / "convergence.json").read_text())
    return found


def assert_close_values(left: Any, right: Any, where: str = "") -> None:
    """Hold nested plain values to each other: numbers up to 1e-5, everything else exactly."""
    if isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for name in left:
            assert_close_values(left[name], right[name], f"{where}/{name}")
    elif isinstance(left, list):
        assert len(left) == len(right), where
        for number, pair in enumerate(zip(left, right, strict=True)):
            assert_close_values(*pair, f"{where}/{number}")
    elif isinstance(left, float) and not isinstance(left, bool):
        assert left == pytest.approx(right, rel=1e-5, abs=1e-9), where
    else:
        assert left == right, where


class Watching(MeddledEngine):
    """Notes what it is asked for."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.asked: list[str] = []

    def train(self, broadcast: Broadcast, names: Sequence[str], *, keep: Collection[str]) -> Any:
        self.asked.append(f"keep {len(keep)} of {len(names)}")
        return super().train(broadcast, names, keep=keep)

    def keep_accepted(self, accepted: Sequence[str], following: Callable[[], Broadcast]) -> None:
        def look_ahead() -> Broadcast:
            self.asked.append(f"inspect {' '.join(accepted)}")
            return following()

        super().keep_accepted(accepted, look_ahead)


class Poisoned(Watching):
    """One client's model arrives spoilt."""

    def meddle(
        self, broadcast: Broadcast, names: Sequence[str], updates: Iterable[Update]
    ) -> Iterable[Update]:
        for update in updates:
            if update.client == "client-1":
                assert isinstance(update.averaged, dict)
                spoilt = {name: value * torch.nan for name, value in update.averaged.items()}
                update = replace(update, averaged=spoilt)
            yield update


def test_off_nothing_is_asked_for(images: Path) -> None:
    engines: list[Watching] = []

    def wrap(engine: Engine) -> Watching:
        engines.append(Watching(engine))
        return engines[-1]

    record = build_federation(small(images), wrap).run_round(evaluate=False)
    assert engines[0].asked == ["keep 0 of 3"]
    assert record.diagnostics is None
    assert "diagnostics" not in record.to_json()
    assert "diagnose" not in record.seconds
    record = build_federation(small(images, **ON), wrap).run_round(evaluate=False)
    assert engines[1].asked == ["keep 0 of 3", "inspect client-0 client-1 client-2"]
    assert record.diagnostics is not None
    assert len(record.diagnostics["convergence"]["clients"]) == 3


@pytest.mark.parametrize("method", METHODS)
def test_on_the_run_is_the_same_run(images: Path, tmp_path: Path, method: str) -> None:
    experiment = small(images, method, fraction=0.7, rounds=3, **TINY)
    run(experiment, tmp_path / "off")
    run(experiment.replace(**ON), tmp_path / "on")
    assert_same_results(tmp_path / "on", tmp_path / "off")
    on, off = read_records(tmp_path / "on"), read_records(tmp_path / "off")
    assert [list(record)[-1] for record in on] == ["diagnostics"] * 3
    stripped = [{name: each for name, each in r.items() if name != "diagnostics"} for r in on]
    lines = [[json.dumps(each) for each in without_timings(some)] for some in (stripped, off)]
    assert lines[0] == lines[1]
    assert not (tmp_path / "off" / "convergence.json").exists()
    found = read_convergence(tmp_path / "on")
    assert found["client_rounds"] == 6
    assert found["constants"]["dissimilarity"] >= 1
    assert found["bounds"]["falls_in_training"]["final"]["judged"] == 6
    speaks = {"fedproto": 0, "local": 6, "fedavg": 6, "fedprox": 6}.get(method, 4)
    assert found["bounds"]["lemma_2"]["final"]["judged"] == speaks
    averaged = 0 if method in ("fedproto", "local") else 6
    assert found["bounds"]["falls_to_average"]["final"]["judged"] == averaged


def test_a_round_begins_with_what_the_last_one_left(images: Path, tmp_path: Path) -> None:
    # FedPer keeps its classifier at home: it counts as it will be, not as it was.
    for method in ("mp-fedcl", "fedprox", "fedper"):
        path = tmp_path / method.rpartition(":")[2]
        run(small(images, method, rounds=3, **ON), path)
        records = [told(record) for record in read_records(path)]
        for before, after in pairwise(records):
            for name, client in after["clients"].items():
                left = before["clients"][name]["objective_after_aggregation"]
                assert client["objective_before"] == pytest.approx(left, rel=1e-6), (method, name)


@pytest.mark.parametrize("method", ["mp-fedcl", "fedproto", "fedprox", "custom_method:Scaffold"])
def test_engines_measure_the_same(
    images: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    experiment = small(images, method, rounds=3, dtype="float64", **ON)
    for engine in ("loop", "stacked", "auto"):
        run(experiment.replace(engine=engine), tmp_path / engine)
    wanted = [told(record) for record in read_records(tmp_path / "loop")]
    for engine in ("stacked", "auto"):
        found = [told(record) for record in read_records(tmp_path / engine)]
        assert_close_values(found, wanted)
        assert_close_values(
            read_convergence(tmp_path / engine), read_convergence(tmp_path / "loop")
        )


@pytest.mark.usefixtures("forked_workers")
def test_two_processes_measure_the_same_and_go_on_alike(images: Path, tmp_path: Path) -> None:
    experiment = small(images, rounds=3, dtype="float64", fraction=0.7, **ON)
    run(experiment, tmp_path / "one")
    done: list[object] = []
    stop = Observer(on_round=done.append, should_stop=lambda: len(done) == 2)
    run(experiment.replace(workers=2), tmp_path / "two", stop)
    run_together(["run", "--resume", "two"], tmp_path, 2)
    for ours, theirs in zip(
        read_records(tmp_path / "two"), read_records(tmp_path / "one"), strict=True
    ):
        assert_close_values(told(ours), told(theirs))
    assert_close_values(read_convergence(tmp_path / "two"), read_convergence(tmp_path / "one"))


@pytest.mark.parametrize("method", ["mp-fedcl", "fedproto"])
def test_an_interruption_changes_nothing(images: Path, tmp_path: Path, method: str) -> None:
    experiment = small(images, method, rounds=4, **ON)
    run(experiment, tmp_path / "whole")
    done: list[object] = []
    stop = Observer(on_round=done.append, should_stop=lambda: len(done) == 2)
    run(experiment, tmp_path / "stopped", stop)
    assert not (tmp_path / "stopped" / "convergence.json").exists()
    # As after a kill between checkpoint and record: the last line is written anew.
    lines = (tmp_path / "stopped" / "rounds.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "stopped" / "rounds.jsonl").write_text(lines[0] + lines[1][:100])
    resume(tmp_path / "stopped")
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")
    assert read_convergence(tmp_path / "stopped") == read_convergence(tmp_path / "whole")


def test_more_rounds_are_summed_up_anew(images: Path, tmp_path: Path) -> None:
    run(small(images, rounds=4, **ON), tmp_path / "whole")
    run(small(images, rounds=2, **ON), tmp_path / "longer")
    stop = Observer(should_stop=lambda: True)
    resume(tmp_path / "longer", rounds=4, observer=stop)
    assert not (tmp_path / "longer" / "convergence.json").exists()
    resume(tmp_path / "longer")
    assert read_convergence(tmp_path / "longer") == read_convergence(tmp_path / "whole")


def test_constants_only_grow_and_every_estimate_is_below_them(images: Path, tmp_path: Path) -> None:
    run(small(images, rounds=4, **ON), tmp_path / "run")
    before: Json = {}
    for record in read_records(tmp_path / "run"):
        now = told(record)
        for name, value in now["constants"].items():
            assert value >= before.get(name, 0)
            if name != "dissimilarity":
                assert all(client[name] <= value for client in now["clients"].values())
        before = now["constants"]
    assert read_convergence(tmp_path / "run")["constants"] == before


def test_a_rejected_client_is_left_out(images: Path) -> None:
    federation = build_federation(small(images, **ON), Poisoned)
    record = federation.run_round(evaluate=True)
    assert list(record.clients.rejected) == ["client-1"]
    assert record.diagnostics is not None
    assert list(record.diagnostics["convergence"]["clients"]) == ["client-0", "client-2"]
    assert record.diagnostics["convergence"]["gradient_norm"] > 0


def test_nobody_accepted(images: Path) -> None:
    federation = build_federation(small(images, validation__max_norm=1e-9, **ON))
    record = federation.run_round(evaluate=False)
    assert record.unchanged
    assert record.diagnostics is not None
    assert record.diagnostics["convergence"]["clients"] == {}
    assert record.diagnostics["convergence"]["gradient_norm"] is None


def test_a_training_that_blows_up_is_recorded(images: Path, tmp_path: Path) -> None:
    result = run(small(images, "fedavg", rounds=3, train__lr=50.0, **ON), tmp_path / "run")
    assert result.summary is not None
    assert json.loads((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()[0])
    assert read_convergence(tmp_path / "run")["rounds"] == 3


def test_the_command_shows_a_table_and_draws_a_figure(images: Path, tmp_path: Path) -> None:
    words = [*flags(images, rounds=3), "--diagnostics", "convergence", "--out", "run"]
    ended = call("run", *words, cwd=tmp_path, small_model=True, figures=True)
    assert (ended.returncode, without_progress(ended.stderr)) == (0, "")
    for name in ("Lemma 1", "Lemma 2", "Theorem 1", "Corollary 1", "L falls over the round"):
        assert name in ended.stdout
    assert "of 9" in ended.stdout
    assert "convergence.json" in ended.stdout
    assert (tmp_path / "run" / "convergence.png").stat().st_size > 10_000
    assert max(len(line) for line in ended.stdout.splitlines() if "Lemma" in line) <= 100
    assert set(read_convergence(tmp_path / "run")["bounds"]) == set(BOUNDS)


def test_an_unknown_diagnosis_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"diagnostics\.0 is 'health'; it must be 'convergence'"):
        Experiment(diagnostics=("health",))


def test_the_setting_survives_its_file(tmp_path: Path) -> None:
    experiment = Experiment(diagnostics=("convergence",))
    file = tmp_path / "experiment.toml"
    file.write_text(experiment.to_toml())
    assert Experiment.from_toml(file).diagnostics == ("convergence",)
