"""Fill docs/reproduction.md from results: python scripts/write_reproduction.py [runs/paper]

With a folder of `mpfedcl paper run`, its results and figures are first copied to docs/results and
docs/images/paper. What stands between the marks `<!-- ID -->` and `<!-- end -->` is written anew;
the words around it are kept.
"""

import json
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

from mpfedcl.report.paper_tables import build_tables, table_notes
from mpfedcl.studies.paper import ITEM_IDS

DOCS = Path(__file__).resolve().parents[1] / "docs"
RESULTS, FIGURES, PAGE = DOCS / "results", DOCS / "images" / "paper", DOCS / "reproduction.md"
_FOLDED = ("rounds", "reach", "alpha", "clients", "k")
"""Items with so many tables that the page keeps them folded."""


def copy_results(folder: Path) -> None:
    """Copy what a run of the paper has left: small JSON and pictures."""
    RESULTS.mkdir(exist_ok=True)
    FIGURES.mkdir(parents=True, exist_ok=True)
    for item in ITEM_IDS:
        place = folder / "tables" / item
        if (place / "result.json").is_file():
            content = json.loads((place / "result.json").read_text(encoding="utf-8"))
            if content["quick"]:
                sys.exit(f"{place} is of a quick run; the page shows whole ones only")
            text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
            # A line per cell, so that a change shows where it is.
            (RESULTS / f"{item}.json").write_text(
                text.replace('{"track"', '\n{"track"') + "\n", encoding="utf-8"
            )
            for picture in place.glob("*.png"):
                shutil.copyfile(picture, FIGURES / picture.name)


def format_item(item: str) -> str:
    """Return an item's part of the page."""
    path = RESULTS / f"{item}.json"
    if not path.is_file():
        return "Not run yet.\n"
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    minutes = result["seconds"] / 60
    parts = [
        f"{result['about']}\n",
        f"    {result['command']}\n",
        *([f"Its runs add up to {minutes:.0f} minutes, some shared.\n"] if minutes > 1 else []),
    ]
    parts += [f"![{result['title']}](images/paper/{p})\n" for p in _pictures(item)]
    tables = [f"**{table.title}**\n\n{table.markdown()}" for table in build_tables(result)]
    if item in _FOLDED:
        tables = ["<details><summary>the numbers</summary>\n", *tables, "</details>\n"]
    parts += tables
    parts += [f"{note}\n" for note in table_notes(result)]
    if result["verdicts"] and item not in _FOLDED:
        parts += ["What the seeds say (differences in points):\n"]
        parts += ["\n".join(f"- {sentence}" for sentence in result["verdicts"]) + "\n"]
    return "\n".join(parts)


def _pictures(item: str) -> list[str]:
    own = {"partitions": ["partitions-label", "partitions-feature"]}.get(item, [item])
    return [f"{name}.png" for name in own if (FIGURES / f"{name}.png").is_file()]


def _replace_part(text: str, found: re.Match[str]) -> str:
    return f"{found[1]}\n{text}\n{found[2]}"


def main() -> None:
    """Copy if asked, then fill the page."""
    if len(sys.argv) > 1:
        copy_results(Path(sys.argv[1]))
    page = PAGE.read_text(encoding="utf-8")
    for item in ITEM_IDS:
        pattern = re.compile(rf"(<!-- {item} -->\n).*?(<!-- end -->)", re.DOTALL)
        # By a function: results may hold backslashes, which a pattern would take for its own.
        page = pattern.sub(partial(_replace_part, format_item(item)), page)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
