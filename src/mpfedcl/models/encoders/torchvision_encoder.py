"""Torchvision's models as frozen encoders, where that package works."""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.images import Images
from mpfedcl.models.encoders.encoder import (
    Features,
    OnProgress,
    encode_in_batches,
    fingerprint_weights,
)
from mpfedcl.models.encoders.preprocessing import Preprocessing
from mpfedcl.models.encoders.weights import read_torch_file

_HEADS = ("fc", "classifier", "heads", "head")
"""How torchvision calls the part that turns features into classes."""


class TorchvisionEncoder:
    """A module without its classifier, in evaluation mode."""

    def __init__(
        self,
        name: str,
        module: torch.nn.Module,
        preprocessing: Preprocessing,
        device: torch.device | str,
    ) -> None:
        self.name = name
        self.preprocessing = preprocessing
        self.fingerprint = fingerprint_weights(name, module.state_dict(), preprocessing)
        self._device = torch.device(device)
        self._module = module.to(self._device).eval()
        size = preprocessing.image_size
        with torch.inference_mode():
            self.feature_size = self._run(torch.zeros(1, 3, size, size)).shape[1]

    @torch.inference_mode()
    def encode(self, images: Images, on_progress: OnProgress | None = None) -> Features:
        """Return the features [images, feature_size]."""

        def encode_batch(batch: Images) -> Features:
            pixels = self.preprocessing.standardize(torch.from_numpy(batch), torch.float32)
            features: Features = self._run(pixels).cpu().numpy()
            return features

        return encode_in_batches(encode_batch, images, self, on_progress)

    def _run(self, inputs: torch.Tensor) -> Any:
        return self._module(inputs.to(self._device)).flatten(start_dim=1)


def load_torchvision_encoder(
    name: str, weights: Path | None, device: torch.device | str
) -> TorchvisionEncoder:
    """Return a model of torchvision by its name, with the given weights, else its published ones.

    Images are brought to the size that the published weights were trained with; with weights of
    the user's own, to 64 pixels.
    """
    try:
        models = import_module("torchvision.models")
    # Beside a torch that it was not built for, it fails with a RuntimeError about operators.
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise InvalidInput(
            f"encoder.name is 'torchvision:{name}', but torchvision does not work here ({reason}); "
            "it must be installed in the version made for this torch."
        ) from None
    try:
        published = None if weights is not None else models.get_model_weights(name).DEFAULT
        module = models.get_model(name, weights=published)
    except ValueError:
        raise InvalidInput(
            f"encoder.name is 'torchvision:{name}'; it must be torchvision:NAME with one of the "
            "names that torchvision.models.list_models() gives."
        ) from None
    except OSError as error:
        raise InvalidInput(
            f"encoder.name is 'torchvision:{name}', whose weights cannot be downloaded ({error}); "
            "encoder.weights must name a file of them."
        ) from None
    preprocessing = Preprocessing()
    if published is not None:
        shown = published.transforms()
        mean, std = shown.mean, shown.std
        preprocessing = Preprocessing(
            int(shown.crop_size[0]), (mean[0], mean[1], mean[2]), (std[0], std[1], std[2])
        )
    if weights is not None:
        try:
            module.load_state_dict(read_torch_file(weights.expanduser()))
        except RuntimeError:
            raise InvalidInput(
                f"encoder.weights is {str(weights)!r}, which does not fit torchvision's {name}; "
                "names and shapes must be those of that model."
            ) from None
    head = next((each for each in _HEADS if hasattr(module, each)), None)
    if head is None:
        raise InvalidInput(
            f"encoder.name is 'torchvision:{name}', a model whose classifier is not known; it "
            f"must be one that ends in {', '.join(_HEADS)}."
        )
    setattr(module, head, torch.nn.Identity())
    return TorchvisionEncoder(f"torchvision {name}", module, preprocessing, device)
