"""Links of the Markdown pages: files of this checkout and their headings."""

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[1]
LINK = re.compile(
    r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(<?([^()\s>]+(?:\([^()]*\)[^()\s>]*)?)>?(?:\s+\"[^\"]*\")?\)"
)
DEFINED = re.compile(r"^\[[^\]]+\]:\s+(\S+)", re.MULTILINE)
TAG = re.compile(r"<(?:a|img)\b[^>]*?\b(?:href|src)=\"([^\"]+)\"")
NAMED = re.compile(r"<[^>]*?\b(?:id|name)=\"([^\"]+)\"")
CODE = re.compile(r"^(```+|~~~+).*?^\1|`[^`\n]*`", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)


def pages() -> list[Path]:
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    found = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        # A source distribution has no repository.
        return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return [path for path in map(ROOT.joinpath, found.stdout.splitlines()) if path.exists()]


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of a page as GitHub makes them of its headings."""
    text = re.sub(r"^(```+|~~~+).*?^\1", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: dict[str, int] = {}
    names = set(NAMED.findall(text))
    for heading in HEADING.findall(text):
        shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        plain = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        names.add(f"{plain}-{found[plain]}" if plain in found else plain)
        found[plain] = found.get(plain, 0) + 1
    return frozenset(names)


def links(page: Path) -> Iterator[str]:
    text = CODE.sub("", page.read_text())
    for pattern in (LINK, DEFINED, TAG):
        yield from pattern.findall(text)


def broken_links(page: Path) -> list[str]:
    # Pages in docs include what is in docs/results.
    folder = page.parent.parent if page.parent.name == "results" else page.parent
    broken = []
    for link in links(page):
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        place, _, anchor = unquote(link).partition("#")
        target = (folder / place).resolve() if place else page
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors(target)
        ):
            broken.append(link)
    return broken


def test_relative_links_and_anchors_exist() -> None:
    found = pages()
    assert len(found) > 20
    broken = {str(page.relative_to(ROOT)): broken_links(page) for page in found}
    assert not {page: wrong for page, wrong in broken.items() if wrong}


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("[a](other.md#a-heading-of-100) [b](#here-1) ![c](<other.md>)", []),
        ("[a](other.md#heading)", ["other.md#heading"]),
        (
            '[a](gone.md)\n\n[b]: gone.png\n<img src="gone.svg">',
            ["gone.md", "gone.png", "gone.svg"],
        ),
        ("`[a](gone.md)`\n\n```\n[b](gone.md)\n```\n[c](https://example.org/gone.md)", []),
        ("[a](#here-2)", ["#here-2"]),
    ],
)
def test_broken_link_is_found(tmp_path: Path, text: str, broken: list[str]) -> None:
    (tmp_path / "other.md").write_text("# A heading, of `100`!\n")
    page = tmp_path / "page.md"
    page.write_text(f"# Here\n\n## Here\n\n{text}\n")
    assert broken_links(page) == broken
