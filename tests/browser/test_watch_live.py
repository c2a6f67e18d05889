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
    rounds = block(page, "Round by round")
    chosen = rounds.get_by_label("Show", exact=True)
    chosen.select_option("loss")
    rounds.locator("summary").click()
    chosen.focus()
    hidden = block(page, "Client by client").locator("button.key").first
    hidden.click()
    points = rounds.locator(".canvas polyline").first
    before = points.get_attribute("points")
    seen = shown_round(page)
    wait_for_round(page, seen + 4)
    # Newer rounds leave alone what the reader has set, opened and hidden.
    assert points.get_attribute("points") != before
    assert rounds.locator("figcaption strong").inner_text() == "Training loss per round"
    assert rounds.locator("details").get_attribute("open") is not None
    assert rounds.locator("details tbody tr").count() > seen
    assert hidden.get_attribute("aria-pressed") == "false"
    stands = block(page, "Where it stands").inner_text()
    assert "of 5000" in stands
    assert "of 3 in round" in stands
    shoot(page, "watch-going-on")


def test_the_map_moves_with_its_slider(live: Open, going_on: "subprocess.Popen[str]") -> None:
    page = live()
    row(page, "going-on").wait_for(timeout=60_000)
    open_run(page, "going-on")
    wait_for_round(page, 4)
    found = block(page, "Map of the prototypes")
    slider = found.get_by_role("slider")
    slider.wait_for()
    title = found.locator("figcaption strong")
    first = title.inner_text()
    # At its end it goes on with the run.
    wait_until(
        page,
        "text => ![...document.querySelectorAll('figcaption strong')]"
        ".some(each => each.textContent === text)",
        first,
    )
    slider.focus()
    page.keyboard.press("Home")
    assert title.inner_text().startswith("Round 1:")
    assert slider.get_attribute("aria-valuetext") == "round 1"
    place = found.locator(".canvas circle.prototype").first.get_attribute("cx")
    page.keyboard.press("ArrowRight")
    assert found.locator(".canvas circle.before").count() > 0
    assert not title.inner_text().startswith("Round 1:")
    assert found.locator(".canvas circle.prototype").first.get_attribute("cx") != place
    # Elsewhere it stays, while the run goes on.
    page.keyboard.press("Home")
    wait_for_round(page, shown_round(page) + 4)
    page.wait_for_timeout(1500)
    assert title.inner_text().startswith("Round 1:")
    found.get_by_role("button", name="Play").click()
    wait_until(page, "!document.querySelector('input[type=range] + output').value.endsWith(' 1')")
    found.get_by_role("button", name="Stop").click()
    assert page.evaluate("document.querySelectorAll('circle.prototype').length") > 3


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
