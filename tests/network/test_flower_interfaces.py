"""Undocumented parts of Flower: each is listed, and has the listed shape in this version."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import flwr.app
import pytest
from flwr.superlink.grid import HttpGrid

import mpfedcl
from mpfedcl.core.errors import InvalidInput
from mpfedcl.network.flower import programs
from mpfedcl.network.flower.interfaces import PRIVATE, SUPPORTED, Interface

PACKAGE = Path(mpfedcl.__file__).parent
NAMES = [(each, name) for each in PRIVATE for name in each.shapes]


def find_change(interface: Interface, name: str) -> str | None:
    """Return what is different in the installed version."""
    full, wanted = f"{interface.module}.{name}", interface.shapes[name]
    said = f"Flower {version('flwr')}: {full} "
    use = f". {interface.reason} (mpfedcl.network.flower.interfaces)"
    try:
        found = look_up(interface.module, name)
    except (ImportError, AttributeError):
        return f"{said}is missing{use}"
    if not wanted:
        return None
    kind, _, rest = wanted.partition(" ")
    if kind in ("has", "sets"):
        known = names_set(found) if kind == "sets" else fields_of(found)
        lacking = [each for each in rest.split(", ") if each not in known]
        return f"{said}lacks {', '.join(lacking)}{use}" if lacking else None
    shape = describe(found)
    return None if shape == wanted else f"{said}is {shape}; mpfedcl uses it as {wanted}{use}"


def look_up(module: str, name: str) -> Any:
    path = name.split(".")
    if path[0].endswith("_pb2"):
        module += f".{path.pop(0)}"
    found: Any = importlib.import_module(module)
    for each in path:
        found = getattr(found, each)
    return found


def fields_of(found: Any) -> set[str]:
    message = getattr(found, "DESCRIPTOR", None)
    if message is not None:
        return set(message.fields_by_name)
    return {*dir(found), *dir(type(found)), *getattr(found, "__dataclass_fields__", ())}


def names_set(method: Any) -> set[str]:
    return set(method.__code__.co_names)


def describe(found: Any) -> str:
    if isinstance(found, property):
        return "property"
    if not callable(found):
        return str(getattr(found, "value", found))
    words = []
    for each in inspect.signature(found).parameters.values():
        if each.kind is each.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        sign = "*" * ((each.kind is each.VAR_POSITIONAL) + 2 * (each.kind is each.VAR_KEYWORD))
        words.append(f"{sign}{each.name}{'' if each.default is each.empty else '='}")
    return f"({', '.join(words)})"


@pytest.mark.parametrize(
    ("interface", "name"), NAMES, ids=lambda each: getattr(each, "module", each)
)
def test_undocumented_part_has_the_shape_that_is_used(interface: Interface, name: str) -> None:
    if change := find_change(interface, name):
        pytest.fail(change, pytrace=False)


def test_change_names_version_and_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = next(each for each in PRIVATE if each.module == "flwr.superlink.grid")
    monkeypatch.setattr("test_flower_interfaces.version", lambda _: "1.99.0")

    def push_messages(self: HttpGrid, messages: object, run: object) -> None:
        pass

    monkeypatch.setattr(HttpGrid, "push_messages", push_messages)
    change = find_change(grid, "HttpGrid.push_messages")
    assert change is not None
    assert change.startswith(
        "Flower 1.99.0: flwr.superlink.grid.HttpGrid.push_messages is (self, messages, run); "
        "mpfedcl uses it as (self, messages). The public Grid "
    )
    monkeypatch.delattr(HttpGrid, "_connect")
    assert "HttpGrid._connect is missing. " in str(find_change(grid, "HttpGrid._connect"))
    odd = Interface("flwr.proto", {"node_pb2.Node": "has node_id, color"}, "A test.")
    assert "flwr.proto.node_pb2.Node lacks color. A test." in str(find_change(odd, "node_pb2.Node"))


def imports() -> Iterator[tuple[str, str]]:
    """Yield (module, name) of whatever the package imports from Flower."""
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "flwr" in text else ():
            if isinstance(node, ast.Import):
                assert not [each for each in node.names if each.name.split(".")[0] == "flwr"], path
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flwr":
                assert node.module is not None
                yield from ((node.module, each.name) for each in node.names)


def test_every_undocumented_import_is_listed_and_every_listed_one_is_used() -> None:
    public = {("flwr.app", name) for name in flwr.app.__all__}
    used = set()
    for module, name in set(imports()) - public:
        if module == "flwr.proto":
            used |= {(module, each.split(".")[0]) for _, each in NAMES if each.startswith(name)}
        elif module.startswith("flwr.proto."):
            used.add(("flwr.proto", module.removeprefix("flwr.proto.")))
        else:
            used.add((module, name))
    assert used == {(each.module, name.split(".")[0]) for each, name in NAMES}


def test_every_message_that_is_used_is_listed() -> None:
    listed = {name.split(".")[1] for each, name in NAMES if each.module == "flwr.proto"}
    for path in (PACKAGE / "network" / "flower").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert not node.value.id.endswith("_pb2") or node.attr in listed, (path, node.attr)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flwr.proto."):
                assert {each.name for each in node.names} <= listed


def test_documentation_has_the_same_list() -> None:
    page = (PACKAGE.parents[1] / "docs" / "federation.md").read_text()
    section = page.partition("## What is used of Flower")[2].partition("\n## ")[0]
    for each in PRIVATE:
        assert f"| `{each.module}` | {each.reason} |" in section
    for minor in SUPPORTED:
        assert minor in section


def test_installed_version_is_supported() -> None:
    assert version("flwr").rpartition(".")[0] in SUPPORTED
    programs.require_flower("mpfedcl.network.flower.control")


@pytest.mark.parametrize("found", ["1.40.0", "1.43.0", "2.0.0"])
def test_other_version_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: found)
    with pytest.raises(InvalidInput) as refused:
        programs.require_flower()
    assert str(refused.value) == (
        f"Flower {found} is installed; mpfedcl works with 1.41 and 1.42: "
        "pip install 'mpfedcl[flower]'."
    )
