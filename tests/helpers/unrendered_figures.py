"""Figures are drawn in every test, and made into pixels only for those that look at them.

The pixels are matplotlib's work, and take most of the time of a small run on the command line.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

_render = Figure.savefig


def _leave_empty(figure: Figure, target: Any, **options: Any) -> None:
    if isinstance(target, Path):
        target.touch()
    else:
        # An image inside a page.
        _render(figure, target, **options)


def render(*, pixels: bool) -> None:
    """Make pixels of figures from now on, or leave empty files."""
    Figure.savefig = _render if pixels else _leave_empty  # type: ignore[assignment,method-assign]


@contextmanager
def rendered() -> Iterator[None]:
    """Make pixels meanwhile."""
    render(pixels=True)
    try:
        yield
    finally:
        render(pixels=False)
