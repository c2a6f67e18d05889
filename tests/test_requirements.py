"""What is installed: the lock agrees with the pins and the bounds, and nothing comes unchecked."""

import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]


def entries(name: str) -> dict[str, tuple[str, list[str]]]:
    """Version and hashes of each package of a lock."""
    found: dict[str, tuple[str, list[str]]] = {}
    text = re.sub(r"^#.*\n", "", (ROOT / name).read_text(), flags=re.MULTILINE)
    for entry in re.split(r"\n(?=\S)", text.strip()):
        package, version = entry.split()[0].split("==")
        found[canonicalize_name(package)] = (version, re.findall(r"--hash=(\S+)", entry))
    return found


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().split()
    return {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines}


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-torch.lock"])
def test_every_package_of_a_lock_has_hashes_and_no_lock_names_an_address(name: str) -> None:
    for package, (_, hashes) in entries(name).items():
        assert hashes, package
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in hashes), package
    assert not re.search(r"://|--(extra-)?index|--find-links|@ ", (ROOT / name).read_text())


def test_the_lock_has_the_tested_versions() -> None:
    pinned = pins()
    locked = {name: version for name, (version, _) in entries("requirements.lock").items()}
    assert {n: v for n, v in locked.items() if n in pinned} == {
        n: v for n, v in pinned.items() if n in locked
    }
    # Only tests in a browser need the one; the other needs torchvision, which must fit torch.
    assert pinned.keys() - locked.keys() == {"playwright", "timm"}
    assert entries("requirements-torch.lock")["torch"][0] == locked["torch"]


def test_tested_versions_are_within_the_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    pinned = pins()
    for each in map(Requirement, chain.from_iterable(groups)):
        if each.name != "mpfedcl":
            assert Version(pinned[canonicalize_name(each.name)]) in each.specifier, each


def test_bounds_leave_out_weights_that_run_code() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = {r.name: r.specifier for r in map(Requirement, project["dependencies"])}
    assert Version("2.9.1") not in bounds["torch"]
    assert Version("12.2.0") not in bounds["pillow"]
