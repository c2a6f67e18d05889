"""Make flags from the sections of an experiment.

All classes of settings are treated alike, so a new section needs no change here.
"""

from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro
from pydantic.fields import FieldInfo
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from mpfedcl.experiment import Experiment
from mpfedcl.experiment.method_settings import is_declared
from mpfedcl.experiment.settings import Settings

_METAVARS: dict[Any, str] = {int: "INT", float: "FLOAT", str: "NAME", Path: "PATH"}


def settings_rules(method_sections: Mapping[str, type[Settings]]) -> ConstructorRegistry:
    """Return the registry with which `tyro.cli` parses settings and these sections of methods."""
    rules = ConstructorRegistry()

    @rules.struct_rule
    def settings_flags(info: StructTypeInfo) -> StructConstructorSpec | None:
        """Return the flags of a class of settings, in the order of its fields."""
        if not (isinstance(info.type, type) and issubclass(info.type, Settings)):
            return None
        values = info.default if isinstance(info.default, Settings) else info.type()
        fields = [
            StructFieldSpec(
                name,
                _flag_type(field),
                getattr(values, name),
                # In one line; None lets a section speak for itself.
                " ".join((field.description or "").split()) or None,
            )
            for name, field in info.type.model_fields.items()
        ]
        if not isinstance(values, Experiment):
            return StructConstructorSpec(instantiate=info.type, fields=tuple(fields))
        fields += [
            StructFieldSpec(name, kind, getattr(values, name, kind()), None)
            for name, kind in method_sections.items()
        ]
        unknown = {n: v for n, v in (values.model_extra or {}).items() if n not in method_sections}

        def instantiate(method: str, **given: Any) -> Experiment:
            # The table of a class that is not imported yet has no flags, and is kept as it is.
            kept = {} if is_declared(method) else unknown
            return Experiment(method=method, **given, **kept)

        return StructConstructorSpec(instantiate=instantiate, fields=tuple(fields))

    return rules


def list_flags(command: type[Any], method_sections: Mapping[str, type[Settings]]) -> list[str]:
    """Return the names of a command's flags, without the hyphens before them."""
    found: list[str] = []
    for name, hint in get_type_hints(command, include_extras=True).items():
        kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if isinstance(kind, type) and issubclass(kind, Settings):
            found += _setting_names(kind)
            if issubclass(kind, Experiment):
                for section, own in method_sections.items():
                    found += [f"{section}.{each}" for each in own.model_fields]
        elif tyro.conf.Positional not in get_args(hint):
            found.append(name)
    return [name.replace("_", "-") for name in found]


def _setting_names(kind: type[Settings]) -> list[str]:
    found: list[str] = []
    for name, field in kind.model_fields.items():
        within = field.annotation
        if isinstance(within, type) and issubclass(within, Settings):
            found += [f"{name}.{each}" for each in _setting_names(within)]
        else:
            found.append(name)
    return found


def _flag_type(field: FieldInfo) -> Any:
    """Return the type of a setting, annotated if it may stay open.

    A data set or a method then fills it in and its help says so, hence no "(default: None)".
    """
    if field.default is not None:
        return field.annotation
    kinds = [each for each in get_args(field.annotation) if each is not NoneType]
    metavar = "|".join(_metavar(each) for each in kinds)
    return Annotated[field.annotation, tyro.conf.arg(metavar=metavar, help_behavior_hint="")]


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Annotated:
        return _metavar(get_args(kind)[0])
    if get_origin(kind) is tuple:
        return " ".join(_metavar(each) for each in get_args(kind))
    choices = ",".join(map(str, get_args(kind)))
    return f"{{{choices}}}" if get_origin(kind) is Literal else _METAVARS.get(kind, "VALUE")
