"""One look for a method everywhere."""

import math
import re
from itertools import combinations

import pytest

from mpfedcl.methods import built_in_methods
from mpfedcl.report.html import read_page_file
from mpfedcl.report.method_styles import DASHES, MARKERS, PALETTE, is_styled, style_of

# Machado, Oliveira and Fernandes (2009), severity 1: linear RGB as the color-blind see it.
SIGHT = {
    "protan": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deutan": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
}


def test_every_built_in_method_has_a_look_of_its_own() -> None:
    names = list(built_in_methods())
    assert all(is_styled(name) for name in names)
    looks = {style_of(name) for name in names}
    assert len(looks) == len(names)
    # Color and marker suffice, also where there are no lines.
    assert len({(look.color, look.marker) for look in looks}) == len(names)


def test_looks_do_not_change() -> None:
    """A method keeps its color for good: figures of different years are laid side by side."""
    known = ("fedgauss", "mp-fedcl", "fedavg", "fedproto", "sp-fedcl", "fedprox", "local")
    assert [style_of(name).color for name in known] == [*range(7)]
    assert style_of("MP-FedCL") == style_of("mp-fedcl")
    assert style_of("mypackage.mymodule:Mine").to_json() == {"color": 5, "marker": 4, "dash": 5}


def test_methods_that_are_often_compared_have_colors_of_their_own() -> None:
    family = ("mp-fedcl", "sp-fedcl", "dp-fedcl")
    often = (*family, "fedgauss", "fedavg", "fedprox", "fedproto", "local", "scaffold", "ditto")
    assert len({style_of(name).color for name in often}) == len(often)


def test_other_methods_never_look_like_a_built_in_one() -> None:
    built_in = {style_of(name).dash for name in built_in_methods()}
    others = [style_of(f"package:Method{number}") for number in range(200)]
    assert not built_in & {look.dash for look in others}
    assert len(set(others)) > 120


def test_the_same_method_again_keeps_its_color() -> None:
    looks = [style_of("fedavg", copy) for copy in range(5)]
    assert {look.color for look in looks} == {style_of("fedavg").color}
    assert len(set(looks)) == 5


def test_the_page_has_the_same_palette_markers_and_dashes() -> None:
    css = read_page_file("page.css")
    light = css[: css.index("@media")]
    assert re.findall(r"--c\d: (#\w+)", light) == list(PALETTE)
    core = read_page_file("charts/core.js")
    shapes = core[core.index("const SHAPES = [") : core.index("const DASHES")]
    assert shapes.count("(r) =>") == len(MARKERS)
    dashes = re.search(r"const DASHES = \[(.*?)\];", core)
    assert dashes is not None
    patterns = [part.strip().strip('"') for part in dashes[1].split(",")]
    ours = ["" if d == "-" else " ".join(str(each) for each in d[1]) for d in DASHES]
    assert patterns == ours


@pytest.mark.parametrize("sight", SIGHT)
def test_colors_that_look_alike_to_the_color_blind_have_other_markers(sight: str) -> None:
    alike = [
        (a, b)
        for a, b in combinations(built_in_methods(), 2)
        if distance(PALETTE[style_of(a).color], PALETTE[style_of(b).color], sight) < 12
    ]
    assert alike
    same = [(a, b) for a, b in alike if style_of(a).marker == style_of(b).marker]
    # Whoever shares a marker as well has another line.
    assert all(style_of(a).dash != style_of(b).dash for a, b in same)


def distance(a: str, b: str, sight: str) -> float:
    """Return how far apart two colors look, in CIE Lab."""
    ours, theirs = (to_lab(color, sight) for color in (a, b))
    return math.dist(ours, theirs)


def to_lab(color: str, sight: str) -> tuple[float, float, float]:
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    seen = [max(0.0, sum(w * p for w, p in zip(row, linear, strict=True))) for row in SIGHT[sight]]
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    x, y, z = (
        sum(w * p for w, p in zip(row, seen, strict=True)) / most
        for row, most in zip(to_xyz, white, strict=True)
    )
    f = [t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z)]
    return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])
