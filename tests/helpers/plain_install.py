"""A plain `pip install mpfedcl` within an environment that has every extra: the rest is hidden."""

from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_SITE_CUSTOMIZE = """\
import sys
from importlib.machinery import PathFinder

HIDDEN = frozenset({hidden!r})


class PlainFinder(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] in HIDDEN:
            return None
        return super().find_spec(fullname, path, target)


sys.meta_path[:] = [PlainFinder if each is PathFinder else each for each in sys.meta_path]
"""
"""Python imports a module of this name when it starts, so that child processes are plain too."""


def _plain_distributions() -> set[str]:
    """Return the package and all that it requires without extras, as far as it is installed."""
    found: set[tuple[str, str]] = set()
    left = [("mpfedcl", "")]
    while left:
        name, extra = left.pop()
        if (name, extra) in found:
            continue
        try:
            required = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        found.add((name, extra))
        for each in map(Requirement, required):
            if each.marker is None or each.marker.evaluate({"extra": extra}):
                left += [(canonicalize_name(each.name), with_) for with_ in ("", *each.extras)]
    return {name for name, _ in found}


def modules_of_extras() -> list[str]:
    """Return the top-level modules that no distribution of a plain installation has."""
    plain = _plain_distributions()
    return sorted(
        module
        for module, owners in packages_distributions().items()
        if not plain.intersection(map(canonicalize_name, owners))
    )


def hide_extras(folder: Path) -> list[str]:
    """Write what hides these modules from every Python that has the folder on its PYTHONPATH."""
    hidden = modules_of_extras()
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_SITE_CUSTOMIZE.format(hidden=hidden))
    return hidden
