"""How soon the live page shows what there is: 200 finished runs, and a run that goes on.

    python benchmarks/watch_page.py

needs Chromium and playwright (`make test-browser` installs both). It prints seconds: from asking
for the page to its last row, and from a round's line being on disk to its number being on the page.
"""

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpfedcl.cli.terminal import stdout_console
from mpfedcl.core.progress import stderr_console

_COMMAND = [sys.executable, "-m", "mpfedcl"]
_SEEN = """() => {
  window.seen = [];
  new MutationObserver(() => {
    const { round } = document.documentElement.dataset;
    if (round) window.seen.push([Number(round), Date.now() / 1000]);
  }).observe(document.documentElement, { attributes: true, attributeFilter: ["data-round"] });
}"""


def measure() -> None:
    """Measure both and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=30, help="of the run that goes on")
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        stderr_console().print(f"making {given.runs} runs of 60 rounds")
        _make_runs(root, given.runs)
        with _watch(root) as address, _browse() as browser:
            loads = [_load(browser, address, given.runs) for _ in range(given.repeats)]
            _tell(f"page of {given.runs} finished runs", loads)
            _tell("a round of a running run", _follow(browser, address, root, given.rounds))


def _make_runs(root: Path, count: int) -> None:
    """Make one real run of 60 rounds and copy its records, each with a seed of its own."""
    first = root / "run-000"
    words = ["run", "--rounds", "60", "--train.epochs", "1", "--evaluate-every", "5"]
    command = [*_COMMAND, *words, "--no-personal-models", "--out", str(first)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    for number in range(1, count):
        path = root / f"run-{number:03}"
        shutil.copytree(first, path, ignore=shutil.ignore_patterns("checkpoint", "*.png"))
        file = path / "experiment.toml"
        file.write_text(file.read_text().replace("seed = 0\n", f"seed = {number}\n"))


@contextmanager
def _watch(root: Path) -> Iterator[str]:
    server = subprocess.Popen(
        [*_COMMAND, "watch", str(root), "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found
        yield found[0]
    finally:
        server.terminate()
        server.wait()


@contextmanager
def _browse() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    program = next(found for name in names if (found := shutil.which(name)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


def _load(browser: Any, address: str, count: int) -> float:
    """Open the page anew, nothing cached; return the seconds until all rows are there."""
    context = browser.new_context()
    page = context.new_page()
    began = time.perf_counter()
    page.goto(address)
    page.locator(".runs tbody tr").nth(count - 1).wait_for()
    took = time.perf_counter() - began
    context.close()
    return took


def _follow(browser: Any, address: str, root: Path, rounds: int) -> list[float]:
    """Run an experiment; return for each round that was shown the seconds since it was written."""
    path = root / "going-on"
    page = browser.new_page()
    page.goto(address)
    written: dict[int, float] = {}
    stop = threading.Event()
    noting = threading.Thread(target=_note_rounds, args=(path / "rounds.jsonl", written, stop))
    noting.start()
    words = ["run", "--rounds", str(rounds), "--out", str(path)]
    run = subprocess.Popen([*_COMMAND, *words], stdout=subprocess.DEVNULL)
    page.get_by_role("link", name="going-on", exact=True).click(timeout=60_000)
    page.evaluate(_SEEN)
    while run.poll() is None:
        page.wait_for_timeout(200)
    page.wait_for_timeout(2000)
    stop.set()
    noting.join()
    first: dict[int, float] = {}
    for number, moment in page.evaluate("window.seen"):
        first.setdefault(int(number), moment)
    return [moment - written[number] for number, moment in first.items() if number in written]


def _note_rounds(file: Path, written: dict[int, float], stop: threading.Event) -> None:
    """Note when each round's line was first on disk."""
    while not stop.is_set():
        lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
        for line in lines[len(written) :]:
            written.setdefault(json.loads(line)["round"], time.time())
        time.sleep(0.005)


def _tell(what: str, seconds: Sequence[float]) -> None:
    stdout_console().print(
        f"{what}: median {statistics.median(seconds):.2f} s, from {min(seconds):.2f} to "
        f"{max(seconds):.2f} s ({len(seconds)} times)"
    )


if __name__ == "__main__":
    measure()
