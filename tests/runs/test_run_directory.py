"""A run and its directory: where it is, who may write there, who looks on."""

from pathlib import Path

import pytest
import torch

from mpfedcl import InvalidInput, run
from mpfedcl.core.files import FORMAT
from mpfedcl.engines.hardware import cap_threads
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.observer import Observer
from small_experiments import small


def test_default_folder_is_named_after_the_experiment(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(small(images, "fedavg", rounds=1))
    assert result.path == Path("runs/fedavg-folder-label-seed0")
    assert (tmp_path / result.path / "summary.json").exists()


def test_observers_see_each_round(images: Path, tmp_path: Path) -> None:
    started: list[tuple[str, int]] = []
    seen: list[int] = []
    observer = Observer(
        on_start=lambda experiment, done: started.append((experiment.method, done)),
        on_round=lambda record: seen.append(record["round"]),
    )
    run(small(images), tmp_path / "run", observer)
    assert started == [("mp-fedcl", 0)]
    assert seen == [1, 2]


def test_run_stopped_before_the_first_round_has_no_summary(images: Path, tmp_path: Path) -> None:
    result = run(small(images), tmp_path / "run", Observer(should_stop=lambda: True))
    assert result.summary is None
    assert result.history == []


def test_folder_is_locked_until_closed(images: Path, tmp_path: Path) -> None:
    experiment = small(images).resolved()
    with RunDirectory.create(tmp_path / "run", experiment):
        for attempt in (RunDirectory.resume, lambda path: RunDirectory.create(path, experiment)):
            with pytest.raises(InvalidInput, match="another process is writing this run"):
                attempt(tmp_path / "run")
    with RunDirectory.resume(tmp_path / "run") as directory:
        assert directory.read_experiment() == experiment


def test_rejected_folder_is_not_left_locked(images: Path, tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "run", small(images)).close()
    for _ in range(2):
        with pytest.raises(InvalidInput, match="already holds a run"):
            RunDirectory.create(tmp_path / "run", small(images))


def test_broken_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(InvalidInput, match=r"summary.json is not valid JSON"):
        RunDirectory(tmp_path).read_summary()
    assert RunDirectory(tmp_path / "absent").read_summary() is None
    assert RunDirectory(tmp_path / "absent").read_records() == []


@pytest.mark.parametrize(("asked", "given"), [(None, 1), ("", 1), ("2,1", 1), ("0", 1), ("2", 2)])
def test_number_of_threads_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, given: int
) -> None:
    before = torch.get_num_threads()
    # Set first, so that the test leaves the environment as it found it.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if asked is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    try:
        cap_threads()
        assert torch.get_num_threads() == given
    finally:
        torch.set_num_threads(before)


def test_personal_models_can_be_left_out(images: Path, tmp_path: Path) -> None:
    run(small(images, personal_models=False), tmp_path / "run")
    assert list((tmp_path / "run" / "models").iterdir()) == []
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_run_directory_of_an_older_format_is_rejected(images: Path, tmp_path: Path) -> None:
    run(small(images, rounds=1), tmp_path / "run")
    file = tmp_path / "run" / "experiment.toml"
    file.write_text(file.read_text().replace(f"format = {FORMAT}", "format = 1"))
    with pytest.raises(InvalidInput, match=r"experiment\.toml has format 1; .* reads format 2"):
        RunDirectory(tmp_path / "run").read_experiment()
