"""The clients' data: images of a set, dealt out and turned into tensors."""

from dataclasses import dataclass, replace
from typing import Self

import numpy
import torch
from torch import Tensor

from mpfedcl.data.catalogue import specification
from mpfedcl.data.imageset import Domain, Images, ImageSet
from mpfedcl.data.partition import (
    partition_by_classes,
    partition_by_label,
    partition_by_quantity,
    partition_iid,
)
from mpfedcl.data.reader import read_image_set
from mpfedcl.data.split import Indices, split_by_class
from mpfedcl.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.rng import numpy_generator


@dataclass(frozen=True)
class ClientData:
    """One client: its training images, and which images of the union test set are its own."""

    name: str
    inputs: Tensor
    """[images, features], standardized by the set's constants, or in 0 to 1."""
    labels: Tensor
    """[images], int64."""
    test: Tensor
    """[test images], int64: indices into the union test set; may be empty."""


@dataclass(frozen=True)
class FederatedData:
    """All clients in order of name, and the union of their test images, each once."""

    dataset: str
    class_names: tuple[str, ...]
    clients: tuple[ClientData, ...]
    test_inputs: Tensor
    test_labels: Tensor

    @property
    def num_classes(self) -> int:
        """Number of classes of the set, whether or not a client holds them."""
        return len(self.class_names)

    @property
    def input_size(self) -> int:
        """Features of one image."""
        return int(self.test_inputs.shape[1])

    @property
    def names(self) -> tuple[str, ...]:
        """The clients' names in order."""
        return tuple(client.name for client in self.clients)

    def client(self, name: str) -> ClientData:
        """Return a client by name."""
        return {client.name: client for client in self.clients}[name]

    def label_counts(self) -> Indices:
        """Count the training images [clients, classes]."""
        counts = [
            torch.bincount(client.labels, minlength=self.num_classes).cpu().numpy()
            for client in self.clients
        ]
        return numpy.stack(counts)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Self:
        """Return the data on a device, inputs in a precision [default: as they are]."""
        clients = tuple(
            replace(
                client,
                inputs=client.inputs.to(device, dtype),
                labels=client.labels.to(device),
                test=client.test.to(device),
            )
            for client in self.clients
        )
        return replace(
            self,
            clients=clients,
            test_inputs=self.test_inputs.to(device, dtype),
            test_labels=self.test_labels.to(device),
        )


def load_federated(experiment: Experiment) -> FederatedData:
    """Read the data set of an experiment and deal it out to the clients."""
    experiment = experiment.resolved()
    image_set = read_image_set(experiment.dataset)
    deal = _give_domains if experiment.partition.kind == "feature" else _deal_pool
    training, test, own = deal(image_set, experiment)
    if len(test.labels) == 0:
        raise InvalidInput(
            f"dataset.test_fraction is {experiment.dataset.test_fraction:g} and leaves no image "
            "to test on; it must be larger, or the set must have more images of a class."
        )
    clients = tuple(
        ClientData(name, *training[name].tensors(experiment), torch.from_numpy(own[name]))
        for name in sorted(training)
    )
    return FederatedData(image_set.name, image_set.class_names, clients, *test.tensors(experiment))


@dataclass(frozen=True)
class _Part:
    """Images and their labels, still as bytes: a quarter of their size as numbers, or less."""

    images: Images
    labels: Indices

    def take(self, chosen: Indices) -> "_Part":
        return _Part(self.images[chosen], self.labels[chosen])

    def tensors(self, experiment: Experiment) -> tuple[Tensor, Tensor]:
        flat = torch.from_numpy(numpy.ascontiguousarray(self.images)).flatten(start_dim=1)
        inputs = flat.to(getattr(torch, experiment.dtype)).div_(255)
        if experiment.dataset.standardize:
            spec = specification(experiment.dataset.name)
            inputs.sub_(spec.pixel_mean).div_(spec.pixel_deviation)
        return inputs, torch.from_numpy(self.labels)


_Dealt = tuple[dict[str, _Part], _Part, dict[str, Indices]]
"""Training images by client, the union test set, and each client's indices into it."""


def _give_domains(image_set: ImageSet, experiment: Experiment) -> _Dealt:
    """Make each domain a client."""
    domains = image_set.domains
    if experiment.clients not in (None, len(domains)):
        listed = ", ".join(domain.name for domain in domains)
        raise InvalidInput(
            f"clients is {experiment.clients}; under partition.kind feature it must be "
            f"{len(domains)}, the number of domains ({listed}), or left out."
        )
    training, tests = {}, {}
    for domain in domains:
        train, tests[domain.name] = _split_domain(domain, experiment)
        training[domain.name] = _draw(train, domain.name, experiment)
        found, wanted = len(training[domain.name].labels), experiment.partition.min_size
        if wanted is not None and found < wanted:
            raise InvalidInput(
                f"partition.min_size is {wanted:,}, but the domain {domain.name} has {found:,} "
                f"training images; it must be at most that under partition.kind feature."
            )
    test, own = _join_tests(tests)
    if experiment.partition.test == "shared":
        own = dict.fromkeys(tests, numpy.arange(len(test.labels)))
    return training, test, own


def _deal_pool(image_set: ImageSet, experiment: Experiment) -> _Dealt:
    """Deal the images of all domains together out to the clients."""
    if experiment.partition.test == "shared":
        splits = [_split_domain(domain, experiment) for domain in image_set.domains]
        pool = _draw(_join([train for train, _ in splits]), image_set.name, experiment)
        test = _join([test for _, test in splits])
        hands = _partition(pool.labels, experiment, test_fraction=None)
        own = dict.fromkeys(hands, numpy.arange(len(test.labels)))
        return {name: pool.take(hand) for name, hand in hands.items()}, test, own
    # Matched: what a client is tested on comes out of its own hand, not from an official test set.
    everything = [_Part(domain.train_images, domain.train_labels) for domain in image_set.domains]
    pool = _draw(_join(everything), image_set.name, experiment)
    fraction = experiment.dataset.test_fraction
    training, tests = {}, {}
    for name, hand in _partition(pool.labels, experiment, fraction).items():
        generator = numpy_generator(experiment.seed, "partition", "matched", name)
        train, held_out = split_by_class(pool.labels[hand], fraction, generator)
        training[name], tests[name] = pool.take(hand[train]), pool.take(hand[held_out])
    return training, *_join_tests(tests)


def _partition(
    labels: Indices, experiment: Experiment, test_fraction: float | None
) -> dict[str, Indices]:
    """Return which images each client gets, by the client's name."""
    settings = experiment.partition
    num_clients = experiment.clients or 1
    seed, min_size = experiment.seed, settings.min_size or 1
    if settings.kind == "label":
        hands = partition_by_label(
            labels,
            num_clients,
            seed=seed,
            alpha=settings.alpha,
            balanced=settings.balanced,
            min_size=min_size,
            test_fraction=test_fraction,
        )
    elif settings.kind == "classes":
        hands = partition_by_classes(
            labels,
            num_clients,
            seed=seed,
            classes_per_client=settings.classes_per_client,
            min_size=min_size,
            test_fraction=test_fraction,
        )
    elif settings.kind == "quantity":
        hands = partition_by_quantity(
            labels,
            num_clients,
            seed=seed,
            alpha=settings.alpha,
            min_size=min_size,
            test_fraction=test_fraction,
        )
    else:
        hands = partition_iid(
            labels, num_clients, seed=seed, min_size=min_size, test_fraction=test_fraction
        )
    # Padded, so that names sort as numbers do.
    width = len(str(num_clients - 1))
    return {f"client-{number:0{width}}": hand for number, hand in enumerate(hands)}


def _split_domain(domain: Domain, experiment: Experiment) -> tuple[_Part, _Part]:
    """Return a domain's training and test images: the official ones, else drawn by seed."""
    train = _Part(domain.train_images, domain.train_labels)
    if domain.test_images is not None and domain.test_labels is not None:
        return train, _Part(domain.test_images, domain.test_labels)
    generator = numpy_generator(experiment.seed, "partition", "split", domain.name)
    kept, held_out = split_by_class(train.labels, experiment.dataset.test_fraction, generator)
    return train.take(kept), train.take(held_out)


def _draw(part: _Part, name: str, experiment: Experiment) -> _Part:
    """Draw `dataset.train_size` images by seed, or keep all where it is not set."""
    size, available = experiment.dataset.train_size, len(part.labels)
    if size is None:
        return part
    if size > available:
        raise InvalidInput(
            f"dataset.train_size is {size:,}; it must be at most {available:,}, the number of "
            f"training images of {name}."
        )
    generator = numpy_generator(experiment.seed, "partition", "draw", name)
    return part.take(numpy.sort(generator.choice(available, size, replace=False)))


def _join(parts: list[_Part]) -> _Part:
    if len(parts) == 1:
        return parts[0]
    return _Part(
        numpy.concatenate([part.images for part in parts]),
        numpy.concatenate([part.labels for part in parts]),
    )


def _join_tests(tests: dict[str, _Part]) -> tuple[_Part, dict[str, Indices]]:
    """Return the union of the clients' test images and each client's indices into it."""
    names = sorted(tests)
    ends = numpy.cumsum([len(tests[name].labels) for name in names])
    union = _join([tests[name] for name in names])
    ranges = numpy.split(numpy.arange(len(union.labels)), ends[:-1])
    return union, dict(zip(names, ranges, strict=True))
