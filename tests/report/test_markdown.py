"""Any name stays text in Markdown."""

import re

from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from mpfedcl.core.errors import enumerate_names
from mpfedcl.report.card import code_block, escape_markdown
from mpfedcl.report.wording import printable_name

_READER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
_NASTY = st.text(
    st.sampled_from("\\`*_[]()<>|&~$@:/#!-+=.w \t\n\u202e\ud800aZ9é") | st.characters(),
    max_size=120,
)


@given(_NASTY, _NASTY)
def test_a_cell_shows_the_name_and_nothing_else(name: str, other: str) -> None:
    table = f"| a | b |\n| --- | --- |\n| {escape_markdown(name)} | {escape_markdown(other)} |\n"
    tokens = _READER.parse(table)
    cells = [tokens[i + 1] for i, each in enumerate(tokens) if each.type == "td_open"]
    assert len(cells) == 2
    for cell, meant in zip(cells, (name, other), strict=True):
        kinds = {child.type for child in cell.children or []}
        assert kinds <= {"text", "text_special"}
        shown = "".join(child.content for child in cell.children or [])
        assert shown == (printable_name(meant).strip() or "(no name)")
    # What GitHub would make links of.
    assert not re.search(r"(?i)://|www\.|(?<!\\)@", escape_markdown(name))


@given(_NASTY)
def test_a_fence_ends_where_it_should(text: str) -> None:
    text = text.replace("\ud800", "").replace("\r", "").replace("\0", "")
    tokens = _READER.parse(code_block(text, "sh") + "\nafter\n")
    assert [each.type for each in tokens][:2] == ["fence", "paragraph_open"]
    assert tokens[0].content.split("\n")[:-1] == text.split("\n")


def test_long_lists_and_names_are_cut() -> None:
    assert enumerate_names("abc", 2) == "a, b and 1 more"
    assert enumerate_names("ab", 2) == "a, b"
    assert len(printable_name("x" * 1000)) == 80
