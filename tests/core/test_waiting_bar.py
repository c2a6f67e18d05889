"""The bar for long work: silent when quick, and where nobody looks."""

import io
import itertools
from types import SimpleNamespace

import pytest

from mpfedcl.core.progress import WaitingBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("is_terminal", "seconds", "shown"),
    [(True, 1.5, True), (True, 0.01, False), (False, 1.5, False)],
)
def test_bar_is_shown_only_on_a_terminal_and_for_slow_work(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, seconds: float, shown: bool
) -> None:
    stream = Terminal() if is_terminal else io.StringIO()
    ticks = itertools.count(0, seconds)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("mpfedcl.core.progress.time", SimpleNamespace(monotonic=ticks.__next__))
    with WaitingBar("Encoding images", 5) as bar:
        for _ in range(5):
            bar.advance(1)
    assert ("Encoding images" in stream.getvalue()) == shown
    assert bool(stream.getvalue()) == shown
