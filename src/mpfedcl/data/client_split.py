"""The deal: which client trains and is tested on which images, before any image is opened."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy

from mpfedcl.data.image_set import ListedDomain, Listing, Part
from mpfedcl.data.partition import (
    partition_by_classes,
    partition_by_label,
    partition_by_quantity,
    partition_iid,
)
from mpfedcl.data.split import Indices, split_by_class
from mpfedcl.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.rng import numpy_generator


@dataclass(frozen=True)
class Deal:
    """Training images by client in order of name, the union test set, and who has which of it."""

    training: dict[str, Part]
    test: Part
    own: dict[str, Indices]
    """Each client's indices into the union test set."""

    def describe(self, class_names: Sequence[str]) -> dict[str, Any]:
        """Return who has how many training images of each class, and how many test images."""
        return {
            "classes": list(class_names),
            "clients": {
                name: {
                    "train": numpy.bincount(part.labels, minlength=len(class_names)).tolist(),
                    "test": len(self.own[name]),
                }
                for name, part in self.training.items()
            },
        }

    @cached_property
    def all_rows(self) -> Indices:
        """The numbers of all images that somebody needs, each once, in order."""
        return numpy.unique(Part.join([*self.training.values(), self.test]).rows)

    def place(self, part: Part) -> Indices:
        """Return where a part's images are among `all_rows`."""
        return numpy.searchsorted(self.all_rows, part.rows)


def deal_images(listing: Listing, experiment: Experiment) -> Deal:
    """Deal the images of a resolved experiment out to its clients."""
    by_domain = experiment.partition.kind == "feature"
    dealt = _give_domains(listing, experiment) if by_domain else _deal_pool(listing, experiment)
    if len(dealt.test.labels) == 0:
        raise InvalidInput(
            f"dataset.test_fraction is {_test_fraction(experiment):g} and leaves no image "
            "to test on; it must be larger, or the set must have more images of a class."
        )
    return _hold_out(dealt, experiment) if experiment.partition.validation else dealt


def split_newcomer(listing: Listing, name: str, experiment: Experiment) -> tuple[Part, Part]:
    """Return the training and test images of a client that was not there when images were dealt.

    Under feature skew it gets what a domain of its name would have got, with the same seed the very
    same images; else all its images are split as a set's are. Several domains are split one by one.
    """
    by_domain = experiment.partition.kind == "feature"
    split = _split_domain if by_domain else _split_pooled
    several = len(listing.domains) > 1
    parts = [
        split(replace(each, name=f"{name}/{each.name}" if several else name), experiment)
        for each in listing.domains
    ]
    train, test = (Part.join(each) for each in zip(*parts, strict=True))
    size = experiment.dataset.train_size
    draws = by_domain and size is not None and size < len(train.labels)
    return _draw(train, name, experiment) if draws else train, test


def _hold_out(dealt: Deal, experiment: Experiment) -> Deal:
    """Test on a share of each client's training images of each class; nobody sees the test images.

    Each class keeps an image to train on, so a client with single images has none to be tested on.
    """
    fraction = experiment.partition.validation
    training, tests = {}, {}
    for name, part in dealt.training.items():
        generator = numpy_generator(experiment.seed, "partition", "validation", name)
        kept, held_out = split_by_class(part.labels, fraction, generator)
        training[name], tests[name] = part.take(kept), part.take(held_out)
    test, own = _join_tests(tests)
    if len(test.labels) == 0:
        raise InvalidInput(
            f"partition.validation is {fraction:g} and holds out no image; it must be larger, or "
            "clients must have more training images of a class."
        )
    if experiment.partition.test == "shared":
        own = dict.fromkeys(tests, numpy.arange(len(test.labels)))
    return Deal(training, test, own)


def _give_domains(listing: Listing, experiment: Experiment) -> Deal:
    """Make each domain a client."""
    domains = listing.domains
    if len(domains) < 2:
        raise InvalidInput(
            f"partition.kind is 'feature', but {listing.name} has one domain "
            f"({domains[0].name}); it must have at least two, or the kind must be another."
        )
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
    return Deal(training, test, own)


def _deal_pool(listing: Listing, experiment: Experiment) -> Deal:
    """Deal the images of all domains together out to the clients."""
    if experiment.partition.test == "shared":
        splits = [_split_pooled(domain, experiment) for domain in listing.domains]
        pool = _cap(Part.join([train for train, _ in splits]), listing.name, experiment)
        pool = _draw(pool, listing.name, experiment)
        test = Part.join([test for _, test in splits])
        hands = _partition(pool.labels, experiment, test_fraction=None)
        own = dict.fromkeys(hands, numpy.arange(len(test.labels)))
        return Deal({name: pool.take(hand) for name, hand in hands.items()}, test, own)
    # Matched: what a client is tested on comes out of its own hand, not from an official test set.
    pool = _cap(Part.join([domain.train for domain in listing.domains]), listing.name, experiment)
    pool = _draw(pool, listing.name, experiment)
    fraction = _test_fraction(experiment)
    training, tests = {}, {}
    for name, hand in _partition(pool.labels, experiment, fraction).items():
        generator = numpy_generator(experiment.seed, "partition", "matched", name)
        train, held_out = split_by_class(pool.labels[hand], fraction, generator)
        training[name], tests[name] = pool.take(hand[train]), pool.take(hand[held_out])
    return Deal(training, *_join_tests(tests))


def _partition(
    labels: Indices, experiment: Experiment, test_fraction: float | None
) -> dict[str, Indices]:
    """Return which images each client gets, by the client's name."""
    settings = experiment.partition
    num_clients = experiment.clients or 1
    common: dict[str, Any] = {
        "seed": experiment.seed,
        "min_size": settings.min_size or 1,
        "test_fraction": test_fraction,
    }
    if settings.kind == "label":
        hands = partition_by_label(
            labels, num_clients, alpha=settings.alpha, balanced=settings.balanced, **common
        )
    elif settings.kind == "classes":
        held = settings.classes_per_client
        hands = partition_by_classes(labels, num_clients, classes_per_client=held, **common)
    elif settings.kind == "quantity":
        hands = partition_by_quantity(labels, num_clients, alpha=settings.alpha, **common)
    else:
        hands = partition_iid(labels, num_clients, **common)
    # Padded, so that names sort as numbers do.
    width = len(str(num_clients - 1))
    return {f"client-{number:0{width}}": hand for number, hand in enumerate(hands)}


def _split_pooled(domain: ListedDomain, experiment: Experiment) -> tuple[Part, Part]:
    """Return a domain's training and test images: the official ones, else drawn by seed."""
    if domain.test is not None:
        return domain.train, domain.test
    generator = numpy_generator(experiment.seed, "partition", "split", domain.name)
    fraction = _test_fraction(experiment)
    kept, held_out = split_by_class(domain.train.labels, fraction, generator)
    return domain.train.take(kept), domain.train.take(held_out)


def _split_domain(domain: ListedDomain, experiment: Experiment) -> tuple[Part, Part]:
    """Return the training and test images of a domain that is a client.

    With `dataset.per_class` M: an official training set gives M images a class; a set without a
    split gives min(M, n // 2) of the n of a class, and the rest is there to test on.
    """
    most, most_tested = experiment.dataset.per_class, experiment.dataset.test_per_class
    train, test = domain.train, domain.test
    if test is None and most is None:
        train, test = _split_pooled(domain, experiment)
    generator = numpy_generator(experiment.seed, "partition", "domain", domain.name)
    if test is None:
        train, test = _halve(train, most or len(train.labels), generator)
    elif most is not None:
        train = train.take(_draw_by_class(train.labels, most, generator))
    if most_tested is not None:
        test = test.take(_draw_by_class(test.labels, most_tested, generator))
    return train, test


def _halve(part: Part, most: int, generator: numpy.random.Generator) -> tuple[Part, Part]:
    """Draw min(most, n // 2) images of each class; return them and the rest."""
    drawn = numpy.zeros(len(part.labels), dtype=bool)
    for label in numpy.unique(part.labels):
        members = generator.permutation(numpy.flatnonzero(part.labels == label))
        drawn[members[: min(most, len(members) // 2)]] = True
    return part.take(drawn), part.take(~drawn)


def _draw_by_class(labels: Indices, most: int, generator: numpy.random.Generator) -> Indices:
    """Draw at most `most` images of each class; return their positions in order."""
    drawn = [
        generator.permutation(numpy.flatnonzero(labels == label))[:most]
        for label in numpy.unique(labels)
    ]
    return numpy.sort(numpy.concatenate(drawn)) if drawn else numpy.empty(0, dtype=numpy.int64)


def _cap(part: Part, name: str, experiment: Experiment) -> Part:
    """Draw `dataset.per_class` images of each class by seed, or keep all where it is not set."""
    if experiment.dataset.per_class is None:
        return part
    generator = numpy_generator(experiment.seed, "partition", "per class", name)
    return part.take(_draw_by_class(part.labels, experiment.dataset.per_class, generator))


def _draw(part: Part, name: str, experiment: Experiment) -> Part:
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


def _join_tests(tests: dict[str, Part]) -> tuple[Part, dict[str, Indices]]:
    """Return the union of the clients' test images and each client's indices into it."""
    names = sorted(tests)
    ends = numpy.cumsum([len(tests[name].labels) for name in names])
    union = Part.join([tests[name] for name in names])
    ranges = numpy.split(numpy.arange(len(union.labels)), ends[:-1])
    return union, dict(zip(names, ranges, strict=True))


def _test_fraction(experiment: Experiment) -> float:
    return experiment.dataset.test_fraction or 0.5
