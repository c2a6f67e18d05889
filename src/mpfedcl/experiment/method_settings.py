"""The sections of settings that are declared where they are used.

That is the file of a method, of a rule of aggregation or of a processor of updates.

Importing such a file imports torch, which takes seconds; help and bad input must answer at
once. So the file is parsed, and only the definitions of `Settings` in it are run. A class from
outside the package is imported by whoever may run its code, and its section declared here; where
that has not happened, its section stays a plain table.
"""

import ast
import inspect
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment.close_names import did_you_mean
from mpfedcl.experiment.settings import Settings
from mpfedcl.experiment.source_files import (
    method_files,
    parse_file,
    processor_files,
    rule_files,
)

_NAMES: dict[str, Any] = {
    "Annotated": Annotated,
    "Field": Field,
    "Literal": Literal,
    "Path": Path,
    "Settings": Settings,
}
"""What the definition of settings in such a file may use."""

_declared: dict[str, type[Settings]] = {}
"""The settings of classes from outside, by package.module:Class; `Settings` where it has none."""


def is_built_in(method: str) -> bool:
    """Tell whether a method would be one of this package: finding it runs nobody else's code."""
    return ":" not in method


def refuse_unknown(method: str) -> None:
    """Refuse what names neither a built-in method nor a class."""
    if is_built_in(method) and method not in method_files():
        question = did_you_mean(method, method_files())
        # All forty names would hide the one that was meant.
        named = "those that mpfedcl methods lists" if question else ", ".join(method_files())
        raise InvalidInput(
            f"method is {method!r}; it must be one of {named}, or package.module:Class for your "
            f"own{question}."
        )


@cache
def built_in_sections() -> dict[str, type[Settings]]:
    """Return the sections of the package's own methods, rules and processors by name.

    Several files may declare parts of one section.
    """
    parts: dict[str, list[type[Settings]]] = {}
    for path in chain(*(files().values() for files in (method_files, rule_files, processor_files))):
        for each in parse_file(path).body:
            if isinstance(each, ast.ClassDef) and "Settings" in map(ast.unparse, each.bases):
                kind = _define(each, path)
                parts.setdefault(kind.section, []).append(kind)
    return {name: _join(kinds) for name, kinds in parts.items()}


def declare(method: str, kind: type[Settings]) -> None:
    """Make the settings of a class from outside known to this process."""
    others = {name: theirs for name, theirs in _declared.items() if name != method}
    for name, theirs in others.items():
        if kind.section and theirs.section == kind.section and theirs is not kind:
            raise InvalidInput(
                f"method is {method!r}, whose settings have the section {kind.section!r}; that is "
                f"the section of {name} already, and it must have one of its own."
            )
    _declared[method] = kind


def find_section(name: str) -> type[Settings] | None:
    """Return a method's section by name, where it is known."""
    outside = {kind.section: kind for kind in _declared.values()}
    return built_in_sections().get(name) or outside.get(name)


def sections_of(method: str) -> dict[str, type[Settings]]:
    """Return the sections that every experiment with a method has."""
    own = _declared.get(method, Settings)
    return {**built_in_sections(), **({own.section: own} if own.section else {})}


def is_declared(method: str) -> bool:
    """Tell whether it is known which section a method has."""
    return is_built_in(method) or method in _declared


def read_section(name: str, kind: type[Settings], values: Any) -> Settings:
    """Return a section from a table, or from settings of an equal class."""
    if not isinstance(values, dict | Settings):
        raise InvalidInput(f"{name} is {values!r}; it must be a table of settings.")
    return values if type(values) is kind else kind(**dict(values))


def _join(kinds: list[type[Settings]]) -> type[Settings]:
    """Return one class of settings with what several declare."""
    if len(kinds) == 1:
        return kinds[0]
    first = kinds[0]
    return create_model(first.__name__, __base__=tuple(kinds), __doc__=first.__doc__)


def _define(definition: ast.ClassDef, path: Path) -> type[Settings]:
    """Run the definition of a class of settings, and nothing else of its file."""
    namespace = dict(_NAMES)
    exec(compile(ast.Module([definition], []), str(path), "exec"), namespace)
    kind: type[Settings] = namespace[definition.name]
    # pydantic looks for docstrings in the source of an imported module, which this is not.
    for field, text in pairwise(definition.body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            description = inspect.cleandoc(ast.literal_eval(text.value))
            kind.model_fields[ast.unparse(field.target)].description = description
    return kind
