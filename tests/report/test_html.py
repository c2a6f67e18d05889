"""The page is one file that asks for nothing, stays small, and keeps names from acting."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handwritten_runs import HOSTILE, write_run
from mpfedcl.report.document import build_document
from mpfedcl.report.html import escape_json, render_page
from mpfedcl.report.result_folders import find_result_folders
from parsed_html import Page, document_in

MEGABYTE = 1_000_000


def page_of(*folders: Path) -> str:
    return render_page(build_document(find_result_folders(folders)))


def test_the_page_asks_for_nothing(tmp_path: Path) -> None:
    page = Page(page_of(write_run(tmp_path / "run")))
    assert [tag for tag, _ in page.tags if tag in ("link", "img", "iframe", "base")] == []
    links = [attributes.get("href") or attributes.get("src") for _, attributes in page.tags]
    assert [link for link in links if link and not link.startswith("#")] == []
    assert not re.search(
        r"@import|url\(|fetch\(|XMLHttpRequest|import\(", page_of(tmp_path / "run")
    )
    (policy,) = [each["content"] for tag, each in page.tags if "http-equiv" in each]
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_the_only_addresses_are_names_of_formats(tmp_path: Path) -> None:
    found = set(re.findall(r"https?://[^\s\"']+", page_of(write_run(tmp_path / "run"))))
    assert found == {"http://www.w3.org/2000/svg"}


def test_the_document_comes_through_whole(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", clients=HOSTILE, classes=HOSTILE)
    document = build_document(find_result_folders([path]))
    assert document_in(render_page(document)) == json.loads(json.dumps(document))
    names = [client["name"] for client in document["runs"][0]["clients"]]
    assert names == list(HOSTILE)


def test_hostile_names_add_no_tags(tmp_path: Path) -> None:
    plain = Page(page_of(write_run(tmp_path / "plain", clients=["a", "b", "c", "d"])))
    hostile = Page(page_of(write_run(tmp_path / "<b>", clients=HOSTILE, classes=HOSTILE)))
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in plain.tags]


@given(st.dictionaries(st.text(), st.text() | st.integers(), max_size=3))
def test_escaped_json_is_the_same_json(value: Any) -> None:
    text = escape_json({"value": value})
    assert not set("<>&") & set(text)
    assert text.isascii()
    assert json.loads(text) == {"value": value}


def test_a_title_cannot_end_its_element(tmp_path: Path) -> None:
    document = build_document(find_result_folders([write_run(tmp_path / "run")]))
    hostile = document | {"title": "</title><script>1</script>@@STYLE@@"}
    page = Page(render_page(hostile))
    assert [tag for tag, _ in page.tags].count("script") == 2


def test_many_clients_and_rounds_stay_small(tmp_path: Path) -> None:
    clients = [f"client-{number:03}" for number in range(200)]
    classes = [f"class {number}" for number in range(10)]
    text = page_of(write_run(tmp_path / "run", clients=clients, classes=classes, rounds=1000))
    assert len(text.encode()) < MEGABYTE
    (group,) = document_in(text)["groups"]
    curve = group["curves"]["accuracy"]["local_test"]["personal_prototype"]
    assert len(curve["x"]) == 400
    assert (curve["x"][0], curve["x"][-1]) == (1, 1000)


def test_many_classes_stay_small(tmp_path: Path) -> None:
    classes = [f"class {number}" for number in range(345)]
    clients = [f"client-{number}" for number in range(12)]
    text = page_of(write_run(tmp_path / "run", clients=clients, classes=classes))
    assert len(text.encode()) < 3 * MEGABYTE


@pytest.mark.parametrize("rounds", [60])
def test_a_comparison_of_21_runs_is_far_below_the_limit(tmp_path: Path, rounds: int) -> None:
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
    assert len(page_of(tmp_path / "all").encode()) < 0.5 * MEGABYTE
