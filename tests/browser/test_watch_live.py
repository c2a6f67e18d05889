"""The live page in a real browser, while things change: runs, rounds, the server itself."""

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser_pages import (
    MARKS,
    Open,
    block,
    open_run,
    row,
    shoot,
    shown_round,
    wait_for_round,
    wait_until,
)
from command_processes import command, environment
from handwritten_runs import write_run
from mpfedcl.runs.directory import RunDirectory
from small_experiments import flags
from watch_server import Server, watched

pytestmark = MARKS


@pytest.fixture
def going_on(images: Path, live_server: Server) -> Iterator["subprocess.Popen[str]"]:
    """A run that goes on while one looks: some 30 rounds a second at most, for minutes."""
    path = live_server.folder / "going-on"
    process = subprocess.Popen(
        command("run", "--out", path, *flags(images, rounds=5000, partition__alpha=0.3)),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    yield process
    process.send_signal(signal.SIGINT)
    process.wait(60)
    shutil.rmtree(path)


def test_a_run_that_goes_on(
    live: Open, going_on: "subprocess.Popen[str]", live_server: Server
) -> None:
    page = live()
    # It appears by itself, and grows.
    row(page, "going-on").wait_for(timeout=60_000)
    wait_until(page, "document.querySelector('.state.running') !== null")
    open_run(page, "going-on")
    wait_for_round(page, 3)
    rounds = block(page, "Accuracy per round")
    rounds.locator("summary").first.click()
    rounds.locator("summary").first.focus()
    before = rounds.locator("img").first.get_attribute("src")
    seen = shown_round(page)
    wait_for_round(page, seen + 4)
    # Figures follow after a while; newer ones leave open what the reader has opened.
    for _ in range(600):
        if rounds.locator("img").first.get_attribute("src") != before:
            break
        page.wait_for_timeout(100)
    assert rounds.locator("img").first.get_attribute("src") != before
    assert rounds.locator("details").first.get_attribute("open") is not None
    page.locator("#view").get_by_text("of 5000, accuracy").wait_for()
    shoot(page, "watch-going-on")


def test_runs_vanish_and_come_without_a_reload(live: Open, live_server: Server) -> None:
    page = live()
    path = write_run(live_server.folder / "late", rounds=3, finished=False)
    row(page, "late").wait_for()
    open_run(page, "late")
    shutil.rmtree(path)
    page.get_by_text("This run no longer exists.").wait_for()
    page.get_by_role("link", name="All runs").click()
    page.wait_for_selector(".runs tbody tr")
    assert row(page, "late").count() == 0


def test_a_server_that_ends_and_comes_back(live: Open, tmp_path: Path) -> None:
    path = write_run(tmp_path / "runs" / "one", rounds=2, finished=False)
    with watched(tmp_path / "runs") as first:
        page = live(first)
        open_run(page, "one")
        assert first.interrupt() == 0
    page.get_by_text("Not connected").wait_for()
    last = json.loads((path / "rounds.jsonl").read_text().splitlines()[-1])
    with (path / "rounds.jsonl").open("a") as file:
        file.write(json.dumps(last | {"round": 3}) + "\n")
    with watched(tmp_path / "runs", "--port", first.port):
        wait_for_round(page, 3)
        assert not page.get_by_text("Not connected").is_visible()


def test_two_hundred_runs_open_and_a_round_is_seen_at_once(
    live: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `benchmarks/watch_page.py` measures, with slack for a busy machine."""
    for number in range(200):
        write_run(tmp_path / f"run-{number:03}", rounds=60)
    path = write_run(tmp_path / "growing", rounds=2, finished=False)
    with RunDirectory.resume(path), watched(tmp_path) as many:
        page = live(many)
        began = time.perf_counter()
        page.reload()
        wait_until(page, "document.querySelectorAll('.runs tbody tr').length === 201")
        loaded = time.perf_counter() - began
        shoot(page, "watch-200")
        open_run(page, "growing")
        wait_for_round(page, 2)
        last = json.loads((path / "rounds.jsonl").read_text().splitlines()[-1])
        began = time.perf_counter()
        with (path / "rounds.jsonl").open("a") as file:
            file.write(json.dumps(last | {"round": 3}) + "\n")
        wait_for_round(page, 3)
        seen = time.perf_counter() - began
    with capsys.disabled():
        print(f"\n200 runs: page in {loaded:.2f} s; a new round seen after {seen:.2f} s")
    assert loaded < 30
    assert seen < 30
