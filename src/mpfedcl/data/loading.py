"""From settings to the clients' inputs (pixels, arrays or features) and the model."""

import io
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import write_atomically
from mpfedcl.data.client_data import ClientTable, FederatedData, SubsetsByClient
from mpfedcl.data.client_split import (
    ClientSplit,
    share_test,
    split_among_clients,
    split_own_samples,
)
from mpfedcl.data.objects import find_objects
from mpfedcl.data.sample_index import open_data_set
from mpfedcl.data.samples import (
    ArrayFormat,
    ImageFormat,
    Indices,
    SampleFormat,
    SampleIndex,
    Samples,
    choose_format,
)
from mpfedcl.data.tables import (
    find_columns,
    find_own_columns,
    fit_tables,
    standardize_by_client,
)
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.data_folder import encoder_data_folders
from mpfedcl.experiment.datasets import find_specification
from mpfedcl.experiment.settings import ModelSettings
from mpfedcl.models import Model, ModuleModel
from mpfedcl.models.encoders.encoder import Encoder, Features, PixelScaling, find_encoder
from mpfedcl.models.encoders.random_filters import RandomFilters
from mpfedcl.models.factory import make_model
from mpfedcl.models.feature_cache import FeatureCache, keep_inputs

InputMaker = Callable[[SampleIndex, Indices, Experiment], Tensor]
"""Turns samples of a set, by number, into inputs [samples, ...] in the experiment's precision."""


def make_plain_inputs(sample_index: SampleIndex, rows: Indices, experiment: Experiment) -> Tensor:
    """Return pixels [images, height, width] or [images, height, width, 3], or arrays."""
    wanted = choose_own_format(sample_index, experiment)
    constants = pixel_constants(experiment) if isinstance(wanted, ImageFormat) else None
    return _keep_inputs(
        f"{wanted!r} {constants}",
        sample_index,
        rows,
        wanted.dtype if wanted.dtype == "int64" else experiment.dtype,
        wanted.shape,
        lambda: to_inputs(sample_index.store.load(rows, wanted), experiment),
    )


def _keep_inputs(
    kind: str,
    sample_index: SampleIndex,
    rows: Indices,
    dtype: str,
    shape: tuple[int, ...] | None,
    make: Callable[[], Tensor],
) -> Tensor:
    """Make inputs of a kind from some samples, unless they have been made before."""
    num_bytes = None
    if shape is not None:
        num_bytes = len(rows) * math.prod(shape) * numpy.dtype(dtype).itemsize
    return keep_inputs(lambda: f"{kind} {dtype} {sample_index.store.sign(rows)}", num_bytes, make)


def choose_own_format(sample_index: SampleIndex, experiment: Experiment) -> SampleFormat:
    """Return the format of samples that meet no encoder with a size of its own."""
    # The size comes from all images of the set, so that it does not depend on the draw.
    formats = sample_index.store.inspect()
    return choose_format(formats, experiment.dataset.image_size, experiment.dtype)


def to_inputs(samples: Samples, experiment: Experiment) -> Tensor:
    """Return arrays as they are; bytes standardized by the set's constants or in 0 to 1."""
    numbers = torch.from_numpy(numpy.ascontiguousarray(samples))
    if numbers.dtype == torch.int64:
        return numbers
    inputs = numbers.to(getattr(torch, experiment.dtype))
    if numbers.is_floating_point():
        return inputs
    mean, deviation = pixel_constants(experiment)
    return inputs.div_(255).sub_(mean).div_(deviation)


def pixel_constants(experiment: Experiment) -> tuple[float, float]:
    """Return mean and deviation by which pixels in 0 to 1 are standardized; 0 and 1 if not."""
    if experiment.dataset.standardize == "none":
        return 0.0, 1.0
    spec = find_specification(experiment.dataset.name)
    return spec.pixel_mean, spec.pixel_deviation


def encoder_input_format(encoder: Encoder) -> ImageFormat:
    """Return the format in which an encoder takes images."""
    found = ImageFormat.from_shape(encoder.preprocessing.image_shape)
    assert found is not None
    return found


def feature_input_maker(encoder: Encoder) -> InputMaker:
    """Return a maker of features [images, feature_size]; images are opened only if it must be."""

    def make(sample_index: SampleIndex, rows: Indices, experiment: Experiment) -> Tensor:
        # Cached in ascending order, so that another split of the same images finds them.
        ordered, places = numpy.unique(rows, return_inverse=True)

        def encode() -> Features:
            # Images are loaded in the encoder's size: less memory, and each is resized once.
            return encoder.encode(sample_index.store.load(ordered, encoder_input_format(encoder)))

        def find_or_encode() -> Tensor:
            signature = f"{encoder.fingerprint} {sample_index.store.sign(ordered)}"
            features = FeatureCache().find_or_make(encoder.name, signature, encode)
            found = torch.from_numpy(features).to(getattr(torch, experiment.dtype))
            return found if numpy.array_equal(ordered, rows) else found[torch.from_numpy(places)]

        kind = f"features {encoder.fingerprint}"
        return _keep_inputs(kind, sample_index, rows, experiment.dtype, None, find_or_encode)

    return make


def byte_input_maker(encoder: Encoder) -> InputMaker:
    """Return a maker of images as bytes [images, 3, size, size], for an encoder that is trained."""

    def make(sample_index: SampleIndex, rows: Indices, _experiment: Experiment) -> Tensor:
        wanted = encoder_input_format(encoder)

        def load() -> Tensor:
            images = sample_index.store.load(rows, wanted)
            return torch.from_numpy(encoder.preprocessing.to_input_bytes(images))

        kind = f"bytes {asdict(encoder.preprocessing)}"
        return _keep_inputs(kind, sample_index, rows, "uint8", wanted.shape, load)

    return make


def load_own_samples(
    experiment: Experiment,
    make_inputs: InputMaker | None = None,
    *,
    sample_index: SampleIndex,
    name: str,
) -> FederatedData:
    """Open the samples of a single client, and hold some of them out."""
    train, test = split_own_samples(sample_index, name, experiment)
    if not len(train.labels):
        raise InvalidInput(
            f"data has {len(test.labels)} {sample_index.noun}s, and the split leaves none to "
            "train on; there must be more of a class, or the test fraction must be smaller."
        )
    if experiment.dataset.standardize == "client":
        sample_index = standardize_by_client(sample_index, {name: (train.rows, test.rows)})
    split = share_test(SubsetsByClient.join({name: train}), test)
    data, _ = _load_split(sample_index, split, experiment, make_inputs)
    columns = find_own_columns(sample_index).get(name) or find_columns(sample_index)
    if columns is not None:
        data.partition["columns"] = columns.to_json()
    return data


def load_federated_data(
    experiment: Experiment, make_inputs: InputMaker | None = None
) -> FederatedData:
    """Split an experiment's data set among the clients, then open the samples they need."""
    experiment = experiment.resolved()
    sample_index = open_data_set(experiment.dataset)
    split = split_among_clients(sample_index, experiment)
    sample_index = fit_tables(sample_index, split.training.values(), experiment.dataset)
    if experiment.dataset.standardize == "client":
        if experiment.partition.test == "shared":
            raise InvalidInput(
                "partition.test is 'shared'; it must be 'matched' if dataset.standardize is "
                "'client', because rows that all clients are tested on belong to none."
            )
        tested = {name: split.test.rows[places] for name, places in split.local_test.items()}
        rows = {name: (own.rows, tested[name]) for name, own in split.training.items()}
        sample_index = standardize_by_client(sample_index, rows)
    data, shape = _load_split(sample_index, split, experiment, make_inputs)
    data.partition.update(split.describe(sample_index.class_names))
    # Flat pixels do not show the shape of the images.
    data.partition["input_shape"] = shape
    data.partition["input_means"] = dict(zip(data.names, data.table.input_means(), strict=True))
    if ":" in experiment.dataset.name:
        # A run goes on with the same objects only.
        data.partition["objects"] = find_objects(experiment.dataset).fingerprint
    if columns := find_columns(sample_index):
        data.partition["columns"] = columns.to_json()
        for name, own in find_own_columns(sample_index).items():
            data.partition["clients"][name]["columns"] = own.statistics
    found, asked = split.public, experiment.public.size or 0
    if found is None or len(found.labels) >= asked:
        return data
    notice = (
        f"public.size is {asked:,}; {len(found.labels):,} training images are held out, a tenth of "
        "them."
    )
    return replace(data, notices=(*data.notices, notice))


def _load_split(
    sample_index: SampleIndex,
    split: ClientSplit,
    experiment: Experiment,
    make_inputs: InputMaker | None,
) -> tuple[FederatedData, list[int]]:
    """Open the samples of all clients; return their data, and the shape of an input."""
    # In the clients' order, so that each client's samples are a view of this tensor.
    inputs = (make_inputs or make_plain_inputs)(sample_index, split.all_rows, experiment)
    shape, inputs = list(inputs.shape[1:]), inputs.flatten(start_dim=1)
    labels, test_labels = split.training.everything.labels, split.test.labels
    num_public = len(inputs) - len(labels) - len(test_labels)
    trained, held_out, tested = torch.split(inputs, [len(labels), num_public, len(test_labels)])
    table = ClientTable(
        split.training.names,
        trained,
        torch.from_numpy(labels),
        split.training.sizes,
        torch.arange(len(test_labels)),
        split.test_begins,
        split.test_sizes,
    )
    data = FederatedData(
        sample_index.name,
        sample_index.class_names,
        table,
        tested,
        torch.from_numpy(test_labels),
        {},
        sample_index.array_format is not None,
        sample_index.notices,
        None if split.public is None else (held_out, torch.from_numpy(split.public.labels)),
    )
    return data, shape


Loader = Callable[[Experiment, InputMaker | None], FederatedData]
"""Opens data, given how images become inputs; without it, pixels or arrays as they are."""


def load_data_and_model(
    experiment: Experiment, device: torch.device, load: Loader = load_federated_data
) -> tuple[FederatedData, Model]:
    """Return the clients' data and the model that fits them: on samples, features, or both."""
    data, model, _ = load_data_and_models(experiment, device, load)
    return data, model


def load_data_and_models(
    experiment: Experiment, device: torch.device, load: Loader = load_federated_data
) -> tuple[FederatedData, Model, dict[str, Model]]:
    """Return also the models by client, if `model.clients` gives them different ones.

    The model of all is then that of the first client.
    """
    settings = experiment.encoder
    uses_encoder = settings.name not in (None, "none")
    if not uses_encoder and (settings.train or settings.weights is not None):
        raise InvalidInput(
            "encoder.name is 'none'; with encoder.train or encoder.weights it must name an "
            "encoder, such as resnet18."
        )
    found: list[tuple[Encoder | None, tuple[int, ...]]] = []

    def make_inputs(sample_index: SampleIndex, rows: Indices, experiment: Experiment) -> Tensor:
        encoder: Encoder | None = None
        make: InputMaker = make_plain_inputs
        if uses_encoder:
            if sample_index.array_format is not None:
                raise InvalidInput(
                    f"encoder.name is {settings.name!r}, but the samples are {sample_index}; it "
                    "must be none or left out, because encoders take images."
                )
            # Only after the split, so that missing data is reported first.
            encoder = find_experiment_encoder(
                experiment, device, lambda: choose_own_format(sample_index, experiment).shape
            )
            make = byte_input_maker(encoder) if settings.train else feature_input_maker(encoder)
        inputs = make(sample_index, rows, experiment)
        found.append((encoder, tuple(inputs.shape[1:])))
        return inputs

    data = load(experiment, make_inputs).to(device)
    ((encoder, shape),) = found
    if encoder is None:
        # A single client uses its model on other samples of the same shape.
        data.partition.setdefault("input_shape", list(shape))
        if not data.holds_arrays:
            # The server needs it too, and the number of pixels does not show it.
            data.partition["image_shape"] = list(shape)
        elif data.test_inputs.dtype == torch.int64:
            data.partition["holds_tokens"] = True
    else:
        # Recorded, so that a run is not resumed with other weights.
        data.partition["encoder"] = encoder.fingerprint
        if isinstance(encoder, RandomFilters):
            # Recorded, because the number of features is the same for every size.
            data.partition["image_shape"] = list(encoder.preprocessing.image_shape)
    is_image = encoder is None and not data.holds_arrays
    takes_integers = not data.test_inputs.is_floating_point() and not settings.train

    def make(settings: ModelSettings) -> Model:
        if "holds_tokens" in data.partition and ":" not in str(settings.name):
            raise InvalidInput(
                f"model.name is {settings.name!r}, which takes numbers, but the samples are "
                f"{ArrayFormat(shape, 'int64')}; it must be a model of your own, or measured "
                "integers must be given as floats."
            )
        return make_model(
            experiment.replace(model=settings),
            encoder,
            shape,
            data.num_classes,
            is_image=is_image,
            takes_integers=takes_integers,
        )

    # Recorded, so that a run is not resumed or used with another module.
    if not experiment.model.clients:
        model = make(experiment.model)
        if isinstance(model, ModuleModel):
            data.partition["model"] = model.fingerprint
        return data, model, {}
    experiment.model.check_clients(data.names)
    wanted = experiment.model.of_clients(data.names)
    made = {settings: make(settings) for settings in dict.fromkeys(wanted.values())}
    prints = {s: each.fingerprint for s, each in made.items() if isinstance(each, ModuleModel)}
    data.partition["models"] = {name: prints[s] for name, s in wanted.items() if s in prints}
    models = {name: made[settings] for name, settings in wanted.items()}
    return data, models[data.names[0]], models


def find_experiment_encoder(
    experiment: Experiment,
    device: torch.device,
    find_image_shape: Callable[[], tuple[int, ...]] | None = None,
) -> Encoder:
    """Return the encoder of an experiment; its weights may be stored with the data.

    Encoders without a fixed image size need the shape of the images.
    """

    def find_scaling() -> PixelScaling:
        assert find_image_shape is not None
        return PixelScaling(find_image_shape(), *pixel_constants(experiment))

    settings = experiment.encoder
    folders = encoder_data_folders(experiment.dataset)
    return find_encoder(
        str(settings.name),
        settings.weights,
        *folders,
        device=device,
        find_scaling=find_scaling if find_image_shape else None,
        settings=settings,
    )


def write_feature_files(
    root: Path, out: Path, encoder_name: str, weights: Path | None = None
) -> dict[Path, int]:
    """Encode images into `OUT/<domain>.npz` files; return the number of samples of each file.

    Domains, the order of samples, test sets and class names are kept, so a run splits the features
    as it would split the images.
    """
    if encoder_name == "none":
        raise InvalidInput("encoder is 'none'; it must be an encoder, such as resnet18.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidInput(f"out is {str(out)!r}; it must be a new or an empty folder.")
    experiment = Experiment().replace(
        dataset__name="folder",
        dataset__root=root,
        encoder__name=encoder_name,
        encoder__weights=weights,
    )
    sample_index = open_data_set(experiment.dataset)
    if sample_index.array_format is not None:
        raise InvalidInput(
            f"ROOT is {str(root)!r}, which holds {sample_index}; it must hold images."
        )
    encoder = find_experiment_encoder(
        experiment, torch.device("cpu"), lambda: choose_own_format(sample_index, experiment).shape
    )
    make_features = feature_input_maker(encoder)
    out.mkdir(parents=True, exist_ok=True)
    written = {}
    for domain in sample_index.domains:
        arrays: dict[str, Any] = {}
        if sample_index.names_classes:
            arrays["classes"] = numpy.array(sample_index.class_names)
        path, count = out / f"{domain.name}.npz", 0
        for part, subset in (("train", domain.train), ("test", domain.test)):
            if subset is not None:
                arrays[f"x_{part}"] = make_features(sample_index, subset.rows, experiment).numpy()
                arrays[f"y_{part}"] = subset.labels
                count += len(subset.labels)
        buffer = io.BytesIO()
        numpy.savez(buffer, **arrays)
        write_atomically(path, buffer.getvalue())
        written[path] = count
    return written
