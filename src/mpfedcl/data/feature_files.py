"""Pictures encoded once into files of feature vectors, which are a data set of their own."""

import io
from pathlib import Path
from typing import Any

import numpy
import torch

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import write_atomically
from mpfedcl.data.inputs import InputMaker, choose_own_format, feature_input_maker
from mpfedcl.data.loading import find_experiment_encoder
from mpfedcl.data.reader import open_data_set
from mpfedcl.data.samples import DomainIndex, SampleIndex
from mpfedcl.experiment import Experiment


def write_feature_files(
    root: Path, out: Path, encoder_name: str, weights: Path | None = None
) -> dict[Path, int]:
    """Write `OUT/<domain>.npz` for each domain of pictures; return how many each file holds.

    Domains, the order of samples, test sets and names of classes stay: a run splits the files as it
    would have split the pictures.
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
    if sample_index.vector_width is not None:
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
        arrays = _encode_domain(domain, sample_index, make_features, experiment)
        buffer = io.BytesIO()
        numpy.savez(buffer, **arrays)
        path = out / f"{domain.name}.npz"
        write_atomically(path, buffer.getvalue())
        written[path] = sum(len(each) for name, each in arrays.items() if name.startswith("x_"))
    return written


def _encode_domain(
    domain: DomainIndex,
    sample_index: SampleIndex,
    make_features: InputMaker,
    experiment: Experiment,
) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    if sample_index.names_classes:
        arrays["classes"] = numpy.array(sample_index.class_names)
    for part, subset in (("train", domain.train), ("test", domain.test)):
        if subset is not None:
            arrays[f"x_{part}"] = make_features(sample_index, subset.rows, experiment).numpy()
            arrays[f"y_{part}"] = subset.labels
    return arrays
