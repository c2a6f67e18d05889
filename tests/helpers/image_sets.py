"""Image sets read whole, for tests that compare pixels."""

from dataclasses import dataclass

import numpy

from mpfedcl.core.images import Images
from mpfedcl.data.sample_index import open_data_set
from mpfedcl.data.samples import Indices, choose_format
from mpfedcl.experiment.settings import DatasetSettings


@dataclass(frozen=True)
class DomainImages:
    """The images of one domain; the test part is None without an official split."""

    name: str
    train_images: Images
    train_labels: Indices
    test_images: Images | None
    test_labels: Indices | None


@dataclass(frozen=True)
class ImageSet:
    """A data set in memory: domains in order of name, all images of one size and color mode."""

    name: str
    domains: tuple[DomainImages, ...]
    class_names: tuple[str, ...]


def read_image_set(dataset: DatasetSettings) -> ImageSet:
    """Read the data set that the settings name, in one size and one color mode."""
    sample_index = open_data_set(dataset)
    wanted = choose_format(sample_index.store.inspect(), dataset.image_size)
    images = sample_index.store.load(numpy.arange(len(sample_index.store)), wanted)
    domains = tuple(
        DomainImages(
            domain.name,
            images[domain.train.rows],
            domain.train.labels,
            None if domain.test is None else images[domain.test.rows],
            None if domain.test is None else domain.test.labels,
        )
        for domain in sample_index.domains
    )
    return ImageSet(sample_index.name, domains, sample_index.class_names)
