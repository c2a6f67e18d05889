"""The settings of `mpfedcl pretrain`; no torch, so that the command line answers at once."""

from typing import Annotated

from pydantic import Field

from mpfedcl.experiment.settings import DatasetSettings, Settings


class PretrainSettings(Settings):
    """How an encoder is trained centrally."""

    dataset: DatasetSettings = DatasetSettings()
    """The images; all domains are trained on together, in `image_size`."""
    epochs: Annotated[int, Field(ge=1)] = 20
    """Passes over the images."""
    batch_size: Annotated[int, Field(ge=2)] = 64
    """Images per step, about: batches are made equally large."""
    lr: Annotated[float, Field(gt=0)] = 0.05
    """Largest learning rate; it rises at the start and falls to 0 as a cosine."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Fixes initial weights, held-out images, batches and augmentation."""
    image_size: Annotated[int, Field(ge=8, le=1024)] = 64
    """Images are resized to this many pixels per side, now and whenever the encoder is used."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the images held out to measure accuracy, if the set has no test images."""
    flip: bool = True
    """Mirror half of the images at random; not for digits or letters."""
    half: bool = True
    """Write the weights in float16: half the bytes, nearly the same features."""
    device: str = "cpu"
    """Device to compute on: cpu, cuda, cuda:1, mps."""
