"""The watched runs: their states, new rounds, and damage that does not affect other runs."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from handwritten_runs import HOSTILE, accuracy_of, write_json, write_run
from mpfedcl import run
from mpfedcl.report.document import build_document
from mpfedcl.report.html import section_blocks
from mpfedcl.report.result_folders import find_result_folders
from mpfedcl.report.watch import pages
from mpfedcl.report.watch.pages import show_comparison, show_list, show_run
from mpfedcl.report.watch.runs import WatchedRun, WatchedRuns
from mpfedcl.runs.directory import RunDirectory
from parsed_html import Page
from small_experiments import read_records, small

pytestmark = pytest.mark.whole

Json = dict[str, Any]


def fail() -> NoReturn:
    raise AssertionError("this was not expected")


def look(watcher: WatchedRuns) -> dict[str, WatchedRun]:
    """Read all runs now; return them by name."""
    watcher.searched_at = float("-inf")
    watcher.refresh()
    return {run.name: run for run in watcher.runs.values()}


def page_of(watcher: WatchedRuns, name: str) -> str:
    """Read all runs now; return the page of one."""
    shown = show_run(watcher, look(watcher)[name].id)
    assert shown is not None
    return shown


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
        states = {name: run.state for name, run in look(watcher).items()}
    assert states == {
        "done": "finished",
        "stopped": "stopped",
        "growing": "running",
        "locked": "running",
        "broken": "damaged",
    }
    assert look(watcher)["locked"].state == "stopped"
    assert "is not valid TOML" in look(watcher)["broken"].trouble


def test_list_shows_values_of_the_run(images: Path, tmp_path: Path) -> None:
    result = run(small(images, rounds=3), tmp_path / "runs" / "mine")
    found = look(WatchedRuns(tmp_path))["mine"]
    assert found.seen["value"] == pytest.approx(result.accuracy, abs=0.006)
    assert (found.seen["round"], found.seen["planned"], found.folder) == (3, 3, "runs")


def test_pages_show_the_primary_metric(images: Path, tmp_path: Path) -> None:
    for metric in ("macro_f1", "nll"):
        run(small(images, "fedavg", rounds=2, metric=metric), tmp_path / metric)
    watcher = WatchedRuns(tmp_path)
    shown = {metric: page_of(watcher, metric) for metric in ("macro_f1", "nll")}
    values = {name: read_records(tmp_path / name)[-1]["metric"]["local_test"] for name in shown}
    words = {"macro_f1": f"macro F1 {values['macro_f1']:.1f} %", "nll": f"NLL {values['nll']:.3f}"}
    listed = str(show_list(watcher))
    for name, titles in (("macro_f1", "Macro F1 per round"), ("nll", "NLL per round")):
        assert f"Round 2 of 2, {words[name]}" in shown[name]
        assert words[name] in listed
        assert titles in shown[name]
        assert "<summary>Accuracy</summary>" in shown[name]


def test_new_runs_appear_and_deleted_ones_disappear(tmp_path: Path) -> None:
    write_run(tmp_path / "first")
    watcher = WatchedRuns(tmp_path)
    first = look(watcher)["first"]
    write_run(tmp_path / "below" / "second")
    assert set(look(watcher)) == {"first", "second"}
    shutil.rmtree(tmp_path / "first")
    assert list(look(watcher)) == ["second"]
    assert show_run(watcher, first.id) is None


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
        assert {*names} == {"experiment.toml", "rounds.jsonl", "partition.json"}
    assert look(watcher)["growing"].seen["round"] == 3


@pytest.mark.whole
def test_second_page_of_a_run_reads_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "run")
    watcher = WatchedRuns(tmp_path)
    name = look(watcher)["run"].id
    first = show_run(watcher, name)
    with opened_files(monkeypatch) as names:
        assert show_run(watcher, name) == first
    assert names == []


def test_live_page_has_the_blocks_of_the_report(images: Path, tmp_path: Path) -> None:
    run(small(images, rounds=3, partition__alpha=0.3), tmp_path / "mine")
    (section,) = build_document(find_result_folders([tmp_path / "mine"]))["sections"]
    shown = page_of(WatchedRuns(tmp_path), "mine")
    for each in section_blocks(section):
        assert each in shown


def test_rejected_client_is_shown_with_its_reason(tmp_path: Path) -> None:
    write_run(tmp_path / "run", rejected={"client-9": "it is not finite"})
    watcher = WatchedRuns(tmp_path)
    assert look(watcher)["run"].seen["counts"]["updates rejected"] == 1
    assert "it is not finite" in page_of(watcher, "run")


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
    assert seen["sound"].state == "finished"
    assert seen["sound"].seen["value"] == pytest.approx(
        sum(accuracy_of(3, place) for place in range(3)) / 3, abs=0.01
    )
    # Without records, a run looks as if it had only begun.
    if (name, content) != ("rounds.jsonl", b""):
        assert seen["damaged"].state == "damaged"
        assert name in seen["damaged"].trouble
        assert name in page_of(watcher, "damaged")
    shown = show_comparison(watcher, [*watcher.runs])
    assert "Accuracy per round" in shown
    assert "damaged" in shown


def test_unexpected_error_does_not_affect_other_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "odd")
    write_run(tmp_path / "sound")
    real = WatchedRun._describe
    monkeypatch.setattr(
        WatchedRun, "_describe", lambda run: fail() if run.path.name == "odd" else real(run)
    )
    watcher = WatchedRuns(tmp_path)
    seen = look(watcher)
    assert seen["sound"].state == "finished"
    assert seen["odd"].state == "damaged"
    assert "AssertionError: this was not expected" in seen["odd"].trouble


def test_unknown_method_is_named(tmp_path: Path) -> None:
    write_run(tmp_path / "run", finished=False)
    file = tmp_path / "run" / "experiment.toml"
    file.write_text(file.read_text().replace('"mp-fedcl"', '"from-tomorrow"'))
    assert "from-tomorrow" in page_of(WatchedRuns(tmp_path), "run")


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    lines = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    lines[-1]["loss"] = float("nan")
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    watcher = WatchedRuns(tmp_path)
    found = look(watcher)["run"]
    assert (found.seen["round"], found.seen["counts"]["damaged lines"]) == (2, 1)
    assert "nan" not in page_of(watcher, "run").lower()
    assert "nan" not in show_comparison(watcher, [found.id]).lower()


def test_line_that_is_being_written_is_not_damaged(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", finished=False)
    with (path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 4, "lo')
    found = look(WatchedRuns(tmp_path))["run"]
    assert (found.seen["round"], found.seen["counts"]["damaged lines"]) == (3, 0)


@pytest.mark.parametrize("name", ["summary.json", "rounds.jsonl", "pool.safetensors"])
def test_links_and_pipes_are_not_read(tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret"
    write_json(secret, {"predictor": "global_classifier", "versions": {"secret": "1"}})
    for kind in ("link", "pipe"):
        path = write_run(tmp_path / "runs" / kind, finished=False)
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(secret) if kind == "link" else os.mkfifo(path / name)
    found = look(WatchedRuns(tmp_path / "runs"))
    for each in found.values():
        assert (each.state, each.trouble) == ("damaged", f"{name} is not a regular file.")


@pytest.mark.whole
def test_names_from_files_stay_text(tmp_path: Path) -> None:
    write_run(tmp_path / "run", clients=HOSTILE, classes=HOSTILE, rejected={HOSTILE[0]: HOSTILE[1]})
    shown = page_of(WatchedRuns(tmp_path), "run")
    assert not {tag for tag, _ in Page(shown).tags} & {"script", "b"}


def test_comparison_groups_runs_by_seed(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path / f"a-{seed}", seed=seed)
        write_run(tmp_path / f"b-{seed}", seed=seed, method="fedavg")
    write_run(tmp_path / "other", finished=False)
    (tmp_path / "other" / "rounds.jsonl").write_text("")
    watcher = WatchedRuns(tmp_path)
    look(watcher)
    shown = show_comparison(watcher, [*watcher.runs, "0" * 20])
    assert "5 runs compared" in shown
    assert "mean(std) over 2 seeds" in shown
    assert "other has no round yet." in shown
    assert "None of these runs can be shown." in show_comparison(watcher, [])


def test_resumed_run_is_read_from_its_first_round(images: Path, tmp_path: Path) -> None:
    """The records of a resumed run are replaced; no round is counted twice."""
    from mpfedcl import resume

    run(small(images, rounds=2), tmp_path / "mine")
    watcher = WatchedRuns(tmp_path)
    assert look(watcher)["mine"].seen["round"] == 2
    resume(tmp_path / "mine", rounds=4)
    found = look(watcher)["mine"]
    assert (found.seen["round"], found.state) == (4, "finished")
    assert [line.round for line in found.records.rounds] == [1, 2, 3, 4]


def test_a_version_is_drawn_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def describe(records: Any) -> Json:
        drawn.append(records.rounds[-1].round)
        return {"kind": "tuning", "tables": [], "searches": []}

    monkeypatch.setattr(pages, "describe_single_run", describe)
    path = write_run(tmp_path / "run", rounds=2, finished=False)
    watcher = WatchedRuns(tmp_path)
    last = json.loads((path / "rounds.jsonl").read_text().splitlines()[-1])
    for number in (3, 4):
        with (path / "rounds.jsonl").open("a") as file:
            file.write(json.dumps(last | {"round": number}) + "\n")
        for _ in range(2):
            assert f'data-round="{number}"' in page_of(watcher, "run")
    assert drawn == [3, 4]
