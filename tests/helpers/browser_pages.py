"""What tests in a real browser share.

Without a browser or playwright they are skipped; `make test-browser` installs both.
"""

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PROGRAM = next((found for name in _BROWSERS if (found := shutil.which(name))), None)
SCREENSHOTS = Path(__file__).parents[2] / "screenshots"

MARKS = [
    pytest.mark.browser,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium or Chrome found: make test-browser"),
    pytest.mark.skipif(
        importlib.util.find_spec("playwright") is None,
        reason="playwright is not installed: make test-browser",
    ),
    # One browser for all: xdist must not start one a process.
    pytest.mark.xdist_group("browser"),
]

Page = Any
Open = Callable[..., Page]
"""The fixture `live`: opens the live page."""


def shoot(page: Page, name: str) -> None:
    """Leave a picture of the whole page."""
    SCREENSHOTS.mkdir(exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)


def block(page: Page, title: str, place: int = 0) -> Any:
    """Return the block under a heading."""
    return page.locator(".block", has=page.locator("h3", has_text=title)).nth(place)


def wait_until(page: Page, expression: str, argument: Any = None) -> None:
    """Wait until an expression holds; not in the page, whose policy forbids it to evaluate."""
    for _ in range(1500):
        if page.evaluate(expression, argument):
            return
        page.wait_for_timeout(40)
    raise AssertionError(f"never true: {expression}")


# The live page


def row(page: Page, name: str) -> Any:
    return page.locator(".runs tbody tr", has=page.get_by_role("link", name=name, exact=True))


def open_run(page: Page, name: str) -> None:
    row(page, name).get_by_role("link").click()
    page.wait_for_selector("html[data-round]")


def shown_round(page: Page) -> int:
    return int(page.evaluate("document.documentElement.dataset.round"))


def wait_for_round(page: Page, number: int) -> None:
    wait_until(page, f"Number(document.documentElement.dataset.round) >= {number}")
