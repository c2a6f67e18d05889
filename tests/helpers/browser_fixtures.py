"""Fixtures of the tests in a real browser; conftest.py imports them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser_pages import PROGRAM, Open, Page
from handwritten_runs import HOSTILE, write_run
from mpfedcl import Experiment, run
from mpfedcl.api import run_or_resume
from mpfedcl.studies.comparison import Comparison
from mpfedcl.studies.jobs import JobOptions
from small_experiments import small
from watch_server import Server, watched


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """The system's own browser, without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # A container's root has no sandbox to run Chromium in.
        found = playwright.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="session")
def live_server(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A folder with all kinds of runs, watched."""
    root = tmp_path_factory.mktemp("watched") / "runs"
    run(Experiment(rounds=6), root / "digits")
    base = small(images, rounds=4, partition__alpha=0.3)
    comparison = Comparison.prepare(base, ("mp-fedcl", "fedavg"), (0, 1), root / "both")
    assert comparison.run(JobOptions(run_or_resume))
    write_run(
        root / "absent", rounds=5, rejected={"client-7": "vectors are not finite: layer <b>1</b>"}
    )
    write_run(root / HOSTILE[1].replace("/", ""), clients=HOSTILE, classes=HOSTILE)
    write_run(root / "many", clients=[f"client-{n:03}" for n in range(150)], rounds=80)
    (root / "broken").mkdir()
    (root / "broken" / "experiment.toml").write_text("method = <b>")
    with watched(root) as found:
        yield found


@pytest.fixture
def live(browser: Any, live_server: Server) -> Iterator[Open]:
    """Opens the page; afterwards nothing may have gone wrong in it, nor been asked elsewhere."""
    contexts: list[Any] = []
    troubles: list[str] = []

    def open_page(where: Server = live_server, *, width: int = 1200, **options: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        # Milliseconds that a busy machine may take.
        context.set_default_timeout(60_000)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("dialog", lambda dialog: troubles.append(dialog.message))
        page.on(
            "request",
            lambda each: None if each.url.startswith(where.address) else troubles.append(each.url),
        )
        page.goto(where.address)
        page.wait_for_selector("html[data-ready]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    # The browser itself logs requests to a server that has ended and for a run that was deleted.
    logged = ("net::ERR_", "status of 404")
    assert [each for each in troubles if not any(words in each for words in logged)] == []
