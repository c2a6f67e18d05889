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
from mpfedcl.report.wording import PREDICTOR_TITLES

PAGE = Path(__file__).parents[1] / "docs" / "methods.md"
RANKS = PAGE.parent / "results" / "benchmark.json"
MARK = "<!-- From here on: scripts/write_methods.py -->\n"
HEADINGS: dict[Family, str] = {
    "shared model": "One model for all",
    "personal models": "A model for each client",
    "prototypes": "Prototypes",
    "asynchronous": "Asynchronous",
    "one-shot": "One-shot",
    "alone": "Alone",
}


def describe(method: type[Method], ranks: dict[str, Any]) -> str:
    """Return a method's part of the page."""
    lines = [f"### `{method.name}`: {method.summary}", ""]
    lines += [f"{method.paper}. A client sends {method.sends}, and keeps {method.keeps}.", ""]
    lines += [inspect.cleandoc(method.__doc__ or ""), ""]
    if method.interpretation:
        lines += [f"*Our interpretation.* {method.interpretation}", ""]
    lines += [f"Primary predictor: {_name_predictors(method)}.{_name_settings(method)}", ""]
    if found := _tell_ranks(method.name, ranks):
        lines += [f"Rank on the local/global test set ([benchmark](benchmark.md)): {found}.", ""]
    return "\n".join(lines)


def _name_predictors(method: type[Method]) -> str:
    local = method.primary_predictor
    overall = method.primary_predictor_global or local
    if local == overall:
        return PREDICTOR_TITLES[local]
    return f"{PREDICTOR_TITLES[local]} (local test sets), {PREDICTOR_TITLES[overall]} (global)"


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
        if name in tests["local_test"]:
            own, union = (tests[test][name][0] for test in ("local_test", "global_test"))
            told.append(f"{situation} {own}/{union}")
            most = len(tests["local_test"])
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
