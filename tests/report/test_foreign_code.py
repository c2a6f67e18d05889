"""A report of somebody else's run runs nothing that the run names."""

import json
from pathlib import Path

import pytest
import torch

from handwritten_runs import Json, write_run, write_tuning
from mpfedcl.cli.main import main
from mpfedcl.core.tensors import pack_tensors
from mpfedcl.methods import find_method
from mpfedcl.report.document import build_document
from mpfedcl.report.result_folders import find_result_folders
from mpfedcl.report.run import RunRecords

pytestmark = pytest.mark.whole

METHOD = "planted:Planted"


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that a module in the current folder leaves behind when it is imported."""
    path = tmp_path / "it was run"
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "planted.py").write_text(
        f"from pathlib import Path\nfrom mpfedcl import Method\nPath({str(path)!r}).touch()\n"
        "class Planted(Method):\n    name = 'planted'\n"
    )
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(tmp_path / "here")
    return path


def report(*folders: Path) -> Json:
    out = folders[0].parent / "page.html"
    with pytest.raises(SystemExit) as end:
        main(["report", *map(str, folders), "--out", str(out)])
    assert end.value.code == 0
    assert out.read_text().startswith("<!doctype html>")
    return build_document(find_result_folders(folders))


def write_pool(path: Path) -> None:
    columns = {name: torch.tensor([0, 1]) for name in ("labels", "owners", "counts")}
    note = ("names", json.dumps(["client-0", "client-1"]))
    content = pack_tensors({"vectors": torch.eye(2), **columns}, note=note)
    (path / "pool.safetensors").write_bytes(content)


def test_the_trap_works(trace: Path) -> None:
    find_method(METHOD)
    assert trace.exists()


def test_a_finished_run(trace: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", method=METHOD, encoder__name="onnx:/dev/zero")
    write_pool(path)
    (run,) = report(path)["sections"][0]["details"]
    assert not trace.exists()
    assert run["predictor"] == "personal_prototype"
    assert run["map"]["count"] == [0, 1]
    assert run["settings"]["command"].endswith("experiment.toml")


@pytest.mark.parametrize("finished", [True, False])
def test_without_a_pool(trace: Path, tmp_path: Path, finished: bool) -> None:
    path = write_run(tmp_path / "run", method=METHOD, finished=finished)
    (run,) = report(path)["sections"][0]["details"]
    assert not trace.exists()
    assert run["map"]["missing"]
    # Written runs say of clients what the first reading says of all.
    assert run["predictor"] == ("personal_prototype" if finished else "global_classifier")


def test_several_runs_and_a_search(trace: Path, tmp_path: Path) -> None:
    for method, seed in ((METHOD, 0), (METHOD, 1), ("fedavg", 0), ("fedavg", 1)):
        name = method.replace(":", ".")
        write_run(tmp_path / "both" / f"{name}-seed{seed}", method=method, seed=seed)
    write_tuning(tmp_path / "tuned", METHOD)
    sections = report(tmp_path / "both", tmp_path / "tuned")["sections"]
    assert not trace.exists()
    assert [section["kind"] for section in sections] == ["comparison", "tuning"]


def test_an_encoder_that_is_a_program_is_not_opened(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", encoder__name="onnx:/dev/zero")
    write_pool(path)
    (run,) = report(path)["sections"][0]["details"]
    assert run["map"]["total"] == 2


def test_an_unread_run_of_a_foreign_method_has_the_usual_reading(
    trace: Path, tmp_path: Path
) -> None:
    path = write_run(tmp_path / "run", method=METHOD, finished=False)
    file = path / "rounds.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    unread = [line | {"accuracy": None, "accuracy_per_client": None} for line in lines]
    file.write_text("".join(json.dumps(line) + "\n" for line in unread))
    assert RunRecords.read(path).predictors["local_test"] == "global_classifier"
    assert not trace.exists()
