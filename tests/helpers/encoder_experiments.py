"""Small experiments on pictures behind an encoder."""

from pathlib import Path
from typing import Any

import numpy
from PIL import Image

from mpfedcl.experiment import Experiment


def save_pictures(root: Path) -> None:
    """Write three domains, four classes, mixed sizes, gray and RGB."""
    random = numpy.random.default_rng(3)
    for number, domain in enumerate(("ink", "paint", "photo")):
        for label, name in enumerate(("ant", "bee", "cat", "dog")):
            folder = root / domain / name
            folder.mkdir(parents=True)
            for index in range(6):
                height, width = random.integers(20, 50, 2)
                channels = () if domain == "ink" else (3,)
                pixels = random.integers(0, 60, (height, width, *channels), dtype=numpy.uint8)
                pixels[label * 5 : label * 5 + 5] += numpy.uint8(150 + 10 * number)
                Image.fromarray(pixels).save(folder / f"{index}.{'png' if index % 2 else 'jpg'}")


def pictured(root: Path, **changes: Any) -> Experiment:
    settings = {
        "dataset__name": "folder",
        "dataset__root": root,
        "partition__kind": "feature",
        "encoder__name": "random-resnet18",
        # Trained, it would be shared by processes, which know nothing of a narrow one.
        "workers": 1,
        "train__lr": 0.1,
    }
    return Experiment(rounds=2).replace(**settings | changes)
