"""Asynchronous runs as a user has them: files, resuming, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from crashes_at_file_operations import OPERATIONS, Crash
from mpfedcl import InvalidInput, resume, run
from mpfedcl.runs.checkpoint import _sign, load_checkpoint
from mpfedcl.runs.observer import Observer
from mpfedcl.runs.plan import plan
from small_experiments import Say, assert_same_run, flags, read_records, small

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("small_models")]

METHODS: dict[str, dict[str, Any]] = {
    "fedasync": {"engine": "stacked"},
    "fedat": {"engine": "stacked", "fedat__tiers": 2, "systems__drop": 0.3},
    "aso-fed": {"engine": "stacked"},
    "sageflow": {"engine": "loop", "systems__tick": 0.1},
    "async-share": {"engine": "stacked", "systems__drop": 0.3},
}
SLOW: dict[str, Any] = {"systems__seconds_a_sample": 0.02, "clients": 4}


def one_round() -> Observer:
    """Stop a run after a round."""
    done: list[object] = []
    return Observer(on_round=done.append, should_stop=lambda: bool(done))


@pytest.mark.parametrize("method", METHODS)
def test_resume_of_a_stopped_run_is_bit_identical(
    images: Path, tmp_path: Path, method: str
) -> None:
    """Clients are under way at each stop: some have trained already, others have not."""
    settings = {"rounds": 3, **SLOW, **METHODS[method]}
    experiment = small(images, method, **settings)
    run(experiment, tmp_path / "whole")
    records = read_records(tmp_path / "whole")
    assert method == "fedat" or any(record["arrivals"]["under_way"] for record in records)
    run(experiment, tmp_path / "parts", one_round())
    resume(tmp_path / "parts", observer=one_round())
    resume(tmp_path / "parts")
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_updates_under_way_are_in_the_checkpoint(images: Path, tmp_path: Path) -> None:
    experiment = small(images, "fedasync", engine="stacked", **SLOW)
    run(experiment, tmp_path / "run")
    manifest = json.loads((tmp_path / "run/checkpoint/round-000002.json").read_bytes())
    assert manifest["arrivals"]["under_way"]
    content = (tmp_path / "run/checkpoint/round-000002.safetensors").read_bytes()
    assert b"clients/answer/" in content
    assert b"sent/" in content


def test_resume_after_a_crash_at_a_file_operation_is_bit_identical(
    images: Path, tmp_path: Path
) -> None:
    experiment = small(images, "aso-fed", rounds=3, **SLOW)
    with OPERATIONS.watch(tmp_path / "whole") as seen:
        run(experiment, tmp_path / "whole")
    for number in range(5, len(seen), 11):
        path = tmp_path / f"crash-{number:03}"
        with OPERATIONS.watch(path, allowed=number), pytest.raises(Crash):
            run(experiment, path)
        resume(path)
        assert_same_run(path, tmp_path / "whole")


def test_resume_restores_the_simulated_clock(images: Path, tmp_path: Path) -> None:
    experiment = small(images, "fedproto", rounds=3, systems__kind="tiers", systems__drop=0.3)
    run(experiment, tmp_path / "whole")
    run(experiment, tmp_path / "parts", one_round())
    resume(tmp_path / "parts")
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    clock = [record["virtual_seconds"] for record in read_records(tmp_path / "whole")]
    assert clock == sorted(clock)


def forge(path: Path, **changes: Any) -> Path:
    """Say something else of the first one under way; return the folder of checkpoints."""
    newest = path / "checkpoint/round-000002.json"
    manifest = json.loads(newest.read_bytes())
    del manifest["sha256"]
    manifest["arrivals"]["under_way"][0] |= changes
    content = newest.with_suffix(".safetensors").read_bytes()
    newest.write_text(json.dumps({"sha256": _sign(json.dumps(manifest), content), **manifest}))
    return newest.parent


def test_checkpoint_without_a_dispatched_model_is_damaged(images: Path, tmp_path: Path) -> None:
    run(small(images, "fedasync", **SLOW), tmp_path / "run")
    found, problems = load_checkpoint(forge(tmp_path / "run", version=10**6))
    assert found is not None
    assert found.state.round == 1
    assert len(problems) == 1


@pytest.mark.parametrize("changes", [{"client": "nobody"}, {"round": 3}, {"tier": 1}])
def test_checkpoint_of_another_experiment_is_rejected(
    images: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    run(small(images, "fedasync", **SLOW), tmp_path / "run")
    forge(tmp_path / "run", **changes)
    with pytest.raises(InvalidInput, match="does not fit the experiment"):
        resume(tmp_path / "run", rounds=3)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"method": "fedasync", "systems__kind": "lognormal"},
            "systems.kind is 'lognormal'; over a",
        ),
        (
            {"method": "fedasync", "secure_aggregation": True},
            "secure_aggregation is on; with fedasync, which is",
        ),
        ({"method": "fedasync", "privacy__epsilon": 2.0}, "privacy.epsilon is 2; with fedasync"),
        ({"method": "fedat", "workers": 2}, "workers is 2; with fedat, which is asynchronous"),
        (
            {"method": "sageflow", "validation__bounds": "on"},
            "validation.bounds is 'on'; with sageflow",
        ),
        ({"method": "aso-fed", "aggregation__rule": "median"}, "aggregation.rule is 'median'; wi"),
        ({"method": "fedavg", "systems__kind": "tiers"}, "systems.kind is 'tiers'; over a network"),
        ({"method": "fedavg", "public__size": 5}, "public.size is 5; over a network"),
    ],
)
def test_settings_for_simulations_are_rejected_over_a_network(
    images: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        plan(small(images, **changes), over_network=True)
    assert str(caught.value).startswith(sentence)


def test_systems_are_not_simulated_over_a_network(images: Path) -> None:
    """Written down, so that a resumed run is of the same kind."""
    found = plan(small(images, "fedasync"), over_network=True).experiment
    assert found.systems.kind == "none"
    assert found.validation.bounds == "off"
    assert plan(found, over_network=True).experiment == found
    with pytest.raises(
        InvalidInput, match=r"^systems.kind is 'none'; with fedasync, which is async"
    ):
        run(found)


def test_workers_with_an_asynchronous_method_are_a_one_line_error(images: Path, said: Say) -> None:
    words = flags(images, method="fedasync", workers=2)
    code, _, errors = said("run", *words)
    assert code == 2
    assert "workers is 2; with fedasync, which is asynchronous, it must be 1" in errors


def test_run_compare_and_report_show_asynchronous_methods(
    images: Path, tmp_path: Path, said: Say
) -> None:
    common = {"systems.kind": "lognormal", "systems.follows": "label", "model.hidden": 8}
    words = [word for pair in common.items() for word in (f"--{pair[0]}", str(pair[1]))]
    for method in ("fedavg", "fedasync"):
        out = tmp_path / method
        code, shown, errors = said("run", *flags(images, method=method), *words, "--out", str(out))
        assert code == 0, errors
        assert method in shown
    code, shown, errors = said("report", str(tmp_path / "fedasync"))
    assert code == 0, errors
