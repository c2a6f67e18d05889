"""Central training of a ResNet-18 on any image set, so that users can make their own encoder."""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import write_atomically
from mpfedcl.core.rng import generator
from mpfedcl.core.tensors import pack_tensors
from mpfedcl.experiment.pretraining import PretrainSettings
from mpfedcl.models.encoders.preprocessing import NOTE, Preprocessing
from mpfedcl.models.encoders.weights import read_safetensors_file
from mpfedcl.models.resnet import ResNet18, is_statistic

_MOMENTUM = 0.9
_WEIGHT_DECAY = 5e-4
_LABEL_SMOOTHING = 0.1
_WARM_UP = 0.1
"""Share of the steps over which the learning rate rises."""
_LONGEST_GRADIENT = 1.0
_STATISTICS_MOMENTUM = 0.1
_IMAGES_AT_ONCE = 256
_FORMAT = 1
_MARGIN = 8
"""Images are shifted by at most this part of their side."""


@dataclass(frozen=True)
class PretrainingData:
    """Bytes [images, 3, size, size] and labels, for training and for measuring."""

    class_names: tuple[str, ...]
    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @property
    def digest(self) -> str:
        """SHA-256 over the images and labels that train."""
        sha = hashlib.sha256(self.images.numpy().data)
        sha.update(self.labels.numpy().data)
        return sha.hexdigest()


@dataclass(frozen=True)
class Epoch:
    """What came of a pass over the images."""

    epoch: int
    loss: float
    accuracy: float | None
    """On the images held out, in %; None where there are none."""


@dataclass(frozen=True)
class PretrainObserver:
    """How training is watched."""

    on_start: Callable[[PretrainingData, int, int], None] = lambda *_: None
    """The images, steps in all, steps done before."""
    on_step: Callable[[float], None] = lambda *_: None
    """The loss of a batch."""
    on_epoch: Callable[[Epoch], None] = lambda *_: None


@dataclass(frozen=True)
class PretrainResult:
    """The encoder file, and how its training went."""

    path: Path
    history: list[Epoch]


def pretrain(
    settings: PretrainSettings,
    load: Callable[[PretrainSettings], PretrainingData],
    out: Path,
    *,
    resume: bool = False,
    observer: PretrainObserver | None = None,
) -> PretrainResult:
    """Train an encoder and write it to `out`; after each epoch a checkpoint lies beside it.

    `load` reads the images, once the other settings are known to be right.
    A resumed training gives the same bytes as one that was never stopped.
    """
    _check_output(out)
    _check_device(settings.device)
    training = _Training(settings, load(settings))
    checkpoint = checkpoint_path(out)
    if resume:
        training.load(checkpoint)
    elif checkpoint.exists():
        raise InvalidInput(
            f"out is {str(out)!r}, and {checkpoint} holds a training that was stopped; --resume "
            "resumes it, or it must be removed."
        )
    training.run(checkpoint, observer or PretrainObserver())
    write_atomically(out, training.encoder_file())
    checkpoint.unlink(missing_ok=True)
    return PretrainResult(out, training.history)


def checkpoint_path(out: Path) -> Path:
    """Return where the checkpoint of an unfinished training lies."""
    return out.with_name(f"{out.name}.checkpoint")


class _Training:
    """Weights, running statistics and momentum, and how far they are."""

    def __init__(self, settings: PretrainSettings, data: PretrainingData) -> None:
        self.history: list[Epoch] = []
        self._settings = settings
        self._data = data
        self._preprocessing = Preprocessing(settings.image_size)
        self._network = ResNet18()
        num_classes = len(data.class_names)
        key = generator(settings.seed, "pretrain", "weights")
        drawn = self._network.init(key, torch.float32)
        scale = 1 / math.sqrt(self._network.feature_size)
        draw = torch.rand((num_classes, self._network.feature_size), generator=key)
        drawn |= {"fc.weight": (2 * draw - 1) * scale, "fc.bias": torch.zeros(num_classes)}
        everything = {name: value.to(settings.device) for name, value in drawn.items()}
        self._statistics = {n: v for n, v in everything.items() if is_statistic(n)}
        self._params = {n: v.requires_grad_() for n, v in everything.items() if not is_statistic(n)}
        # Norms and biases are few, and pulling them to 0 would only weaken the others.
        decayed = [value for value in self._params.values() if value.ndim > 1]
        others = [value for value in self._params.values() if value.ndim == 1]
        groups: list[dict[str, Any]] = [
            {"params": decayed, "weight_decay": _WEIGHT_DECAY},
            {"params": others},
        ]
        self._optimizer = torch.optim.SGD(groups, lr=settings.lr, momentum=_MOMENTUM, nesterov=True)

    def run(self, checkpoint: Path, observer: PretrainObserver) -> None:
        """Train the epochs that are left."""
        settings = self._settings
        num_steps = len(self._batches(1))
        observer.on_start(self._data, num_steps * settings.epochs, num_steps * len(self.history))
        for epoch in range(len(self.history) + 1, settings.epochs + 1):
            total = 0.0
            for step, batch in enumerate(self._batches(epoch)):
                done = step + (epoch - 1) * num_steps
                loss = self._step(batch, epoch, done, done / (num_steps * settings.epochs))
                total += loss * len(batch)
                observer.on_step(loss)
            self.history.append(Epoch(epoch, total / len(self._data.labels), self._evaluate()))
            observer.on_epoch(self.history[-1])
            write_atomically(checkpoint, self._checkpoint_file())

    def encoder_file(self) -> bytes:
        """Return the encoder in torchvision's names, with its preprocessing in the metadata."""
        dtype = torch.float16 if self._settings.half else torch.float32
        tensors = {
            name: value.detach().to(dtype)
            for name, value in {**self._params, **self._statistics}.items()
            if not name.startswith("fc.")
        }
        # The root is left out: it says nothing to others, and may say more than it should.
        told = self._settings.model_dump(mode="json", exclude={"device": True, "dataset": {"root"}})
        content = {
            "format": _FORMAT,
            "preprocessing": self._preprocessing.to_json(),
            "training": {
                **told,
                "classes": list(self._data.class_names),
                "images": len(self._data.labels),
                "last": asdict(self.history[-1]),
            },
        }
        return pack_tensors(tensors, (NOTE, json.dumps(content)))

    def load(self, path: Path) -> None:
        """Restore what the checkpoint holds."""
        if not path.exists():
            raise InvalidInput(
                f"there is no {path} to resume; --resume must be left out to start over."
            )
        tensors, metadata = read_safetensors_file(path)
        try:
            note = json.loads(metadata[NOTE])
            if note["identity"] != self._identity():
                raise InvalidInput(
                    f"{path} was begun with other settings or images; they must be the same, or "
                    "--resume be left out."
                )
            with torch.no_grad():
                for name, value in self._params.items():
                    value.copy_(tensors[f"params/{name}"])
                    buffer = tensors[f"momentum/{name}"].to(value.device)
                    self._optimizer.state[value] = {"momentum_buffer": buffer}
            for name, value in self._statistics.items():
                self._statistics[name] = tensors[f"statistics/{name}"].to(value.device)
            self.history = [Epoch(**each) for each in note["history"]]
        except (KeyError, TypeError, ValueError, RuntimeError):
            raise InvalidInput(
                f"{path} is not a checkpoint of this mpfedcl; it must be removed to start over."
            ) from None

    def _checkpoint_file(self) -> bytes:
        momentum = {
            f"momentum/{name}": self._optimizer.state[value]["momentum_buffer"]
            for name, value in self._params.items()
        }
        note = {
            "format": _FORMAT,
            "identity": self._identity(),
            "history": [asdict(each) for each in self.history],
        }
        return pack_tensors(
            {
                **momentum,
                **{f"params/{name}": value for name, value in self._params.items()},
                **{f"statistics/{name}": value for name, value in self._statistics.items()},
            },
            (NOTE, json.dumps(note)),
        )

    def _identity(self) -> dict[str, Any]:
        """Return what must not change between a stop and its resumption."""
        told = self._settings.model_dump(mode="json", exclude={"device": True, "dataset": {"root"}})
        return {**told, "images": self._data.digest}

    def _batches(self, epoch: int) -> tuple[Tensor, ...]:
        """Return the images' positions in random order, in batches of about equal size."""
        count = len(self._data.labels)
        order = torch.randperm(
            count, generator=generator(self._settings.seed, "pretrain", epoch, "batches")
        )
        # Never a batch of one image: it has no variance to normalize by.
        number = min(math.ceil(count / self._settings.batch_size), count // 2)
        return order.tensor_split(number)

    def _step(self, batch: Tensor, epoch: int, done: int, progress: float) -> float:
        settings = self._settings
        key = generator(settings.seed, "pretrain", done, "augmentation")
        pixels = augment(self._data.images[batch], key, flip=settings.flip)
        inputs = self._preprocessing.standardize(pixels.to(settings.device), torch.float32)
        features, self._statistics = self._network.apply_with_batch_statistics(
            # A plain mean at first: a short training would else keep the start's statistics.
            {**self._params, **self._statistics},
            inputs,
            momentum=max(_STATISTICS_MOMENTUM, 1 / (done + 1)),
        )
        labels = self._data.labels[batch].to(settings.device)
        loss = cross_entropy(self._classify(features), labels, label_smoothing=_LABEL_SMOOTHING)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise InvalidInput(
                f"lr is {settings.lr:g}, and the loss is no longer finite in epoch {epoch}; it "
                "must be smaller."
            )
        for group in self._optimizer.param_groups:
            group["lr"] = settings.lr * _schedule(progress)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        # The first steps of a small set would else overshoot and be mended for epochs.
        torch.nn.utils.clip_grad_norm_(self._params.values(), _LONGEST_GRADIENT)
        self._optimizer.step()
        return value

    def _classify(self, features: Tensor) -> Tensor:
        return linear(features, self._params["fc.weight"], self._params["fc.bias"])

    @torch.inference_mode()
    def _evaluate(self) -> float | None:
        """Return the accuracy on the images held out, in %."""
        count = len(self._data.test_labels)
        if count == 0:
            return None
        params = {**self._params, **self._statistics}
        correct = 0
        data = self._data
        tested = (data.test_images, data.test_labels)
        parts = (torch.split(each, _IMAGES_AT_ONCE) for each in tested)
        for pixels, labels in zip(*parts, strict=True):
            inputs = self._preprocessing.standardize(
                pixels.to(self._settings.device), torch.float32
            )
            predicted = self._classify(self._network.apply(params, inputs)).argmax(dim=1)
            correct += int((predicted.cpu() == labels).sum())
        return 100 * correct / count


def augment(pixels: Tensor, key: torch.Generator, *, flip: bool) -> Tensor:
    """Shift each image at random, repeating its edge, and mirror half of them if `flip`."""
    count, size = len(pixels), pixels.shape[-1]
    margin = size // _MARGIN
    places = torch.arange(size)
    rows, columns = (
        (places + torch.randint(-margin, margin + 1, (count, 1), generator=key)).clamp(0, size - 1)
        for _ in range(2)
    )
    if flip:
        mirrored = torch.rand((count, 1), generator=key) < 0.5
        columns = torch.where(mirrored, columns.flip(1), columns)
    which = torch.arange(count)[:, None, None, None]
    channels = torch.arange(pixels.shape[1])[None, :, None, None]
    return pixels[which, channels, rows[:, None, :, None], columns[:, None, None, :]]


def _schedule(progress: float) -> float:
    """Return the share of the largest learning rate: a straight rise, then a cosine to 0."""
    return min(1.0, (progress + 1e-3) / _WARM_UP) * 0.5 * (1 + math.cos(math.pi * progress))


def _check_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise InvalidInput(
            f"device is {name!r}; it must be a device that the installed torch supports, such as "
            "cpu."
        ) from None


def _check_output(out: Path) -> None:
    if out.suffix != ".safetensors":
        raise InvalidInput(f"out is {str(out)!r}; it must be a file that ends in .safetensors.")
    if out.exists():
        raise InvalidInput(f"out is {str(out)!r}, which exists; it must be a new file.")
    out.parent.mkdir(parents=True, exist_ok=True)
