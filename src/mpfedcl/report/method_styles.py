"""One color, marker and line style for each method, the same in every figure and on every page."""

import hashlib
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

PALETTE = (
    "#0072b2", "#d55e00", "#00845f", "#b5528d", "#2a8fc9",
    "#a87400", "#5b6470", "#6a3d9a", "#8c564b", "#17808c",
)  # fmt: skip
"""As `--c0` to `--c9` of the page: after Okabe and Ito, darker on white. No ten colors can be told
apart by everybody, so a method's marker differs from that of all methods of similar colors."""
MARKERS = ("o", "s", "^", "D", "v", "P", "p", "<", ">", "*")
"""As the page's shapes, in this order. No cross: that is a seed which diverged."""
DASHES = (
    "-", (0, (7, 3)), (0, (2, 3)), (0, (9, 3, 2, 3)), (0, (4, 2)), (0, (12, 4)),
    (0, (5, 2, 1, 2, 1, 2)),
)  # fmt: skip
"""As the page's dash patterns, in this order."""

# In this order for good: a method's place is its color. New methods are added at the end.
_BUILT_IN = (
    "fedgauss", "mp-fedcl", "fedavg", "fedproto", "sp-fedcl",
    "fedprox", "local", "dp-fedcl", "scaffold", "ditto",
    "fedncm", "fedpcl", "fedavg-ft", "proto-attention", "feddyn",
    "fednova", "local-gauss", "pfedme", "moon", "fedopt",
    "fedlda", "mpfed", "fedasync", "fedproc", "fedlc",
    "fedrs", "fedper", "fedrep", "proto-inference", "fedat",
    "fedridge", "fedcof", "sageflow", "fedmmd", "async-share",
    "aso-fed", "fedbn", "fed-dropout", "afd", "cmfl",
)  # fmt: skip
_DASHES_OF_BUILT_IN = 4
_COLORS = len(PALETTE)


@dataclass(frozen=True)
class MethodStyle:
    """Places in the palette, the markers and the dash patterns."""

    color: int
    marker: int
    dash: int

    def line(self) -> dict[str, Any]:
        """Return the style as matplotlib's words for a line."""
        return {
            "color": PALETTE[self.color],
            "marker": MARKERS[self.marker],
            "linestyle": DASHES[self.dash],
        }

    def dot(self) -> dict[str, Any]:
        """Return the style as matplotlib's words for single points."""
        return {"color": PALETTE[self.color], "marker": MARKERS[self.marker]}

    def to_json(self) -> dict[str, int]:
        """Return the places as a page needs them."""
        return {"color": self.color, "marker": self.marker, "dash": self.dash}


def _style_at(place: int) -> MethodStyle:
    color, turn = place % _COLORS, place // _COLORS
    return MethodStyle(color, (color + turn) % len(MARKERS), turn)


_STYLES = MappingProxyType({name: _style_at(place) for place, name in enumerate(_BUILT_IN)})


def style_of(method: str, copy: int = 0) -> MethodStyle:
    """Return the style of a method, by its name as in settings or as in the paper's tables.

    Another name gets one that its letters decide, with a line that no built-in method has. `copy`
    counts the same method in a figure once more, with other settings: its color stays.
    """
    found = _STYLES.get(method.lower()) or _style_by_letters(method)
    if not copy:
        return found
    return MethodStyle(
        found.color,
        (found.marker + copy * _DASHES_OF_BUILT_IN) % len(MARKERS),
        (found.dash + copy) % len(DASHES),
    )


def is_styled(method: str) -> bool:
    """Tell whether a name has a style of its own, and not only by its letters."""
    return method.lower() in _STYLES


def _style_by_letters(name: str) -> MethodStyle:
    number = int.from_bytes(hashlib.sha256(name.encode("utf-8", "replace")).digest()[:8], "big")
    number, color = divmod(number, _COLORS)
    number, marker = divmod(number, len(MARKERS))
    return MethodStyle(
        color, marker, _DASHES_OF_BUILT_IN + number % (len(DASHES) - _DASHES_OF_BUILT_IN)
    )
