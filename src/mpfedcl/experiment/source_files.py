"""The files of methods, partitions, rules and processors, read without running them.

A method or a partition is there because its file is. Importing one imports torch, which takes
seconds, while help and bad input must answer at once: so names come from the file names, and what
a file declares from its syntax tree.
"""

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_NOT_METHODS = ("base", "messages")


@cache
def method_files() -> dict[str, Path]:
    """Return the files of the built-in methods by name, sorted: `mp_fedcl.py` is `mp-fedcl`."""
    return _list_files(_PACKAGE / "methods")


@cache
def partition_files() -> dict[str, Path]:
    """Return the files of the kinds of partition by name, sorted."""
    return _list_files(_PACKAGE / "data" / "partitions")


@cache
def rule_files() -> dict[str, Path]:
    """Return the files of the rules of aggregation by name, sorted."""
    return _list_files(_PACKAGE / "rounds" / "aggregation")


@cache
def processor_files() -> dict[str, Path]:
    """Return the files of the processors of updates by name, sorted."""
    return _list_files(_PACKAGE / "rounds" / "processors")


def describe_files(files: Mapping[str, Path]) -> str:
    """Return each file's name and the first line that it says of itself."""
    docstrings = {name: ast.get_docstring(parse_file(path)) for name, path in files.items()}
    lines = {name: (text or "").partition("\n")[0] for name, text in docstrings.items()}
    return " ".join(f"{name}: {line}" for name, line in lines.items())


@cache
def splits_domains(kind: str) -> bool:
    """Tell whether a partition gives clients whole domains: its function begins with `domains`."""
    functions = [
        each
        for each in parse_file(partition_files()[kind]).body
        if isinstance(each, ast.FunctionDef)
    ]
    return any(
        each.name == "partition" and each.args.args[0].arg == "domains" for each in functions
    )


def parse_file(path: Path) -> ast.Module:
    """Return the syntax tree of a file of the package."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _list_files(folder: Path) -> dict[str, Path]:
    files = [path for path in folder.glob("*.py") if not path.stem.startswith("_")]
    return {
        path.stem.replace("_", "-"): path for path in sorted(files) if path.stem not in _NOT_METHODS
    }
