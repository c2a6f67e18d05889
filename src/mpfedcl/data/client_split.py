"""The split of samples among clients, and its record in partition.json."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.rng import numpy_generator
from mpfedcl.data.client_data import ByClient, SubsetsByClient
from mpfedcl.data.partitions import divide
from mpfedcl.data.samples import (
    DomainIndex,
    Indices,
    SampleIndex,
    Subset,
    draw_training,
    split_by_class,
)
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.names import splits_domains


@dataclass(frozen=True)
class ClientSplit:
    """Training samples by client in order of name, and the global test set."""

    training: SubsetsByClient
    test: Subset
    test_begins: Indices
    test_sizes: Indices
    """[clients]: the range of the global test set that is each client's local test set."""
    public: Subset | None = None
    """Training samples held by the server instead of a client."""

    def describe(self, class_names: Sequence[str]) -> dict[str, Any]:
        """Return each client's number of training samples per class and of test samples."""
        num_classes = len(class_names)
        counts = self.training.count_labels(num_classes).tolist()
        parts = zip(self.training.names, counts, self.test_sizes.tolist(), strict=True)
        described: dict[str, Any] = {
            "classes": list(class_names),
            "clients": {name: {"train": own, "test": tested} for name, own, tested in parts},
        }
        if self.public is not None:
            counted = numpy.bincount(self.public.labels, minlength=num_classes)
            described["public"] = counted.tolist()
        return described

    @property
    def local_test(self) -> ByClient[Indices]:
        """Each client's indices into the global test set."""
        begins, sizes = self.test_begins, self.test_sizes
        return ByClient(
            self.training.names, lambda place: numpy.arange(sizes[place]) + begins[place]
        )

    @property
    def all_rows(self) -> Indices:
        """The rows of all samples in use: training, public and test."""
        public = [] if self.public is None else [self.public]
        return Subset.join([self.training.everything, *public, self.test]).rows


def split_among_clients(sample_index: SampleIndex, experiment: Experiment) -> ClientSplit:
    """Split the images of a resolved experiment among its clients."""
    by_domain = splits_domains(experiment.partition.kind)
    split = (_split_by_domain if by_domain else _split_pool)(sample_index, experiment)
    if len(split.test.labels) == 0:
        raise InvalidInput(
            f"dataset.test_fraction is {_test_fraction(experiment):g} and leaves no image "
            "to test on; it must be larger, or the set must have more images of a class."
        )
    return _hold_out_validation(split, experiment) if experiment.partition.validation else split


def split_own_samples(
    sample_index: SampleIndex, name: str, experiment: Experiment
) -> tuple[Subset, Subset]:
    """Return the training and test images of a client that brings its own data.

    Under feature skew the split equals that of a domain with the client's name and the same seed;
    otherwise all images are split like those of a set. Several domains are split one by one.
    """
    by_domain = splits_domains(experiment.partition.kind)
    split_one = _split_domain if by_domain else _split_pooled
    several = len(sample_index.domains) > 1
    subsets = [
        split_one(replace(each, name=f"{name}/{each.name}" if several else name), experiment)
        for each in sample_index.domains
    ]
    train, test = (Subset.join(each) for each in zip(*subsets, strict=True))
    size = experiment.dataset.train_size
    draws = by_domain and size is not None and size < len(train.labels)
    return _draw_training(train, name, experiment) if draws else train, test


def _hold_out_validation(split: ClientSplit, experiment: Experiment) -> ClientSplit:
    """Test on a share of each client's training images of each class; test images stay unopened.

    Each class keeps a training image, so a client with one image per class has no test images.
    """
    fraction = experiment.partition.validation
    kept, held_out = _hold_out(split.training, fraction, experiment, "validation")
    if len(held_out.everything.labels) == 0:
        raise InvalidInput(
            f"partition.validation is {fraction:g} and holds out no image; it must be larger, or "
            "clients must have more training images of a class."
        )
    return _join_tests(kept, held_out, experiment, split.public)


def _hold_out(
    samples: SubsetsByClient, fraction: float, experiment: Experiment, purpose: str
) -> tuple[SubsetsByClient, SubsetsByClient]:
    """Return what each client trains on, and the share of each class that it holds out."""

    def generator_of(place: int) -> numpy.random.Generator:
        return numpy_generator(experiment.seed, "partition", purpose, samples.names[place])

    trains = draw_training(samples.everything.labels, samples.sizes, fraction, generator_of)
    return samples.keep(trains), samples.keep(~trains)


def _hold_out_public(
    subset: Subset, asked: float, experiment: Experiment, *parts: str
) -> tuple[Subset, Subset]:
    """Return training images for clients, and those that the server has: at most a tenth."""
    size = min(math.ceil(asked), max(1, len(subset.labels) // 10))
    draw = numpy_generator(experiment.seed, "partition", "public", *parts)
    order = draw.permutation(len(subset.labels))
    return subset.select(numpy.sort(order[size:])), subset.select(numpy.sort(order[:size]))


def _split_by_domain(sample_index: SampleIndex, experiment: Experiment) -> ClientSplit:
    """Give each client whole domains."""
    domains = sample_index.domains
    if len(domains) < 2:
        raise InvalidInput(
            f"partition.kind is {experiment.partition.kind!r}, but {sample_index.name} has one "
            f"domain ({domains[0].name}); it must have at least two, or the kind must be another."
        )
    parts: tuple[dict[str, Subset], dict[str, Subset]] = {}, {}
    for own in divide([domain.name for domain in domains], experiment):
        name = "+".join(domains[number].name for number in own)
        halves = [_split_domain(domains[number], experiment) for number in own]
        train, test = (Subset.join(each) for each in zip(*halves, strict=True))
        train = _draw_training(train, name, experiment)
        found, wanted = len(train.labels), experiment.partition.min_size
        if wanted is not None and found < wanted:
            raise InvalidInput(
                f"partition.min_size is {wanted:,}, but the domain {name} has {found:,} training "
                f"images; it must be at most that under partition.kind {experiment.partition.kind}."
            )
        parts[0][name], parts[1][name] = train, test
    training, tests = (SubsetsByClient.join(each) for each in parts)
    if not (asked := experiment.public.size):
        return _join_tests(training, tests, experiment)
    share = asked / len(training.everything.labels)
    pairs = {
        name: _hold_out_public(each, share * len(each.labels), experiment, name)
        for name, each in training.items()
    }
    kept = SubsetsByClient.join({name: own for name, (own, _) in pairs.items()})
    public = Subset.join([held_out for _, held_out in pairs.values()])
    return _join_tests(kept, tests, experiment, public)


def _split_pool(sample_index: SampleIndex, experiment: Experiment) -> ClientSplit:
    """Split the images of all domains together among the clients."""
    if experiment.partition.test == "shared":
        splits = [_split_pooled(domain, experiment) for domain in sample_index.domains]
        pool = _draw_pool([train for train, _ in splits], sample_index.name, experiment)
        pool, public = _take_public(pool, experiment)
        test = Subset.join([test for _, test in splits])
        training = _assign_images(pool, experiment, test_fraction=None)
        return share_test(training, test, public)
    # Matched: a client is tested on some of its own images, not on an official test set.
    pool = _draw_pool([each.train for each in sample_index.domains], sample_index.name, experiment)
    pool, public = _take_public(pool, experiment)
    fraction = _test_fraction(experiment)
    everyones = _assign_images(pool, experiment, fraction)
    training, tests = _hold_out(everyones, fraction, experiment, "matched")
    return _join_tests(training, tests, experiment, public)


def _take_public(pool: Subset, experiment: Experiment) -> tuple[Subset, Subset | None]:
    """Hold public images out of those that are to be dealt, if any are asked for."""
    if not (asked := experiment.public.size):
        return pool, None
    return _hold_out_public(pool, asked, experiment)


def _assign_images(
    pool: Subset, experiment: Experiment, test_fraction: float | None
) -> SubsetsByClient:
    """Return which images each client gets."""
    indices = divide(pool.labels, experiment, test_fraction)
    # Padded, so that names sort as numbers do.
    width = len(str(len(indices) - 1))
    names = [f"client-{number:0{width}}" for number in range(len(indices))]
    sizes = numpy.array([len(own) for own in indices], dtype=numpy.int64)
    return SubsetsByClient(names, pool.select(numpy.concatenate(indices)), sizes)


def _split_pooled(domain: DomainIndex, experiment: Experiment) -> tuple[Subset, Subset]:
    """Return a domain's training and test images: the official ones, else drawn by seed."""
    if domain.test is not None:
        return domain.train, domain.test
    generator = numpy_generator(experiment.seed, "partition", "split", domain.name)
    fraction = _test_fraction(experiment)
    kept, held_out = split_by_class(domain.train.labels, fraction, generator)
    return domain.train.select(kept), domain.train.select(held_out)


def _split_domain(domain: DomainIndex, experiment: Experiment) -> tuple[Subset, Subset]:
    """Return the training and test images of a domain that is a client.

    With `dataset.per_class` M: an official training set gives M images per class; a set without a
    split gives min(M, n // 2) of the n of a class, and the rest is there to test on.
    """
    most, most_tested = experiment.dataset.per_class, experiment.dataset.test_per_class
    train, test = domain.train, domain.test
    if test is None and most is None:
        train, test = _split_pooled(domain, experiment)
    generator = numpy_generator(experiment.seed, "partition", "domain", domain.name)
    if test is None:
        most = most or len(train.labels)
        drawn = _draw_by_class(train.labels, lambda count: min(most, count // 2), generator)
        rest = numpy.setdiff1d(numpy.arange(len(train.labels)), drawn)
        train, test = train.select(drawn), train.select(rest)
    elif most is not None:
        train = train.select(_draw_by_class(train.labels, lambda _: most, generator))
    if most_tested is not None:
        test = test.select(_draw_by_class(test.labels, lambda _: most_tested, generator))
    return train, test


def _draw_by_class(
    labels: Indices, most: Callable[[int], int], generator: numpy.random.Generator
) -> Indices:
    """Draw at most `most(count)` of the `count` images of each class; return their positions."""
    drawn = [numpy.empty(0, dtype=numpy.int64)]
    for label in numpy.unique(labels):
        members = generator.permutation(numpy.flatnonzero(labels == label))
        drawn.append(members[: most(len(members))])
    return numpy.sort(numpy.concatenate(drawn))


def _draw_pool(subsets: Sequence[Subset], name: str, experiment: Experiment) -> Subset:
    """Join training images; draw `dataset.per_class` of each class, then `dataset.train_size`."""
    pool, most = Subset.join(subsets), experiment.dataset.per_class
    if most is not None:
        generator = numpy_generator(experiment.seed, "partition", "per class", name)
        pool = pool.select(_draw_by_class(pool.labels, lambda _: most, generator))
    return _draw_training(pool, name, experiment)


def _draw_training(subset: Subset, name: str, experiment: Experiment) -> Subset:
    """Draw `dataset.train_size` images by seed, or keep all if it is not set."""
    size, available = experiment.dataset.train_size, len(subset.labels)
    if size is None:
        return subset
    if size > available:
        raise InvalidInput(
            f"dataset.train_size is {size:,}; it must be at most {available:,}, the number of "
            f"training images of {name}."
        )
    generator = numpy_generator(experiment.seed, "partition", "draw", name)
    return subset.select(numpy.sort(generator.choice(available, size, replace=False)))


def _join_tests(
    training: SubsetsByClient,
    tests: SubsetsByClient,
    experiment: Experiment,
    public: Subset | None = None,
) -> ClientSplit:
    """Test on the union of the clients' test images, or each client on its own."""
    if experiment.partition.test == "shared":
        return share_test(training, tests.everything, public)
    begins = numpy.cumsum(tests.sizes) - tests.sizes
    return ClientSplit(training, tests.everything, begins, tests.sizes, public)


def share_test(
    training: SubsetsByClient, test: Subset, public: Subset | None = None
) -> ClientSplit:
    """Return a split in which every client is tested on all of the global test set."""
    begins = numpy.zeros_like(training.sizes)
    sizes = numpy.full_like(training.sizes, len(test.labels))
    return ClientSplit(training, test, begins, sizes, public)


def _test_fraction(experiment: Experiment) -> float:
    return experiment.dataset.test_fraction or 0.5


def is_same_partition(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether two descriptions match, up to rounding in the inputs."""
    # A client that joined or left later has no mean on record.
    means = {**now["input_means"], **before.get("input_means", {})}
    return _is_close({**before, "input_means": means}, now)


def _is_close(before: Any, now: Any) -> bool:
    if isinstance(before, dict) and isinstance(now, dict):
        names = before.keys()
        return names == now.keys() and all(_is_close(before[each], now[each]) for each in names)
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(_is_close, before, now))
    if isinstance(before, float) and isinstance(now, float):
        return math.isclose(before, now, rel_tol=1e-4, abs_tol=1e-6)
    return bool(before == now)
