"""Write the methods into docs/methods.md, below its head, from what they say about themselves.

    python scripts/write_methods.py

Where docs/results/benchmark.json has ranks, they are told with each method.
"""

import inspect
import json
from pathlib import Path
from typing import Any, get_args

from mpfedcl.core.files import write_atomically
from mpfedcl.methods import Family, Method, Settings, built_in_methods
from mpfedcl.report.tables import READING_TITLES

PAGE = Path(__file__).parents[1] / "docs" / "methods.md"
RANKS = PAGE.parent / "results" / "benchmark.json"
MARK = "<!-- From here on: scripts/write_methods.py -->\n"
HEADINGS: dict[Family, str] = {
    "shared model": "One model for all",
    "personal models": "A model for each client",
    "prototypes": "Prototypes",
    "asynchronous": "Without waiting",
    "one exchange": "One exchange, no training",
    "alone": "Alone",
}


def describe(method: type[Method], ranks: dict[str, Any]) -> str:
    """Return a method's part of the page."""
    lines = [f"### `{method.name}`: {method.summary}", ""]
    lines += [f"{method.paper}. A client sends {method.sends}, and keeps {method.keeps}.", ""]
    lines += [inspect.cleandoc(method.__doc__ or ""), ""]
    if method.our_reading:
        lines += [f"*Our interpretation.* {method.our_reading}", ""]
    lines += [f"Judged by: {_name_readings(method)}.{_name_settings(method)}", ""]
    if found := _tell_ranks(method.name, ranks):
        lines += [f"Rank here, own/union test ([benchmark](benchmark.md)): {found}.", ""]
    return "\n".join(lines)


def _name_readings(method: type[Method]) -> str:
    own, union = method.reading, method.union_reading or method.reading
    if own == union:
        return READING_TITLES[own]
    return f"{READING_TITLES[own]} on the own test, {READING_TITLES[union]} on everybody's"


def _name_settings(method: type[Method]) -> str:
    kind = method.settings_class()
    if kind is Settings or not kind.model_fields:
        return ""
    section = kind.section.replace("_", "-")
    told = [
        f"`--{section}.{name.replace('_', '-')}` ({field.default})"
        for name, field in kind.model_fields.items()
    ]
    return f" Settings: {', '.join(told)}."


def _tell_ranks(name: str, ranks: dict[str, Any]) -> str:
    """Return a method's ranks on both tests of each situation; nothing where it was not run."""
    told, most = [], 0
    for situation, tests in ranks.items():
        if name in tests["own"]:
            own, union = (tests[test][name][0] for test in ("own", "union"))
            told.append(f"{situation} {own}/{union}")
            most = len(tests["own"])
    return f"{', '.join(told)}, of {most}" if told else ""


def write_methods() -> str:
    """Return the whole page, its head as it is."""
    head = PAGE.read_text().partition(MARK)[0]
    ranks = json.loads(RANKS.read_text()) if RANKS.exists() else {}
    methods = built_in_methods().values()
    parts = [head + MARK]
    for family in get_args(Family):
        some = [each for each in methods if each.family == family]
        if some:
            parts.append(f"## {HEADINGS[family]}\n")
            parts += [describe(each, ranks) for each in some]
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    write_atomically(PAGE, write_methods().encode())
