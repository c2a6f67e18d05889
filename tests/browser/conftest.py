"""The browser of all tests here."""

from collections.abc import Iterator
from typing import Any

import pytest
from browsing import PROGRAM


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """The system's own browser, without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # A container's root has no sandbox to run Chromium in.
        found = playwright.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        yield found
        found.close()
