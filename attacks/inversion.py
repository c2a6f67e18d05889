"""Inversion: reconstruct images from prototypes and feature statistics.

The attacker knows the encoder (for MP-FedCL, the client's model) and has other digits of the same
distribution. It trains a decoder from means of features to means of images, and applies it to the
message of a client. A reconstruction is scored by its structural similarity (SSIM) to the most
similar image behind it, compared with as many other images of the class: only the excess is learned
from the client's images. The baseline is the mean of the attacker's images of the class.

`python attacks/inversion.py figure.png` draws images next to their reconstructions.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from torch import Tensor, nn
from torch.nn.functional import mse_loss, normalize

from curious_server import Digits, load_digits, observe
from mpfedcl.gaussian import unit_features
from outcome import Outcome
from ssim import ssim

GROUPS = (1, 5, 20)
"""Images behind a mean."""
EPOCHS = 60
PICTURES = 40
"""Means of each size of group that are inverted."""


@dataclass(frozen=True)
class Inverted:
    """Means of groups of images, and what a decoder has made of them."""

    originals: Tensor
    """[pictures, images of a group, 28, 28]."""
    strangers: Tensor
    """As many other images of the same class."""
    pictures: Tensor
    class_means: Tensor
    """The attacker's own mean image of each picture's class."""

    @property
    def similarity(self) -> float:
        """Similarity of a picture to the most similar image behind it."""
        return _to_most_similar(self.pictures, self.originals)

    @property
    def by_chance(self) -> float:
        """The same to the most similar of as many images that are not behind it."""
        return _to_most_similar(self.pictures, self.strangers)

    @property
    def baseline(self) -> float:
        """Similarity of the class mean, which needs no client, to the images behind a picture."""
        return _to_most_similar(self.class_means, self.originals)

    def __str__(self) -> str:
        return f"{self.similarity:.2f}, others {self.by_chance:.2f}, class {self.baseline:.2f}"


class Decoder:
    """Learns to draw the mean of some images from the mean of their features."""

    def __init__(self, features: Tensor, images: Tensor, labels: Tensor, epochs: int) -> None:
        torch.manual_seed(0)
        self._images, self._labels = images, labels
        self._net = nn.Sequential(
            nn.Linear(features.shape[1], 512), nn.ReLU(), nn.Linear(512, 784), nn.Sigmoid()
        )
        self._scale = features.std()
        optimizer = torch.optim.Adam(self._net.parameters(), lr=1e-3)
        for epoch in range(epochs):
            # As many means of several as single images, or it could draw only the latter.
            group = (1, 1, 5, 20)[epoch % 4]
            for rows in _draw_groups(labels, group, epoch):
                optimizer.zero_grad()
                drawn = self(features[rows].mean(1))
                torch.autograd.backward(mse_loss(drawn, images[rows].mean(1)))
                optimizer.step()

    def __call__(self, features: Tensor) -> Tensor:
        """Draw images [n, 28, 28]."""
        drawn: Tensor = self._net(features / self._scale)
        return drawn.view(-1, 28, 28)

    def class_means(self, labels: Tensor) -> Tensor:
        """Return the attacker's mean image of each label."""
        return torch.stack([self._images[self._labels == each].mean(0) for each in labels])


def attack(*, full: bool) -> list[Outcome]:
    """Invert prototypes of one exchange and of MP-FedCL, and the sums of whole clients."""
    found = {"features": invert_features(full=full), "embeddings": invert_embeddings(full=full)}
    outcomes = []
    for kind, groups in found.items():
        for size, inverted in groups.items():
            gain = inverted.similarity - inverted.by_chance
            shows = size == 1
            outcomes.append(
                Outcome(
                    f"image from a mean of {size} {kind}",
                    "SSIM 0.2 above others" if shows else "at most 0.15 above others",
                    f"{inverted}",
                    gain >= 0.2 if shows else gain <= 0.15,
                )
            )
    return outcomes


def draw_figure(path: Path, *, full: bool, shown: int = 5) -> None:
    """Draw some images, and what is seen of them as the groups grow that they are hidden in."""
    digits = load_digits("fedncm", full=full)
    images = load_digits("fedavg", full=full).pixels
    features, own = unit_features(digits.inputs), len(images) * 2 // 3
    decoder = Decoder(features[own:], images[own:], digits.labels[own:], EPOCHS)
    by_label = [(digits.labels[:own] == label).nonzero()[:, 0] for label in range(shown)]
    originals = images[torch.stack([rows[0] for rows in by_label])]
    columns = {"an image\nof a client": originals}
    for size in (1, 5, 20, 100):
        rows = torch.stack([found[:size] for found in by_label])
        title = "this image\nalone" if size == 1 else f"the mean of\n{size} with it"
        with torch.no_grad():
            columns[title] = decoder(features[rows].mean(1))
    columns["mean of other\nimages"] = decoder.class_means(torch.arange(shown))
    figure, axes = pyplot.subplots(shown, len(columns), figsize=(7.6, 7.4))
    figure.subplots_adjust(left=0.01, right=0.99, top=0.89, bottom=0.065, hspace=0.22)
    for column, (title, pictures) in enumerate(columns.items()):
        axes[0, column].set_title(title, fontsize=10)
        for row, picture in enumerate(pictures):
            _show(axes[row, column], picture, None if column == 0 else originals[row])
    figure.text(0.5, 0.965, "what the attacker draws from", ha="center", fontsize=12)
    figure.add_artist(Line2D((0.185, 0.815), (0.957, 0.957), color="black", linewidth=1))
    figure.text(0.91, 0.965, "for comparison", ha="center", fontsize=12)
    words = "Numbers: similarity to the image on the left (SSIM; 1 is the same image)"
    figure.text(0.5, 0.012, words, ha="center", fontsize=10)
    figure.savefig(path, dpi=110)


def _show(axes: Axes, picture: Tensor, original: Tensor | None) -> None:
    axes.imshow(picture, cmap="gray_r", vmin=0, vmax=1)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_color("#cccccc")
    if original is not None:
        similarity = float(ssim(picture[None], original[None])[0])
        axes.set_xlabel(f"{similarity:.2f}", fontsize=9, labelpad=2)


def invert_features(*, full: bool, groups: Sequence[int] = GROUPS) -> dict[int, Inverted]:
    """Invert class means of frozen features, as `fedncm` and its family send them."""
    digits = load_digits("fedncm", full=full)
    images = load_digits("fedavg", full=full).pixels
    return _invert(digits, unit_features(digits.inputs), images, groups)


def invert_embeddings(*, full: bool, groups: Sequence[int] = GROUPS) -> dict[int, Inverted]:
    """Invert means of embeddings of a model that MP-FedCL has trained, as its prototypes are."""
    digits = load_digits("mp-fedcl", full=full)
    held = torch.split(torch.arange(500), 100)
    *_, last = observe(digits, held, rounds=10)
    params = last.updates["client-000"].averaged
    assert isinstance(params, dict)
    with torch.no_grad():
        embeddings = normalize(digits.model.apply(params, digits.inputs)[0], dim=1)
    return _invert(digits, embeddings, digits.pixels, groups)


def _invert(
    digits: Digits, features: Tensor, images: Tensor, groups: Sequence[int]
) -> dict[int, Inverted]:
    """Let the attacker learn from the last third of the digits, and invert means of the first."""
    own = len(images) * 2 // 3
    decoder = Decoder(features[own:], images[own:], digits.labels[own:], EPOCHS)
    found = {}
    for size in groups:
        rows, strangers = _draw_pairs(digits.labels[:own], size)
        with torch.no_grad():
            pictures = decoder(features[rows].mean(1))
        class_means = decoder.class_means(digits.labels[rows[:, 0]])
        found[size] = Inverted(images[rows], images[strangers], pictures, class_means)
    return found


def _draw_pairs(labels: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Draw groups of images of one class, and for each a second one of the same class."""
    pairs = torch.cat(_draw_groups(labels, 2 * size, seed=7))[:PICTURES]
    return pairs[:, :size], pairs[:, size:]


def _draw_groups(labels: Tensor, size: int, seed: int) -> list[Tensor]:
    """Deal the rows of each class into groups [groups, size]; in batches of 64 of mixed classes."""
    key = torch.Generator().manual_seed(seed)
    groups = []
    for label in range(int(labels.max()) + 1):
        rows = (labels == label).nonzero().squeeze(1)
        rows = rows[torch.randperm(len(rows), generator=key)]
        groups.append(rows[: len(rows) // size * size].view(-1, size))
    everything = torch.cat(groups)
    order = torch.randperm(len(everything), generator=key)
    return list(torch.split(everything[order], 64))


def _most_similar(pictures: Tensor, originals: Tensor) -> Tensor:
    similar = [ssim(pictures, each) for each in originals.unbind(1)]
    return torch.stack(similar).max(0).values


def _to_most_similar(pictures: Tensor, originals: Tensor) -> float:
    return float(_most_similar(pictures, originals).mean())


if __name__ == "__main__":
    torch.set_num_threads(1)
    draw_figure(Path(sys.argv[1]), full="--full" in sys.argv)
