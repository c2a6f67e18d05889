"""Flags of settings, made from the sections of an experiment: the only place that joins the two.

Every class of settings is treated alike, so a section that is added needs nothing here.
"""

from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import tyro
from pydantic.fields import FieldInfo
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from mpfedcl.experiment.settings import Settings

_METAVARS: dict[Any, str] = {int: "INT", float: "FLOAT", str: "NAME", Path: "PATH"}

SETTINGS_RULES = ConstructorRegistry()
"""What `tyro.cli` must be told to parse settings."""


@SETTINGS_RULES.struct_rule
def settings_flags(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Return the flags of a class of settings, in the order of its fields."""
    if not (isinstance(info.type, type) and issubclass(info.type, Settings)):
        return None
    values = info.default if isinstance(info.default, Settings) else info.type()
    return StructConstructorSpec(
        instantiate=info.type,
        fields=tuple(
            StructFieldSpec(
                name,
                _flag_type(field),
                getattr(values, name),
                # In one line; None lets a section speak for itself.
                " ".join((field.description or "").split()) or None,
            )
            for name, field in info.type.model_fields.items()
        ),
    )


def _flag_type(field: FieldInfo) -> Any:
    """Return the type of a setting, annotated where it may stay open.

    A data set or a method then fills it in and its help says so, hence no "(default: None)".
    """
    if field.default is not None:
        return field.annotation
    kind = next(each for each in get_args(field.annotation) if each is not NoneType)
    choices = ",".join(map(str, get_args(kind)))
    metavar = f"{{{choices}}}" if get_origin(kind) is Literal else _METAVARS[kind]
    return Annotated[field.annotation, tyro.conf.arg(metavar=metavar, help_behavior_hint="")]
