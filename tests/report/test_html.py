"""The page is one file that requests nothing, stays small, and shows names as text."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handwritten_runs import HOSTILE, write_run
from mpfedcl.report.document import build_document
from mpfedcl.report.html import render_page, tag
from mpfedcl.report.result_folders import find_result_folders
from parsed_html import Page

pytestmark = pytest.mark.whole

MEGABYTE = 1_000_000


def page_of(*folders: Path) -> str:
    return render_page(build_document(find_result_folders(folders)))


@pytest.fixture(scope="module")
def page_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the page of one run."""
    return page_of(write_run(tmp_path_factory.mktemp("page") / "run"))


def test_the_page_asks_for_nothing(page_text: str) -> None:
    page = Page(page_text)
    assert [tag for tag, _ in page.tags if tag in ("link", "iframe", "base")] == []
    links = [attributes.get("href") or attributes.get("src") for _, attributes in page.tags]
    assert [
        link for link in links if link and not link.startswith(("#", "data:image/svg+xml;"))
    ] == []
    assert not re.search(r"@import|url\((?!#)|fetch\(|XMLHttpRequest|import\(", page_text)
    (policy,) = [each["content"] for tag, each in page.tags if "http-equiv" in each]
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_there_are_no_addresses(page_text: str) -> None:
    assert not re.findall(r"https?://[^\s\"']+", page_text)


def test_nothing_needs_an_inline_style(page_text: str) -> None:
    """The policy of the page forbids inline styles; it does not apply inside images."""
    page = Page(page_text)
    assert not [each for _, each in page.tags if "style" in each]
    assert [tag for tag, _ in page.tags].count("style") == 1


def test_figures_are_described(page_text: str) -> None:
    drawings = [each for tag, each in Page(page_text).tags if tag == "img"]
    assert len(drawings) >= 5
    assert all(each["alt"] for each in drawings)


@pytest.mark.whole
def test_identifiers_are_used_once(tmp_path: Path) -> None:
    text = page_of(write_run(tmp_path / "one"), write_run(tmp_path / "two", seed=1))
    known = [each["id"] for _, each in Page(text).tags if "id" in each]
    assert len(known) == len(set(known))


@pytest.mark.whole
def test_hostile_names_add_no_tags(tmp_path: Path) -> None:
    plain = Page(
        page_of(write_run(tmp_path / "plain", clients=["a", "b", "c", "d"], classes="abcd"))
    )
    hostile = Page(page_of(write_run(tmp_path / "<b>", clients=HOSTILE, classes=HOSTILE)))
    assert {tag for tag, _ in hostile.tags} == {tag for tag, _ in plain.tags}
    for name in ("script", "style", "table", "h3", "img", "code"):
        counts = [[tag for tag, _ in page.tags].count(name) for page in (plain, hostile)]
        assert counts[0] == counts[1], name


@given(st.text(), st.text())
def test_text_stays_text(text: str, value: str) -> None:
    page = Page(tag("p", text, title=value))
    assert [(name, list(attributes)) for name, attributes in page.tags] == [("p", ["title"])]


def test_a_title_cannot_end_its_element(tmp_path: Path) -> None:
    document = build_document(find_result_folders([write_run(tmp_path / "run")]))
    hostile = document | {"title": "</title><script>1</script>@@STYLE@@"}
    page = Page(render_page(hostile))
    assert [tag for tag, _ in page.tags].count("script") == 1


@pytest.mark.thorough
@pytest.mark.whole
def test_many_clients_and_rounds_stay_small(tmp_path: Path) -> None:
    clients = [f"client-{number:03}" for number in range(200)]
    classes = [f"class {number}" for number in range(10)]
    text = page_of(write_run(tmp_path / "run", clients=clients, classes=classes, rounds=1000))
    assert len(text.encode()) < MEGABYTE
    document = build_document(find_result_folders([tmp_path / "run"]))
    curve = document["sections"][0]["groups"][0]["curves"]["accuracy"]["local_test"][
        "personal_prototype"
    ]
    assert len(curve["x"]) == 400
    assert (curve["x"][0], curve["x"][-1]) == (1, 1000)


@pytest.mark.thorough
@pytest.mark.whole
def test_many_classes_stay_small(tmp_path: Path) -> None:
    classes = [f"class {number}" for number in range(345)]
    clients = [f"client-{number}" for number in range(12)]
    text = page_of(write_run(tmp_path / "run", clients=clients, classes=classes))
    assert len(text.encode()) < MEGABYTE


@pytest.mark.thorough
@pytest.mark.parametrize("rounds", [60])
def test_a_comparison_of_21_runs_stays_small(tmp_path: Path, rounds: int) -> None:
    methods = ("local", "fedavg", "fedprox", "fedproto", "sp-fedcl", "dp-fedcl", "mp-fedcl")
    classes = [str(number) for number in range(10)]
    for method in methods:
        for seed in range(3):
            write_run(
                tmp_path / "all" / f"{method}-seed{seed}",
                method=method,
                seed=seed,
                rounds=rounds,
                classes=classes,
            )
    assert len(page_of(tmp_path / "all").encode()) < 1.5 * MEGABYTE
