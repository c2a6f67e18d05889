"""The table of golden runs: which experiments are frozen, in names that outlive a renaming.

A case is one run. Its settings have the names of the public contract; `golden.py` translates them
into those of the present code. Cases with the same `like` must agree with each other, so that the
committed file holds their result once.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

Kind = Literal["simulation", "loopback", "resumed"]
"""resumed: a process that is killed with SIGKILL after a round, and the run is resumed."""
DataSet = Literal["images", "vectors", "table", "pictures"]
Settings = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One run."""

    name: str
    method: str
    settings: Settings = field(default_factory=dict, hash=False)
    kind: Kind = "simulation"
    data: DataSet = "images"
    like: str | None = None
    """The case whose result this one must have."""


METHODS = (
    *("afd", "aso-fed", "async-share", "cmfl", "ditto", "dp-fedcl", "fed-dropout", "fedasync"),
    *("fedat", "fedavg", "fedavg-ft", "fedbabu", "fedbn", "fedcof", "feddyn", "fedgauss"),
    *("fedlc", "fedlda", "fedmmd", "fedncm", "fednh", "fednova", "fedopt", "fedpcl"),
    *("fedper", "fedplvm", "fedproc", "fedproto", "fedprox", "fedrep", "fedridge", "fedrod"),
    *("fedrs", "fedtgp", "fpl", "local", "local-gauss", "moon", "mp-fedcl", "mpfed"),
    *("pfedme", "proto-attention", "proto-inference", "sageflow", "scaffold", "sp-fedcl"),
)
CNN: Settings = {"model__name": "cnn", "model__hidden": (6,), "model__norm": "group", "rounds": 2}
SLOW: Settings = {"systems__seconds_a_sample": 0.02, "systems__most_per_minute": 0.0}
ASYNCHRONOUS: Mapping[str, Settings] = {
    "aso-fed": SLOW,
    "async-share": SLOW,
    "fedasync": SLOW,
    "fedat": SLOW | {"fedat__tiers": 2},
    "sageflow": SLOW | {"systems__tick": 0.1, "public__size": 4},
}
ONE_AT_A_TIME: Settings = {"systems__concurrency": 1, "systems__most_per_minute": 0.0}
"""Over a network clients come when they come; one at a time, their order is known."""
ON_NETWORK: Mapping[str, Settings] = {
    "aso-fed": ONE_AT_A_TIME,
    "async-share": ONE_AT_A_TIME | {"systems__tick": 2.0},
    "fedasync": ONE_AT_A_TIME,
    "fedat": ONE_AT_A_TIME | {"fedat__tiers": 1},
    "sageflow": ONE_AT_A_TIME | {"systems__tick": 2.0, "public__size": 4},
}
CMFL: Settings = {"cmfl__threshold": 0.85, "model__hidden": (6,), "rounds": 2}
"""Signs of zeros and of rounding errors differ between engines: nothing here hangs on them."""
OWN: Mapping[str, Settings] = {"fedbn": CNN, "cmfl": CMFL, **ASYNCHRONOUS}

RULES = (
    *("median", "trimmed-mean", "krum", "multi-krum"),
    *("geometric-median", "centered-clipping"),
)
SIX: Settings = {"clients": 6}
SAMPLED: Settings = {"clients": 6, "fraction": 0.5}
RAGGED: Settings = {
    "partition__kind": "quantity",
    "partition__alpha": 1.0,
    "partition__test": "shared",
    "clients": 6,
}
BOUNDED: Settings = {"validation__bounds": "on", "validation__clip_factor": 0.8}
SECURE: Settings = {"secure_aggregation": True}
PRIVATE: Settings = {"privacy__epsilon": 5.0}
LOCALLY_PRIVATE: Settings = PRIVATE | {"privacy__model": "local"}
CLINICS: Settings = {
    "dataset__name": "table",
    "dataset__label": "diagnosis",
    "dataset__client": "clinic",
    "partition__kind": "natural",
    "partition__test": None,
    "clients": None,
}
FEATURES: Settings = {"partition__kind": "feature", "clients": None}
ENCODED: Settings = FEATURES | {"encoder__name": "random-resnet18", "rounds": 1}

VARIANTS: Mapping[str, tuple[str, Settings]] = {
    # MP-FedCL
    "padding-all": ("mp-fedcl", RAGGED | {"prototypes__padding": "all"}),
    "padding-fill": ("mp-fedcl", RAGGED | {"prototypes__padding": "fill"}),
    "k-auto": ("mp-fedcl", {"prototypes__per_class": "auto"}),
    "k-1": ("mp-fedcl", {"prototypes__per_class": 1}),
    "k-4": ("mp-fedcl", RAGGED | {"prototypes__per_class": 4}),
    "pool-size": ("mp-fedcl", {"prototypes__pool_size": 2}),
    "pool-ttl": ("mp-fedcl", SAMPLED | {"prototypes__pool_ttl": 2}),
    "no-share-model": ("mp-fedcl", {"share_model": False}),
    "dp-fedcl-no-share-model": ("dp-fedcl", RAGGED | {"share_model": False}),
    "not-normalized": ("mp-fedcl", {"prototypes__normalize": False}),
    "min-cluster-size": ("mp-fedcl", {"prototypes__min_cluster_size": 3}),
    "init-random": ("mp-fedcl", {"prototypes__init": "random"}),
    "contrast-pooled": ("mp-fedcl", {"contrast__form": "pooled"}),
    "contrast-literal": ("mp-fedcl", {"contrast__form": "literal"}),
    "contrast-weight": (
        "mp-fedcl",
        {"contrast__weight": 0.3, "contrast__temperature": 0.5},
    ),
    # Methods' own settings
    **{
        f"fedopt-{each}": ("fedopt", {"fedopt__optimizer": each})
        for each in ("sgd", "yogi", "adagrad")
    },
    "fednova-momentum": ("fednova", RAGGED | {"fednova__momentum": 0.5, "train__epochs": 2}),
    "cmfl-constant": ("cmfl", CMFL | {"cmfl__schedule": "constant", "cmfl__threshold": 0.6}),
    "fedprox-mu": ("fedprox", {"fedprox__mu": 1.0}),
    # FedGauss
    "fedgauss-pooled": ("fedgauss", {"statistics__keep": "pooled"}),
    "fedgauss-clients": ("fedgauss", {"statistics__keep": "clients"}),
    "fedgauss-ragged": ("fedgauss", RAGGED),
    "fedgauss-random-filters": ("fedgauss", {"encoder__name": "random-filters"}),
    # Privacy
    "central-dp-fedavg": ("fedavg", PRIVATE),
    "central-dp-clip": ("fedavg", {"privacy__noise": 7.0, "privacy__clip": 0.01} | PRIVATE),
    "central-dp-mp-fedcl": ("mp-fedcl", {"privacy__epsilon": 100.0}),
    "central-dp-fedgauss": ("fedgauss", PRIVATE | {"privacy__dimensions": 6}),
    "central-dp-client-level": ("fedncm", PRIVATE | {"privacy__unit": "client"}),
    "local-dp-fedncm": ("fedncm", LOCALLY_PRIVATE),
    "local-dp-fedgauss": (
        "fedgauss",
        LOCALLY_PRIVATE | {"privacy__moments": True, "privacy__dimensions": 6},
    ),
    # Secure aggregation
    "secure-fedavg": ("fedavg", SECURE),
    "secure-fedprox": ("fedprox", SECURE | SIX),
    "secure-fedgauss": ("fedgauss", SECURE),
    "secure-dp-fedavg": ("fedavg", SECURE | PRIVATE),
    "secure-dp-fedgauss": ("fedgauss", SECURE | PRIVATE | {"privacy__dimensions": 6}),
    # System heterogeneity
    "systems-tiers": ("fedavg", SIX | SLOW | {"systems__kind": "tiers"}),
    "systems-drop": ("mp-fedcl", SIX | {"systems__kind": "lognormal", "systems__drop": 0.3}),
    "fedasync-hinge": ("fedasync", SIX | SLOW | {"fedasync__staleness": "hinge"}),
    "fedasync-constant": (
        "fedasync",
        SIX | SLOW | {"fedasync__staleness": "constant", "systems__concurrency": 2},
    ),
    "fedat-drop": ("fedat", SIX | SLOW | {"fedat__tiers": 2, "systems__drop": 0.3}),
    "aso-fed-size": (
        "aso-fed",
        RAGGED | SLOW | {"systems__kind": "tiers", "systems__follows": "size"},
    ),
    "async-share-label": (
        "async-share",
        SIX | SLOW | {"systems__follows": "label", "systems__spread": 1.5, "systems__drop": 0.3},
    ),
    "sageflow-slow": (
        "sageflow",
        SIX | SLOW | {"systems__tick": 0.1, "systems__jitter": 0.5, "systems__up": 1e4},
    ),
    # Updates
    **{
        f"compress-{kind}-{method}": (method, {"update__compress": kind})
        for kind in ("half", "int8", "topk")
        for method in ("mp-fedcl", "fedavg")
    },
    "compress-keep": ("fedavg", {"update__compress": "topk", "update__keep": 0.3}),
    "clip-fedavg": ("fedavg", {"update__clip": 0.05}),
    "clip-mp-fedcl": ("mp-fedcl", RAGGED | {"update__clip": 0.05, "aggregation__rule": "median"}),
    # Byzantine-robust aggregation and update validation
    **{f"rule-{rule}": ("fedavg", SIX | {"aggregation__rule": rule}) for rule in RULES},
    "rule-mp-fedcl-median": ("mp-fedcl", SIX | {"aggregation__rule": "median"}),
    "bounds-fedavg": ("fedavg", RAGGED | BOUNDED),
    "bounds-mp-fedcl": ("mp-fedcl", RAGGED | BOUNDED | {"aggregation__rule": "median"}),
    "bounds-fedgauss": ("fedgauss", RAGGED | BOUNDED),
    # Participation
    **{
        f"fraction-{method}": (method, SAMPLED)
        for method in ("fedavg", "fedproto", "scaffold", "mp-fedcl", "ditto", "moon", "feddyn")
    },
    "evaluate-clients": ("mp-fedcl", SIX | {"evaluate_clients": 2}),
    # Models and training
    "cnn-fedavg": ("fedavg", CNN),
    "cnn-mp-fedcl": ("mp-fedcl", CNN | {"model__norm": "none"}),
    "hidden-3": ("mp-fedcl", {"model__hidden": (14, 9, 5)}),
    "adam": ("fedavg", {"train__optimizer": "adam", "train__lr": 0.003}),
    "weight-decay": ("fedprox", {"train__weight_decay": 0.01, "train__epochs": 2}),
    "stacked": ("mp-fedcl", {"engine": "stacked"}),
    # Partitions and test sets
    **{
        f"partition-{kind}": ("mp-fedcl", {"partition__kind": kind, "partition__alpha": 1.0})
        for kind in ("iid", "classes", "quantity")
    },
    "partition-unbalanced": ("fedavg", {"partition__balanced": False}),
    "partition-shared-test": ("mp-fedcl", {"partition__test": "shared"}),
    "partition-validation": ("fedavg", {"partition__validation": 0.2}),
    "train-size": ("fedavg", {"dataset__train_size": 60}),
}
ON_OTHER_DATA: Mapping[str, tuple[str, Settings, DataSet]] = {
    "vectors-mp-fedcl": ("mp-fedcl", {}, "vectors"),
    "vectors-fedgauss": ("fedgauss", FEATURES, "vectors"),
    "vectors-feature": ("mp-fedcl", FEATURES, "vectors"),
    "table-mp-fedcl": ("mp-fedcl", CLINICS, "table"),
    "table-fedgauss": ("fedgauss", CLINICS, "table"),
    "pictures-encoded": ("mp-fedcl", ENCODED, "pictures"),
    "pictures-trained-encoder": ("fedavg", ENCODED | {"encoder__train": True}, "pictures"),
    "pictures-fedbn": ("fedbn", ENCODED | {"encoder__train": True}, "pictures"),
}
OVER_NETWORK = (
    *("padding-fill", "k-auto", "pool-size", "no-share-model", "compress-half-mp-fedcl"),
    *("compress-int8-mp-fedcl", "compress-topk-fedavg", "clip-fedavg", "rule-median"),
    *("bounds-mp-fedcl", "bounds-fedgauss", "secure-fedavg", "secure-fedgauss"),
    *("central-dp-fedavg", "central-dp-fedgauss", "local-dp-fedncm", "fraction-fedavg"),
    *("fraction-scaffold", "cnn-fedavg"),
)
KILLED: Mapping[str, tuple[str, Settings]] = {
    "mp-fedcl": ("mp-fedcl", {}),
    "scaffold": ("scaffold", SAMPLED),
    "fedproto": ("fedproto", {}),
    "topk": ("fedavg", {"update__compress": "topk"}),
    "fedasync": ("fedasync", SIX | SLOW),
    "sageflow": ("sageflow", SIX | ASYNCHRONOUS["sageflow"]),
}

SMALL = (
    *("mp-fedcl/loop/1", "mp-fedcl/auto/1", "mp-fedcl/auto/2", "mp-fedcl/loopback"),
    *(f"{each}/loop/1" for each in ("scaffold", "fedproto", "fedopt", "fedrep", "fedasync")),
    *(f"{each}/auto/1" for each in ("dp-fedcl", "fedavg", "fedgauss", "fed-dropout", "moon")),
    *("ditto/auto/1", "pfedme/auto/1", "feddyn/auto/1", "fedbn/auto/1", "fedat/auto/1"),
    *("fedgauss/loopback", "scaffold/loopback", "sageflow/auto/1", "fedcof/loop/1"),
    *(
        f"variant/{each}"
        for each in (
            *("padding-fill", "k-auto", "pool-size", "central-dp-fedavg", "local-dp-fedgauss"),
            *("secure-fedavg", "compress-topk-fedavg", "compress-int8-mp-fedcl", "clip-mp-fedcl"),
            *("rule-krum", "rule-geometric-median", "bounds-mp-fedcl", "fraction-mp-fedcl"),
            *("systems-tiers", "partition-quantity", "vectors-feature", "table-mp-fedcl"),
        )
    ),
    *("network/secure-fedavg", "network/local-dp-fedncm", "resumed/mp-fedcl"),
)
"""What `make test` runs."""


def all_cases() -> list[Case]:
    return [*_crossed(), *_variants()]


def _crossed() -> Iterator[Case]:
    """Yield every method with each engine, with one worker and with two, and over a network."""
    for method in METHODS:
        own = dict(OWN.get(method, {}))
        first = f"{method}/loop/1"
        for engine in ("loop", "auto"):
            # Asynchronous methods allow one worker only.
            for workers in (1,) if method in ASYNCHRONOUS else (1, 2):
                name = f"{method}/{engine}/{workers}"
                settings = own | {"engine": engine, "workers": workers}
                yield Case(name, method, settings, like=None if name == first else first)
        if method in ON_NETWORK:
            yield Case(f"{method}/loopback", method, ON_NETWORK[method], "loopback")
        else:
            yield Case(f"{method}/loopback", method, own, "loopback", like=first)


def _variants() -> Iterator[Case]:
    for name, (method, settings) in VARIANTS.items():
        yield Case(f"variant/{name}", method, settings)
    for name, (method, settings, data) in ON_OTHER_DATA.items():
        yield Case(f"variant/{name}", method, settings, data=data)
    for name in OVER_NETWORK:
        method, settings = VARIANTS[name]
        yield Case(f"network/{name}", method, settings, "loopback", like=f"variant/{name}")
    for name, (method, settings) in KILLED.items():
        yield Case(f"resumed/{name}", method, settings | {"rounds": 8}, "resumed")


def choose(pattern: str = "*", *, small: bool = False) -> list[Case]:
    """Return the cases with matching names; `small`: only those of `make test`."""
    found = [case for case in all_cases() if fnmatchcase(case.name, pattern)]
    return [case for case in found if not small or case.name in SMALL]
