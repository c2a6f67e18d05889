"""JSON files with a schema: one class describes writing and reading."""

import json
import math
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import FORMAT, check_format, read_bounded

Json = dict[str, Any]
"""Plain values of a JSON object."""


class FileContent(BaseModel):
    """The content of a file, read-only; unknown names are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    def to_json(self) -> Json:
        """Return plain values as stored in the file."""
        return self.model_dump(mode="json")


_MOST_DIGITS = 20
"""Digits of an integer of 64 bits."""


def load_json(content: bytes) -> Any:
    """Return plain values; raise ValueError for numbers that are not finite or exceed 64 bits.

    Python's reader accepts them, but nothing could be computed with them later.
    """
    try:
        return json.loads(
            content, parse_constant=_refuse_number, parse_float=_read_float, parse_int=_read_integer
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse_number(text: str) -> Any:
    raise ValueError(f"it holds {text[:20]}, which is not a number of at most 64 bits")


def _read_float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_number(text)


def _read_integer(text: str) -> int:
    return int(text) if len(text) <= _MOST_DIGITS else _refuse_number(text)


_AnyFile = TypeVar("_AnyFile", bound=FileContent)


def read_json_file(path: Path, schema: type[_AnyFile]) -> _AnyFile:
    """Read a JSON file of a given schema."""
    try:
        content = read_bounded(path)
    except FileNotFoundError:
        raise InvalidInput(f"{path} does not exist; a report needs it.") from None
    return parse_json(content, schema, path)


def parse_json(content: bytes, schema: type[_AnyFile], path: Path) -> _AnyFile:
    """Parse the content of a JSON file; errors name the path."""
    try:
        values = load_json(content)
    except ValueError as error:
        raise InvalidInput(f"{path} is not valid JSON: {error}.") from None
    check_format(values.get("format", FORMAT) if isinstance(values, dict) else FORMAT, path)
    return validate_content(values, schema, str(path))


def validate_content(
    values: Any, schema: type[_AnyFile], what: str, *, strict: bool = False
) -> _AnyFile:
    """Validate values against a schema; errors are one sentence.

    `strict` allows no conversions, such as a number given as text.
    """
    try:
        return schema.model_validate(values, strict=strict)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        place = f"{where} is wrong: " if where else ""
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidInput(f"{what} is not as mpfedcl writes it: {place}{message}.") from None
