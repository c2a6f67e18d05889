"""The report in a real browser: no errors, no requests, by keyboard, dark, small, printed.

Screenshots are left in screenshots/. Without a browser or playwright these tests are
skipped; `make test-browser` installs both.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser_pages import MARKS, SCREENSHOTS, Page, block, shoot
from handwritten_runs import HOSTILE, write_run, write_tuning
from mpfedcl import Experiment, run
from mpfedcl.api import run_or_resume
from mpfedcl.report.document import build_document
from mpfedcl.report.export import write_comparison
from mpfedcl.report.html import render_page
from mpfedcl.report.result_folders import find_result_folders
from mpfedcl.studies.comparison import Comparison
from mpfedcl.studies.jobs import JobOptions
from small_experiments import small

pytestmark = MARKS


@pytest.fixture(scope="module")
def pages(images: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of each kind, by name."""
    root = tmp_path_factory.mktemp("reports")
    run(small(images, rounds=6, partition__alpha=0.3), root / "run")
    base = small(images, rounds=4, partition__alpha=0.3)
    comparison = Comparison.prepare(base, ("mp-fedcl", "fedavg", "local"), (0, 1), root / "both")
    assert comparison.run(JobOptions(run_or_resume))
    write_comparison(comparison)
    for method in ("mp-fedcl", "fedavg"):
        write_tuning(root / "tuning" / method, method)
    write_run(root / "hostile", clients=HOSTILE, classes=HOSTILE, rejected={HOSTILE[0]: HOSTILE[1]})
    clients = [f"client-{number:03}" for number in range(200)]
    write_run(root / "many", clients=clients, classes=[f"c{n}" for n in range(10)], rounds=300)
    folders = {
        "run": ["run"],
        "comparison": ["both"],
        "tuning": ["tuning"],
        "hostile": ["hostile"],
        "many": ["many"],
        "together": ["run", "both"],
    }
    found = {}
    for name, given in folders.items():
        found[name] = root / f"{name}.html"
        text = render_page(build_document(find_result_folders([root / each for each in given])))
        found[name].write_text(text)
    return found


@pytest.fixture
def opened(browser: Any, pages: dict[str, Path]) -> Iterator[Any]:
    """Opens a report; afterwards nothing may have gone wrong in it."""
    contexts, troubles = [], []

    def open_page(name: str, *, width: int = 1200, **options: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("dialog", lambda dialog: troubles.append(dialog.message))
        page.on("request", lambda request: _note_request(troubles, request.url))
        page.goto(pages[name].as_uri())
        page.wait_for_selector("html[data-ready]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert troubles == []


def _note_request(troubles: list[str], address: str) -> None:
    if not address.startswith("file:"):
        troubles.append(address)


KINDS = ["run", "comparison", "tuning", "hostile", "many", "together"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_opens(opened: Any, kind: str) -> None:
    page = opened(kind)
    assert page.locator("h2").count() >= 1
    assert page.locator("figure img").count() >= 1
    for drawing in page.locator("figure img").all():
        assert drawing.get_attribute("alt")
    words = page.locator("body").inner_text()
    assert not any(each in words for each in ("[object", "undefined", "NaN", "null"))
    shoot(page, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_dark_mode_is_dark(opened: Any, kind: str) -> None:
    page = opened(kind, color_scheme="dark")
    red = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
    assert int(red) < 60
    shoot(page, f"{kind}-dark")


@pytest.mark.parametrize("kind", KINDS)
def test_a_phone_does_not_scroll_sideways(opened: Any, kind: str) -> None:
    page = opened(kind, width=360)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    shoot(page, f"{kind}-phone")


@pytest.mark.parametrize("kind", ["run", "comparison", "many"])
def test_print_has_figures_and_no_controls(opened: Any, kind: str) -> None:
    page = opened(kind, width=800, color_scheme="dark")
    page.emulate_media(media="print")
    assert not any(each.is_visible() for each in page.locator("button").all())
    assert page.locator("figure img").first.is_visible()
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == "rgb(255, 255, 255)"
    shoot(page, f"{kind}-print")
    assert page.pdf(path=SCREENSHOTS / f"{kind}.pdf")


def test_figures_keep_to_their_boxes(opened: Any) -> None:
    page = opened("comparison")
    for name in ("Accuracy per round", "Difference in accuracy"):
        found = block(page, name)
        inner, outer = found.locator("img").first.bounding_box(), found.bounding_box()
        assert inner["width"] > 300
        assert inner["x"] + inner["width"] <= outer["x"] + outer["width"]


def test_details_open_by_key_and_show_figures(opened: Any) -> None:
    page = opened("comparison")
    rounds = block(page, "Accuracy per round")
    loss = rounds.locator("details", has_text="Training loss")
    assert not loss.locator("img").is_visible()
    loss.locator("summary").focus()
    page.keyboard.press("Enter")
    loss.locator("img").wait_for()
    # Rounds and megabytes: these runs have no virtual clock.
    assert rounds.locator("summary").all_inner_texts() == ["Training loss", "By megabytes sent"]


def test_each_method_has_a_run_in_detail(opened: Any) -> None:
    page = opened("comparison")
    summaries = page.locator(".runs-in-detail > details > summary")
    assert summaries.all_inner_texts() == ["mp-fedcl, seed 0", "fedavg, seed 0", "local, seed 0"]
    summaries.nth(1).click()
    detail = page.locator(".runs-in-detail > details").nth(1)
    assert "fedavg-seed0/experiment.toml" in detail.locator("code").first.inner_text()
    assert "fedavg shares no prototypes" in detail.inner_text()
    assert detail.locator("figure img").count() == 2


def test_tables_are_sorted_by_click_and_key(opened: Any) -> None:
    page = opened("comparison")
    table = page.locator("table.sortable").first
    head = table.locator("thead th").nth(1)

    def numbers() -> list[float]:
        texts = table.locator("tbody tr td:nth-child(2)").all_inner_texts()
        return [float(re.sub(r"[▲≈]|\(.*", "", text)) for text in texts]

    head.click()
    assert head.get_attribute("aria-sort") == "descending"
    assert numbers() == sorted(numbers(), reverse=True)
    head.focus()
    page.keyboard.press("Enter")
    assert numbers() == sorted(numbers())


def test_the_confusion_matrix_stands_beside_the_mistakes(opened: Any) -> None:
    found = block(opened("run"), "Confusion matrix")
    assert "No sample was predicted as another class." in found.inner_text()


def test_focus_goes_through_the_page_and_is_seen(opened: Any) -> None:
    page = opened("run")
    seen = set()
    for _ in range(25):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.tagName.toLowerCase()"))
        width = page.evaluate("parseFloat(getComputedStyle(document.activeElement).outlineWidth)")
        assert width >= 1
    assert {"a", "summary", "button"} <= seen


def test_commands_can_be_copied(opened: Any) -> None:
    page = opened("run", permissions=["clipboard-read", "clipboard-write"])
    found = block(page, "Reproduce")
    found.get_by_role("button", name="Copy").first.click()
    # A locator waits; a function as text would be evaluated, which the page forbids.
    page.locator(".said", has_text=re.compile(".")).first.wait_for(state="attached")
    assert found.locator("code").first.inner_text().startswith("mpfedcl run")


def test_a_search_is_shown_whole(opened: Any) -> None:
    page = opened("tuning")
    found = block(page, "mp-fedcl: trials")
    assert found.locator(".results tbody tr").count() == 5
    assert "chosen" in found.locator(".results tr", has=page.locator(".strong")).inner_text()


def test_hostile_names_do_nothing(opened: Any) -> None:
    page = opened("hostile")
    for summary in page.locator("summary").all():
        summary.click()
    assert "taken" not in page.title()
    assert page.locator("iframe").count() == 0
    assert page.locator("main script").count() == 0
    # As text they are there.
    assert HOSTILE[1] in block(page, "Rejected and missing clients").inner_text()


def test_the_embedded_data(opened: Any, pages: dict[str, Path]) -> None:
    """A first run with the embedded data set."""
    path = pages["run"].parent / "digits"
    run(Experiment(rounds=3, evaluate_every=1), path)
    pages["digits"] = path / "report.html"
    pages["digits"].write_text(render_page(build_document(find_result_folders([path]))))
    page = opened("digits")
    assert block(page, "Prototype map").locator("img").count() == 1
    shoot(page, "digits")
    shoot(opened("digits", width=360), "digits-phone")
