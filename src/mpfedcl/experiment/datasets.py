"""The data sets by name, with their sources and default settings."""

import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.plugins import entry_points, load
from mpfedcl.experiment.names import did_you_mean, splits_domains

_CIFAR_10 = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR_100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus
butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch
crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo
keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain
mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain
plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone
television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
_OFFICE_10 = (
    "backpack bike calculator headphones keyboard laptop_computer monitor mouse mug projector"
)
_DOMAINNET = "bird feather headphones ice_cream teapot tiger whale windmill wine_glass zebra"


Protocol = Mapping[str, Any]
"""Default settings of a data set by name; `dataset__per_class` is dataset.per_class."""


@dataclass(frozen=True)
class DatasetSpecification:
    """A named data set and its default settings."""

    name: str
    summary: str
    source: str
    always: Protocol
    """Defaults under every partition."""
    pooled: Protocol = field(default_factory=dict)
    """Defaults if the images of all domains are split among the clients, as under label skew."""
    by_domain: Protocol = field(default_factory=dict)
    """Defaults under feature skew, with a domain per client."""
    embedded: bool = False
    holds_images: bool = True
    """Whether samples are images; a user's folder may also hold arrays."""
    class_names: tuple[str, ...] = ()
    """The classes of the set, in order; empty if the files define them."""
    pixel_mean: float = 0.5
    pixel_deviation: float = 0.5
    """Constants: without an encoder, inputs are (pixel / 255 - mean) / deviation."""
    open: Callable[[Any], Any] | None = None
    """Returns the samples for given dataset settings; None if they are in the data folder."""

    def protocol(self, partition_kind: str) -> dict[str, Any]:
        """Return the defaults under a partition."""
        fitting = self.by_domain if splits_domains(partition_kind) else self.pooled
        return {**self.always, **fitting}


_DIGITS = tuple("0123456789")
_MNIST_ALWAYS = {
    "prototypes__per_class": 2,
    "partition__min_size": 10,
    "encoder__name": "none",
}
_MNIST_SAMPLE = DatasetSpecification(
    name="mnist-sample",
    summary="3,000 images of MNIST, included in the package",
    source="Y. LeCun, C. Cortes, C. J. C. Burges: The MNIST database (CC BY-SA 3.0)",
    always=_MNIST_ALWAYS,
    pooled={"clients": 5, "partition__test": "shared"},
    by_domain={"partition__test": "matched"},
    embedded=True,
    class_names=_DIGITS,
    pixel_mean=0.1307,
    pixel_deviation=0.3081,
)
_KRIZHEVSKY = "A. Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images"
_CNN_ALWAYS = {**_MNIST_ALWAYS, "model__name": "cnn"}
_TEN_CLIENTS = {"clients": 10, "partition__test": "shared"}
_HALF = {"dataset__per_class": 50, "dataset__test_per_class": 100}
"""Per class min(50, n // 2) training images, and at most 100 of the rest for testing."""


def _frozen(test_fraction: float = 0.5, prototypes: int = 4) -> dict[str, Any]:
    """Return the defaults that the sets with a frozen encoder share."""
    return {
        "prototypes__per_class": prototypes,
        "dataset__test_fraction": test_fraction,
        "partition__min_size": 1,
        "partition__test": "matched",
        "encoder__name": "resnet18",
    }


SPECIFICATIONS = {
    spec.name: spec
    for spec in (
        _MNIST_SAMPLE,
        replace(
            _MNIST_SAMPLE,
            name="mnist",
            summary="MNIST, 2,000 training images drawn by seed, 10,000 test",
            always={**_MNIST_ALWAYS, "dataset__train_size": 2000},
            embedded=False,
        ),
        DatasetSpecification(
            name="cifar10",
            summary="CIFAR-10, 50,000 training images of ten classes, 10,000 test",
            source=_KRIZHEVSKY,
            always=_CNN_ALWAYS,
            pooled=_TEN_CLIENTS,
            class_names=tuple(_CIFAR_10.split()),
            pixel_mean=0.4734,
            pixel_deviation=0.2516,
        ),
        DatasetSpecification(
            name="cifar100",
            summary="CIFAR-100, 50,000 training images of 100 classes, 10,000 test",
            source=_KRIZHEVSKY,
            always=_CNN_ALWAYS,
            pooled=_TEN_CLIENTS,
            class_names=tuple(_CIFAR_100.split()),
            pixel_mean=0.4782,
            pixel_deviation=0.2682,
        ),
        DatasetSpecification(
            name="femnist",
            summary="62 characters by writer (--partition.kind natural)",
            source="Caldas et al. 2018, LEAF; Cohen et al. 2017, EMNIST; NIST Special Database 19",
            always={**_CNN_ALWAYS, "partition__min_size": 1},
            pooled=_TEN_CLIENTS,
            by_domain={"partition__test": "matched"},
            class_names=tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase),
        ),
        DatasetSpecification(
            name="digit5",
            summary="digits: MNIST, MNIST-M, SVHN, SynthDigits, USPS",
            source="MNIST; Ganin et al. 2016 (MNIST-M, SynthDigits); Netzer et al. 2011; Hull 1994",
            always=_frozen(test_fraction=10 / 11),
            pooled={"clients": 5, "dataset__domains": ("mnist_m",), "dataset__per_class": 550},
            by_domain={"dataset__per_class": 10, "dataset__test_per_class": 200},
            class_names=_DIGITS,
        ),
        DatasetSpecification(
            name="office10",
            summary="Office-Caltech, ten objects: amazon, caltech, dslr, webcam",
            source="Gong et al. 2012; Saenko et al. 2010; Griffin et al. 2007",
            always=_frozen(),
            pooled={"clients": 5, "dataset__domains": ("caltech",), "dataset__per_class": 150},
            by_domain=_HALF,
            class_names=tuple(_OFFICE_10.split()),
        ),
        DatasetSpecification(
            name="domainnet",
            summary="ten classes of DomainNet in six domains",
            source="Peng et al. 2019, Moment Matching for Multi-Source Domain Adaptation",
            always=_frozen(test_fraction=0.75, prototypes=3),
            pooled={"clients": 5, "dataset__domains": ("real",), "dataset__per_class": 200},
            by_domain={"dataset__train_size": 105},
            class_names=tuple(_DOMAINNET.split()),
        ),
        DatasetSpecification(
            name="sixdomain",
            summary="six classes in six domains, from photo to quickdraw",
            source="no published set; a stand-in for DomainNet's six domains",
            always=_frozen(),
            pooled={"clients": 5, "dataset__domains": ("photo",)},
            by_domain=_HALF,
            class_names=("dog", "elephant", "giraffe", "guitar", "horse", "house"),
        ),
        DatasetSpecification(
            name="folder",
            summary="your data: ROOT/<domain>/<class>/*.jpg or ROOT/<domain>.npz",
            source="user",
            always=_frozen(),
            pooled={"clients": 5},
        ),
        DatasetSpecification(
            name="table",
            summary="your data: a CSV or Parquet file, or a folder of them",
            source="user",
            always={**_frozen(), "encoder__name": "none"},
            pooled={"clients": 5},
            holds_images=False,
        ),
    )
}


GIVEN = "given:"
"""How the names of data sets begin that are objects of a Python program."""
OBJECTS: dict[str, DatasetSpecification] = {}
"""The data sets of objects that are open, by name (`mpfedcl.data.objects`)."""


def specify_objects(name: str) -> DatasetSpecification:
    """Return what is known of objects that are not open: given ones, or package.module:function."""
    always = {**_frozen(), "encoder__name": "none"}
    return DatasetSpecification(name, "objects of a Python program", "user", always)


def find_specification(name: str) -> DatasetSpecification:
    """Return a data set by name; other packages add data sets as entry points."""
    if ":" in name:
        return OBJECTS.get(name) or specify_objects(name)
    if name not in SPECIFICATIONS and (entry := entry_points("mpfedcl.datasets").get(name)):
        found = load(entry, "dataset.name")
        if not isinstance(found, DatasetSpecification):
            raise InvalidInput(
                f"dataset.name is {name!r}; {entry.value} is no DatasetSpecification."
            )
        always = {**_frozen(), "encoder__name": "none", **found.always}
        return replace(found, always=always, pooled={"clients": 5, **found.pooled})
    if name not in SPECIFICATIONS:
        raise InvalidInput(
            f"dataset.name is {name!r}; it must be one of {', '.join(SPECIFICATIONS)}"
            f"{did_you_mean(name, SPECIFICATIONS)}."
        )
    return SPECIFICATIONS[name]
