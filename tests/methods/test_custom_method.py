"""A method of one's own: the example, and others that lean on other parts of the seam."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from command_processes import call
from command_results import without_progress
from mpfedcl import Context, Method, resume, run
from mpfedcl.core.tensors import Tensors
from mpfedcl.methods.fedper import FedPer
from mpfedcl.runs.observer import Observer
from small_experiments import (
    EXAMPLES,
    assert_same_run,
    assert_same_tensors,
    build_federation,
    small,
)

pytestmark = pytest.mark.whole

REMEMBERS = "test_custom_method:RemembersGlobal"


class WatchedFedPer(FedPer):
    """FedPer that tells where each training began and ended."""

    name = "watched"
    steps: list[tuple[Tensors, Tensors]] = []  # noqa: RUF012

    def finish(
        self, params: Tensors, context: Context, num_steps: int
    ) -> tuple[Tensors | None, Tensors]:
        self.steps.append((context.start, params))
        return super().finish(params, context, num_steps)


class RemembersGlobal(Method):
    """Keeps the model that it received, as methods do that compare with the one before."""

    def init_client(self, params: Tensors) -> Tensors:
        return params

    def finish(
        self, params: Tensors, context: Context, num_steps: int
    ) -> tuple[Tensors | None, Tensors]:
        sums, _ = super().finish(params, context, num_steps)
        return sums, context.start


def test_example_is_short() -> None:
    assert len((EXAMPLES / "custom_method.py").read_text().splitlines()) < 60


def test_example_runs_from_its_folder(tmp_path: Path) -> None:
    words = [
        "--rounds",
        "2",
        "--clients",
        "3",
        "--dataset.train-size",
        "150",
        "--json",
        "--train.lr",
        "0.1",
    ]
    words += ["--method", "custom_method:Scaffold", "--out", str(tmp_path / "run")]
    ended = call("run", *words, cwd=EXAMPLES)
    assert (ended.returncode, without_progress(ended.stderr)) == (0, "")
    summary = json.loads(ended.stdout)
    assert summary["method"] == "custom_method:Scaffold"
    # The weights and as many controls.
    assert summary["parameters_sent"] == 2 * 798_474
    assert summary["rejected"] == 0
    assert not (EXAMPLES / "runs").exists()


def test_example_matches_its_paper(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    settings = {"dtype": "float64", "train__momentum": 0.0, "engine": "loop"}
    experiment = small(images, "custom_method:Scaffold", **settings)
    scaffold = build_federation(experiment)
    average = build_federation(experiment.replace(method="fedavg"))
    begun = dict(scaffold.state.server.params)
    # Controls start at zero, so the first round is FedAvg's.
    for federation in (scaffold, average):
        federation.run_round(evaluate=True)
    assert_same_tensors(scaffold.state.server.params, average.state.server.params)
    # The server's control is now the mean of (w_start - w_i) / (steps * lr) over clients.
    sizes = scaffold.engine.sizes
    models = dict(scaffold.engine.personal_models({}))
    for name, control in scaffold.state.server.extra.items():
        wanted = torch.zeros_like(control)
        for client, size in sizes.items():
            steps = -(-size // 8)
            wanted += size / 60 * (begun[name] - models[client][name]) / (steps * 0.01)
        torch.testing.assert_close(control, wanted, rtol=1e-9, atol=1e-12)
    for federation in (scaffold, average):
        federation.run_round(evaluate=False)
    bias = "classifier.bias"
    assert not torch.equal(scaffold.state.server.params[bias], average.state.server.params[bias])


def test_personal_layers_stay_on_the_client(images: Path, tmp_path: Path) -> None:
    steps = WatchedFedPer.steps
    steps.clear()
    result = run(small(images, "test_custom_method:WatchedFedPer", rounds=3), tmp_path / "run")
    # The first call only finds out which tensors are sent.
    assert len(steps) == 10
    del steps[0]
    for number in (1, 2):
        before = steps[3 * number - 3 : 3 * number]
        now = steps[3 * number : 3 * number + 3]
        for client in range(3):
            # Each goes on with its own classifier and with everybody's other layers.
            for name in ("classifier.weight", "classifier.bias"):
                assert torch.equal(now[client][0][name], before[client][1][name])
            assert torch.equal(now[client][0]["hidden.0.weight"], now[0][0]["hidden.0.weight"])
            assert not torch.equal(
                now[client][0]["hidden.0.weight"], before[client][1]["hidden.0.weight"]
            )
    assert not (tmp_path / "run" / "model.safetensors").exists()
    assert result.accuracy is not None
    personal = [load_file(each) for each in sorted((tmp_path / "run" / "models").iterdir())]
    assert len(personal) == 3
    assert not torch.equal(personal[0]["classifier.bias"], personal[1]["classifier.bias"])
    (record, *_) = result.history
    assert record["sent"]["parameters"] == sum(
        value.numel() for name, value in personal[0].items() if not name.startswith("classifier")
    )
    assert record["accuracy"]["local_test"]["global_classifier"] is None


@pytest.mark.parametrize("method", ["fedper", "fedproc", "proto-attention", REMEMBERS])
def test_client_state_survives_an_interruption(images: Path, tmp_path: Path, method: str) -> None:
    experiment = small(images, method, rounds=3, fraction=0.7)
    run(experiment, tmp_path / "whole")
    done: list[object] = []
    stop_early = Observer(on_round=done.append, should_stop=lambda: len(done) == 2)
    run(experiment, tmp_path / "stopped", stop_early)
    resume(tmp_path / "stopped")
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


def test_run_folder_is_named_after_the_class(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(small(images, REMEMBERS, rounds=1))
    assert result.path == Path("runs/RemembersGlobal-folder-label-seed0")
