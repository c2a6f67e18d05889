"""Draw the picture of docs/one-shot.md: what sums tell of clients that differ.

    python scripts/draw_one_shot.py

Made by the package's own functions from drawn points, in two dimensions so that they can be seen.
"""

from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Ellipse
from torch import Tensor

from mpfedcl.gaussian import ClientMeans, Covariance, estimate_effects

matplotlib.use("Agg")

OUT = Path(__file__).resolve().parents[1] / "docs" / "images" / "one-shot.png"
COLORS = ("#0072B2", "#D55E00", "#009E73")
MARKERS = ("o", "s", "^")
CENTRES = torch.tensor([[-2.4, 0.2], [2.2, 0.6], [0.1, -2.4]], dtype=torch.float64)
SHIFTS = torch.tensor([[-1.9, 1.0], [1.4, 1.7], [0.9, -1.6]], dtype=torch.float64)


def draw_points(counts: list[list[int]], *, shifted: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return points, their classes and their clients."""
    generator = torch.Generator().manual_seed(3)
    root = torch.tensor([[0.75, 0.25], [0.0, 0.45]], dtype=torch.float64)
    points, labels, owners = [], [], []
    for client, row in enumerate(counts):
        for label, count in enumerate(row):
            noise = torch.randn(count, 2, generator=generator, dtype=torch.float64) @ root
            centre = CENTRES[label] + (SHIFTS[client] if shifted else 0)
            points.append(centre + noise)
            labels += [label] * count
            owners += [client] * count
    return torch.cat(points), torch.tensor(labels), torch.tensor(owners)


def draw(axes: Axes, counts: list[list[int]], *, shifted: bool, title: str) -> None:
    """Draw the clients' points, and the Gaussians that their sums give."""
    points, labels, owners = draw_points(counts, shifted=shifted)
    for client in range(3):
        for label in range(3):
            rows = (owners == client) & (labels == label)
            x, y = points[rows].T
            axes.scatter(x, y, marker=MARKERS[client], s=16, alpha=0.5, color=COLORS[label], lw=0)
    cells, place = torch.unique(owners * 3 + labels, return_inverse=True)
    sizes = torch.bincount(place).double()
    sums = torch.zeros(len(cells), 2, dtype=torch.float64).index_add_(0, place, points)
    groups = ClientMeans(sums / sizes[:, None], cells % 3, sizes, cells // 3, 3, 3)
    centered = points - groups.vectors[place]
    covariance = Covariance.decompose(centered.T @ centered / float(groups.degrees.sum()))
    means = groups.class_means
    effects = estimate_effects(groups.totals(), means, covariance.trace)
    prototypes = effects.group_means(groups, means, effects.shifts(groups, means))
    width, height = 2 * 1.8 * covariance.spectrum.sqrt().flip(0)
    main = covariance.basis[:, 1]
    angle = float(torch.rad2deg(torch.atan2(main[1], main[0])))
    for prototype, label in zip(prototypes, groups.labels.tolist(), strict=True):
        axes.add_patch(
            Ellipse(
                tuple(prototype.tolist()),
                float(width),
                float(height),
                angle=angle,
                fill=False,
                color=COLORS[label],
                lw=1.5,
            )
        )
        axes.plot(*prototype, marker="x", ms=9, mew=2.5, color=COLORS[label])
    total = effects.shift + effects.by_class
    axes.set_title(f"{title}\nclients' own effect, from the sums: {total:.2f}", fontsize=10.5)
    axes.set_aspect("equal")
    axes.set_xlim(-6.4, 5.8)
    axes.set_ylim(-5.6, 4.2)
    axes.set_xticks([])
    axes.set_yticks([])


def main() -> None:
    """Draw both panels."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9.6, 5.3), layout="constrained")
    draw(
        panels[0],
        [[40, 0, 6], [0, 45, 4], [5, 3, 40]],
        shifted=False,
        title="Label skew: clients differ in their classes",
    )
    draw(
        panels[1],
        [[16, 16, 16]] * 3,
        shifted=True,
        title="Feature skew: clients see the classes differently",
    )
    handles = [
        Line2D([], [], marker=m, ls="", color="0.4", label=f"client {number}")
        for number, m in enumerate(MARKERS, start=1)
    ] + [Line2D([], [], marker="x", ls="", mew=2.5, color="0.2", label="prototype")]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(OUT, dpi=110)


if __name__ == "__main__":
    main()
