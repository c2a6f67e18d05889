"""The watched runs: their states, new rounds, and damage that does not affect other runs."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy
import pytest

from handwritten_runs import HOSTILE, accuracy_of, write_json, write_run
from mpfedcl import run
from mpfedcl.report.document import build_document
from mpfedcl.report.result_folders import find_result_folders
from mpfedcl.report.watch import run_page
from mpfedcl.report.watch.web_app import ListedRun, WatchedRuns
from mpfedcl.runs.directory import RunDirectory
from parsed_html import Page
from small_experiments import small

pytestmark = pytest.mark.whole

Json = dict[str, Any]


def fail() -> NoReturn:
    raise AssertionError("this was not expected")


def look(watcher: WatchedRuns) -> dict[str, Json]:
    """Read all runs now; return the list by name."""
    watcher.searched_at = float("-inf")
    watcher.refresh()
    return {run.entry["name"]: run.entry for run in watcher.runs.values()}


def page_of(watcher: WatchedRuns, name: str) -> Json:
    """Return the content of a run's page."""
    return watcher.runs[name].page.content


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    for file in path.iterdir():
        os.utime(file, (then, then))


@contextmanager
def opened_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    names: list[str] = []
    real = os.open

    def note(path: Any, *words: Any, **more: Any) -> int:
        names.append(Path(path).name)
        return real(path, *words, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", note)
        yield names


def test_states_of_runs(tmp_path: Path) -> None:
    write_run(tmp_path / "done")
    write_run(tmp_path / "stopped", finished=False)
    age(tmp_path / "stopped", 60)
    write_run(tmp_path / "growing", finished=False)
    write_run(tmp_path / "locked", finished=False)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "experiment.toml").write_text("method = ")
    with RunDirectory.resume(tmp_path / "locked"):
        age(tmp_path / "locked", 3600)
        watcher = WatchedRuns(tmp_path)
        states = {name: entry["state"] for name, entry in look(watcher).items()}
    assert states == {
        "done": "finished",
        "stopped": "stopped",
        "growing": "running",
        "locked": "running",
        "broken": "damaged",
    }
    assert look(watcher)["locked"]["state"] == "stopped"
    assert "is not valid TOML" in look(watcher)["broken"]["trouble"]


def test_list_shows_values_of_the_run(images: Path, tmp_path: Path) -> None:
    result = run(small(images, rounds=3), tmp_path / "runs" / "mine")
    entry = look(WatchedRuns(tmp_path))["mine"]
    assert entry["accuracy"] == pytest.approx(result.accuracy, abs=0.006)
    assert (entry["round"], entry["planned"], entry["folder"]) == (3, 3, "runs")
    assert [number for number, _ in entry["curve"]] == [1, 2, 3]


def test_new_runs_appear_and_deleted_ones_disappear(tmp_path: Path) -> None:
    write_run(tmp_path / "first")
    watcher = WatchedRuns(tmp_path)
    first = look(watcher)["first"]
    write_run(tmp_path / "below" / "second")
    assert set(look(watcher)) == {"first", "second"}
    shutil.rmtree(tmp_path / "first")
    assert list(look(watcher)) == ["second"]
    assert watcher.show_run(first["id"]) is None


def test_only_runs_that_changed_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        write_run(tmp_path / f"done-{number}")
    path = write_run(tmp_path / "growing", rounds=2, finished=False)
    watcher = WatchedRuns(tmp_path)
    look(watcher)
    with opened_files(monkeypatch) as names:
        look(watcher)
        assert names == []
        lines = (path / "rounds.jsonl").read_text().splitlines()
        third = json.loads(lines[-1]) | {"round": 3}
        with (path / "rounds.jsonl").open("a") as file:
            file.write(json.dumps(third) + "\n")
        watcher.refresh()
        assert names == ["experiment.toml", "rounds.jsonl", "partition.json"]
    assert look(watcher)["growing"]["round"] == 3


@pytest.mark.whole
def test_second_page_of_a_run_reads_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "run")
    watcher = WatchedRuns(tmp_path)
    name = look(watcher)["run"]["id"]
    first = watcher.show_run(name)
    with opened_files(monkeypatch) as names:
        assert watcher.show_run(name) == first
    assert names == []


def test_live_page_has_the_content_of_the_report(images: Path, tmp_path: Path) -> None:
    run(small(images, rounds=3, partition__alpha=0.3), tmp_path / "mine")
    watcher = WatchedRuns(tmp_path)
    found = page_of(watcher, look(watcher)["mine"]["id"])
    (section,) = build_document(find_result_folders([tmp_path / "mine"]))["sections"]
    # The live page opens no data set: its map has no test images.
    theirs, ours = ({**each, "map": None} for each in (section["details"][0], found["run"]))
    assert ours == theirs
    assert found["group"]["curves"] == section["groups"][0]["curves"]
    assert found["troubles"] == []
    assert [line["name"] for line in found["clients"]["loss"]] == [
        "client-0", "client-1", "client-2"
    ]  # fmt: skip
    assert found["attendance"] == {
        "rounds": [1, 2, 3], "answered": [3, 3, 3], "missing": [0, 0, 0], "rejected": [0, 0, 0]
    }  # fmt: skip


def test_rejected_client_is_shown_with_its_reason(tmp_path: Path) -> None:
    write_run(tmp_path / "run", rejected={"client-9": "it is not finite"})
    watcher = WatchedRuns(tmp_path)
    entry = look(watcher)["run"]
    found = page_of(watcher, entry["id"])
    assert entry["counts"]["updates rejected"] == 1
    assert found["run"]["absences"]["rows"][0]["why"] == "it is not finite"
    assert found["attendance"]["rejected"] == [0, 0, 1]


DAMAGE = {
    "experiment.toml": [b"", b"\xff\xfe", b'format = 99\nmethod = "mp-fedcl"', b"[" * 5000],
    "rounds.jsonl": [b"", b"{" * 9999, b"\x00" * 100, b"NaN\n1\n"],
    "summary.json": [b"", b"[]", b'{"predictor": 1}', b"[" * 5000],
    "partition.json": [b"{}", b'{"classes": ["a"], "clients": {"x": {"train": [], "test": 1}}}'],
    "confusion.json": [b"null", b'{"round": NaN}'],
}


@pytest.mark.parametrize(
    ("name", "content"), [(name, each) for name, several in DAMAGE.items() for each in several]
)
def test_damaged_file_does_not_affect_other_runs(tmp_path: Path, name: str, content: bytes) -> None:
    write_run(tmp_path / "sound")
    write_run(tmp_path / "damaged")
    (tmp_path / "damaged" / name).write_bytes(content)
    watcher = WatchedRuns(tmp_path)
    seen = look(watcher)
    assert seen["sound"]["state"] == "finished"
    assert seen["sound"]["accuracy"] == pytest.approx(
        sum(accuracy_of(3, place) for place in range(3)) / 3, abs=0.01
    )
    found = page_of(watcher, seen["damaged"]["id"])
    both = watcher.compare(watcher.runs.values())
    assert len(both["groups"]) >= 1
    if name in ("summary.json", "partition.json", "confusion.json"):
        assert any(name in trouble for trouble in found["troubles"])
        assert found["run"]["rounds"] == 3


def test_unexpected_error_does_not_affect_other_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "odd")
    write_run(tmp_path / "sound")
    real = ListedRun._describe
    monkeypatch.setattr(
        ListedRun, "_describe", lambda run: fail() if run.path.name == "odd" else real(run)
    )
    watcher = WatchedRuns(tmp_path)
    seen = look(watcher)
    assert seen["sound"]["state"] == "finished"
    assert seen["odd"]["state"] == "damaged"
    assert "AssertionError: this was not expected" in seen["odd"]["trouble"]


def test_unknown_method_is_named(tmp_path: Path) -> None:
    write_run(tmp_path / "run", finished=False)
    file = tmp_path / "run" / "experiment.toml"
    file.write_text(file.read_text().replace('"mp-fedcl"', '"from-tomorrow"'))
    watcher = WatchedRuns(tmp_path)
    found = page_of(watcher, look(watcher)["run"]["id"])
    assert "from-tomorrow" in found["troubles"][0]


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    lines = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {"loss": float("nan"), "accuracy_per_client": {"client-0": float("inf")}}
        line["accuracy"]["local_test"] = dict.fromkeys(line["accuracy"]["local_test"], float("nan"))
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    watcher = WatchedRuns(tmp_path)
    entry = look(watcher)["run"]
    assert (entry["accuracy"], entry["curve"]) == (None, [])
    assert entry["counts"]["damaged lines"] == 3
    assert "nan" not in (watcher.show_run(entry["id"]) or "nan").lower()
    assert "nan" not in watcher.show_comparison([entry["id"]]).lower()


def test_links_and_pipes_are_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    write_json(secret, {"predictor": "global_classifier", "versions": {"secret": "1"}})
    path = write_run(tmp_path / "runs" / "run", finished=False)
    (path / "summary.json").symlink_to(secret)
    records = tmp_path / "records"
    (path / "rounds.jsonl").rename(records)
    (path / "rounds.jsonl").symlink_to(records)
    os.mkfifo(path / "confusion.json")
    watcher = WatchedRuns(tmp_path / "runs")
    entry = look(watcher)["run"]
    assert "secret" not in (watcher.show_run(entry["id"]) or "")
    assert (entry["round"], page_of(watcher, entry["id"])["run"]["rounds"]) == (0, 0)


@pytest.mark.whole
def test_names_from_files_stay_text(tmp_path: Path) -> None:
    write_run(tmp_path / "run", clients=HOSTILE, classes=HOSTILE, rejected={HOSTILE[0]: HOSTILE[1]})
    watcher = WatchedRuns(tmp_path)
    name = look(watcher)["run"]["id"]
    found = page_of(watcher, name)
    assert {client["name"] for client in found["run"]["clients"]} == set(HOSTILE)
    shown = watcher.show_run(name)
    assert shown is not None
    assert not {tag for tag, _ in Page(shown).tags} & {"script", "img", "b"}


def test_comparison_groups_runs_by_seed(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path / f"a-{seed}", seed=seed)
        write_run(tmp_path / f"b-{seed}", seed=seed, method="fedavg")
    write_run(tmp_path / "other")
    (tmp_path / "other" / "rounds.jsonl").write_text("")
    watcher = WatchedRuns(tmp_path)
    look(watcher)
    assert "5 runs compared" in watcher.show_comparison([*watcher.runs, "0" * 20])
    found = watcher.compare(watcher.runs.values())
    groups = {group["name"]: group for group in found["groups"]}
    assert {name: group["seeds"] for name, group in groups.items()} == {
        "mp-fedcl": [0, 1], "fedavg": [0, 1]
    }  # fmt: skip
    assert groups["fedavg"]["curves"]["accuracy"]["local_test"]["global_classifier"]["std"]
    assert found["tables"][0]["columns"][0] == "method"
    assert found["troubles"] == ["other has no round yet."]
    assert watcher.compare([])["groups"] == []


def test_curves_of_some_clients_are_shown(tmp_path: Path) -> None:
    clients = [f"client-{number:04}" for number in range(50)]
    write_run(tmp_path / "run", clients=clients, rounds=30)
    watcher = WatchedRuns(tmp_path)
    name = look(watcher)["run"]["id"]
    found = page_of(watcher, name)
    lines = found["clients"]["accuracy"]
    assert (len(lines), found["clients"]["left_out"]) == (12, 38)
    assert all(len(line["x"]) == 30 for line in lines)
    assert found["attendance"]["answered"] == [50] * 30
    assert len(found["run"]["clients"]) == 50


def test_more_clients_than_lines_are_quartiles(tmp_path: Path) -> None:
    clients = [f"client-{number:04}" for number in range(1001)]
    write_run(tmp_path / "run", clients=clients, rounds=2)
    watcher = WatchedRuns(tmp_path)
    found = page_of(watcher, look(watcher)["run"]["id"])
    lines = {line["name"]: line for line in found["clients"]["accuracy"]}
    accuracies = [accuracy_of(2, place) for place in range(1001)]
    assert lines["median"]["x"] == [1, 2]
    assert lines["median"]["mean"][1] == pytest.approx(numpy.percentile(accuracies, 50), rel=1e-4)
    assert (found["clients"]["names"], found["clients"]["left_out"]) == ([], 1001)
    assert (found["run"]["population"], len(found["run"]["clients"])) == (1001, 1000)


def test_resumed_run_is_read_from_its_first_round(images: Path, tmp_path: Path) -> None:
    """The records of a resumed run are replaced; no round is counted twice."""
    from mpfedcl import resume

    run(small(images, rounds=2), tmp_path / "mine")
    watcher = WatchedRuns(tmp_path)
    name = look(watcher)["mine"]["id"]
    assert page_of(watcher, name)["run"]["rounds"] == 2
    resume(tmp_path / "mine", rounds=4)
    assert look(watcher)["mine"]["round"] == 4
    found = page_of(watcher, name)
    assert found["attendance"]["rounds"] == [1, 2, 3, 4]
    assert found["run"]["finished"] is True


def test_drawing_takes_a_bounded_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []

    def show(content: Any) -> list[Any]:
        drawn.append(content["run"]["rounds"])
        return []

    now = [100.0]

    def tell() -> float:
        now[0] += 1
        return now[0]

    monkeypatch.setattr(run_page, "_show_blocks", show)
    monkeypatch.setattr("mpfedcl.report.watch.run_page.time.monotonic", tell)
    path = write_run(tmp_path / "run", rounds=2, finished=False)
    watcher = WatchedRuns(tmp_path)
    name = look(watcher)["run"]["id"]
    last = json.loads((path / "rounds.jsonl").read_text().splitlines()[-1])
    for number in (3, 4):
        with (path / "rounds.jsonl").open("a") as file:
            file.write(json.dumps(last | {"round": number}) + "\n")
        assert f'data-round="{number}"' in (watcher.show_run(name) or "")
    # The values are new at once; the figures are drawn again after some time.
    assert drawn == [3]
    now[0] += 100
    watcher.show_run(name)
    assert drawn == [3, 4]
