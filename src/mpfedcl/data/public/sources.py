"""Addresses, sizes and checksums of public files, read from sources.toml."""

import tomllib
from dataclasses import dataclass
from importlib import resources

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment.names import did_you_mean


@dataclass(frozen=True)
class PublicFile:
    """One file as its publisher offers it."""

    name: str
    addresses: tuple[str, ...]
    """Mirrors of the same bytes, the best first."""
    sha256: str
    size: int | None = None
    """None if no size is published."""


@dataclass(frozen=True)
class PublicSource:
    """The originals that belong together, kept in one folder."""

    name: str
    page: str
    """The web page that offers the files."""
    domains: tuple[str, ...]
    """The domains that can be prepared from the files."""
    files: tuple[PublicFile, ...]


@dataclass(frozen=True)
class FetchPlan:
    """The downloads of `data fetch NAME`, and the set prepared from them."""

    set_name: str
    sources: tuple[PublicSource, ...]
    by_hand: str = ""
    """Instructions for files without a stable address; {folder} is their folder."""


def _read_plans() -> dict[str, FetchPlan]:
    document = resources.files("mpfedcl.data.public") / "sources.toml"
    values = tomllib.loads(document.read_text(encoding="utf-8"))
    sources = {}
    for name, source in values["sources"].items():
        files = tuple(
            PublicFile(path.rpartition("/")[2], tuple(m + path for m in source["mirrors"]), **known)
            for path, known in ((each.pop("path"), each) for each in source["files"])
        )
        sources[name] = PublicSource(name, source["page"], tuple(source["domains"]), files)
    return {
        name: FetchPlan(
            plan["set_name"], tuple(sources[n] for n in plan["sources"]), plan.get("by_hand", "")
        )
        for name, plan in values["plans"].items()
    }


FETCH_PLANS = _read_plans()
"""By name; svhn and usps are parts of digit5."""


def fetch_plan(name: str) -> FetchPlan:
    """Return what to download for a name."""
    if name not in FETCH_PLANS:
        raise InvalidInput(
            f"{name!r} cannot be fetched; it must be one of {', '.join(FETCH_PLANS)}"
            f"{did_you_mean(name, FETCH_PLANS)}, and data prepare takes files that you bring."
        )
    return FETCH_PLANS[name]
