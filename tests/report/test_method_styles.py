"""One look for a method in every figure."""

import math
from itertools import combinations

import pytest

from mpfedcl.methods import built_in_methods
from mpfedcl.report.figures import DASHES, MARKERS, PALETTE, MethodStyle, style_of

# Machado, Oliveira and Fernandes (2009), severity 1: linear RGB as the color-blind see it.
SIGHT = {
    "protan": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deutan": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
}


FAMILIAR = ("fedgauss", "mp-fedcl", "fedavg", "fedproto", "sp-fedcl", "fedprox", "local")
SCAFFOLD = MethodStyle(color=3, marker=9, dash=4)


def test_the_name_decides_the_look_for_good() -> None:
    assert [style_of(name).color for name in FAMILIAR] == [*range(7)]
    assert style_of("MP-FedCL") == style_of("mp-fedcl")
    # As in figures of earlier years.
    assert style_of("scaffold") == SCAFFOLD


def test_looks_spread_over_colors_markers_and_dashes() -> None:
    looks = [style_of(f"package:Method{number}") for number in range(200)]
    assert {look.color for look in looks} == {*range(len(PALETTE))}
    assert {look.marker for look in looks} == {*range(len(MARKERS))}
    # A solid line is a familiar method's.
    assert {look.dash for look in looks} == {*range(1, len(DASHES))}
    assert len(set(looks)) > 150


def test_the_same_method_again_keeps_its_color() -> None:
    looks = [style_of("fedavg", copy) for copy in range(5)]
    assert {look.color for look in looks} == {style_of("fedavg").color}
    assert len(set(looks)) == 5


def test_no_method_looks_like_a_familiar_one() -> None:
    """Color and marker suffice, also for points without lines."""
    others = [*built_in_methods(), *(f"package:Method{number}" for number in range(200))]
    for familiar in FAMILIAR:
        look = style_of(familiar)
        alike = [style_of(name) for name in others if name != familiar]
        assert (look.color, look.marker) not in {(each.color, each.marker) for each in alike}


@pytest.mark.parametrize("sight", SIGHT)
def test_familiar_colors_that_look_alike_to_the_color_blind_have_other_markers(sight: str) -> None:
    alike = [
        (a, b)
        for a, b in combinations(FAMILIAR, 2)
        if distance(PALETTE[style_of(a).color], PALETTE[style_of(b).color], sight) < 12
    ]
    assert alike
    assert all(style_of(a).marker != style_of(b).marker for a, b in alike)


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
