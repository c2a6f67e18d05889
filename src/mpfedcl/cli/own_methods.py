"""Methods of the user's own that a command names: imported before its arguments are parsed.

Only then are their settings known, which are flags like any others.
"""

import contextlib
import tomllib
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

from mpfedcl.core.plugins import allow_current_folder
from mpfedcl.experiment.method_settings import sections_of
from mpfedcl.experiment.names import is_built_in
from mpfedcl.experiment.settings import Settings


def import_own_methods(words: Sequence[str], *, from_files: bool) -> dict[str, type[Settings]]:
    """Import the classes that the words of a command name; return the sections of settings.

    Without --method a file of settings or the run to resume names it, `from_files`.
    """
    # What follows the one value of --method may be a file.
    said = [*_values_of("--method", words)[:1], *_values_of("--methods", words)]
    tracked = any(":" in name for name in _values_of("--track", words))
    if tracked or not all(map(is_built_in, said)):
        allow_current_folder()
    if not said and from_files:
        said = list(_methods_in_files(words))
    sections = sections_of("")
    for name in said:
        if not is_built_in(name):
            # Only now: it takes torch, which takes seconds to load.
            import_module("mpfedcl.methods").find_method(name)
            sections |= sections_of(name)
    return sections


def _values_of(flag: str, words: Sequence[str]) -> list[str]:
    """Return the values of a flag, `--flag a b` or `--flag=a`, as far as they can be told."""
    values, is_value = [], False
    for word in words:
        if word.startswith("-"):
            is_value = word == flag
            values += [word.removeprefix(f"{flag}=")] if word.startswith(f"{flag}=") else []
        elif is_value:
            values.append(word)
    return values


def _methods_in_files(words: Sequence[str]) -> Iterator[str]:
    """Yield the methods that files of settings among the words name; errors are told later."""
    resumed = [Path(word) / "experiment.toml" for word in _values_of("--resume", words)[:1]]
    for path in [*resumed, *(Path(word) for word in words if word.endswith(".toml"))]:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            method = tomllib.loads(path.read_text(encoding="utf-8")).get("method")
            if isinstance(method, str):
                yield method
