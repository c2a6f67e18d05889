"""The report in a real browser: no errors, no requests, every control, by key, dark, small, print.

Pictures of what was seen are left in screenshots/. Without a browser or playwright these tests are
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
from mpfedcl.api import RUNNER
from mpfedcl.report.document import build_document
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
    assert comparison.run(JobOptions(RUNNER))
    comparison.write(comparison.collect())
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
    assert page.locator("svg[role=img]").count() >= 1
    for drawing in page.locator("svg[role=img]").all():
        assert drawing.locator("title").count() == 1
        assert drawing.locator("desc").count() == 1
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
def test_print_has_charts_and_no_controls(opened: Any, kind: str) -> None:
    page = opened(kind, width=800, color_scheme="dark")
    page.emulate_media(media="print")
    assert not any(each.is_visible() for each in page.locator("select, button.copy").all())
    assert all(each.is_visible() for each in page.locator("svg[role=img]").all())
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == "rgb(255, 255, 255)"
    shoot(page, f"{kind}-print")
    assert page.pdf(path=SCREENSHOTS / f"{kind}.pdf")


def test_curves_follow_their_controls(opened: Any) -> None:
    page = opened("comparison")
    rounds = block(page, "Round by round")
    title = rounds.locator("figcaption strong")
    # All clients of this comparison share one test: there is none to choose.
    assert title.inner_text() == "Accuracy per round on the test"
    assert not rounds.get_by_label("Test", exact=True).is_visible()
    lines = rounds.locator(".canvas .line")
    before = lines.nth(0).locator("polyline").get_attribute("points")
    rounds.get_by_label("PredictorName", exact=True).select_option("global_prototype")
    assert lines.count() == 2  # Local has no global model.
    rounds.get_by_label("PredictorName", exact=True).select_option("personal_classifier")
    assert lines.count() == 3
    assert lines.nth(0).locator("polyline").get_attribute("points") != before
    # Rounds and megabytes: these runs have no virtual clock.
    assert rounds.get_by_label("Over", exact=True).locator("option").count() == 2
    rounds.get_by_label("Over", exact=True).select_option("megabytes")
    assert "over megabytes sent" in title.inner_text()
    assert lines.count() == 3
    rounds.get_by_label("Show", exact=True).select_option("loss")
    assert title.inner_text() == "Training loss per round"
    for label in ("Test", "Over"):
        assert not rounds.get_by_label(label, exact=True).is_visible()
    assert lines.count() == 3


def test_lines_can_be_hidden_in_the_legend(opened: Any) -> None:
    page = opened("comparison")
    rounds = block(page, "Round by round")
    key = rounds.locator("button.key").nth(1)
    key.focus()
    page.keyboard.press("Enter")
    assert rounds.locator(".canvas .line").count() == 2
    assert rounds.locator("button.key").nth(1).get_attribute("aria-pressed") == "false"
    page.keyboard.press("Enter")
    assert rounds.locator(".canvas .line").count() == 3


def test_another_run_can_be_chosen(opened: Any) -> None:
    page = opened("comparison")
    chooser = page.get_by_label("Run", exact=True)
    assert chooser.locator("option").count() == 6
    before = block(page, "Run it again", 1).locator("code").nth(0).inner_text()
    chooser.select_option(label="fedavg, seed 1")
    after = block(page, "Run it again", 1).locator("code").nth(0).inner_text()
    assert before != after
    assert "--method fedavg" in after
    assert "fedavg shares no prototypes" in block(page, "Map of the prototypes").inner_text()


def test_confusions_follow_their_controls(opened: Any) -> None:
    page = opened("run")
    found = block(page, "Confusion matrix")
    title = found.locator("figcaption strong")
    assert title.inner_text().startswith("All clients")
    found.get_by_label("Client", exact=True).select_option(label="client-1")
    assert title.inner_text().startswith("Client client-1")
    assert "Percent" in found.locator("figcaption span").inner_text()
    found.get_by_label("Numbers", exact=True).select_option("counts")
    assert "Numbers of test images" in found.locator("figcaption span").inner_text()
    found.locator("summary").click()
    found.locator("td").first.wait_for()
    cells = [int(each) for each in found.locator("td").all_inner_texts()]
    assert sum(cells) == 30


def test_the_map_follows_its_filters(opened: Any) -> None:
    page = opened("run")
    found = block(page, "Map of the prototypes")
    prototypes = found.locator(".canvas circle.prototype")
    samples = found.locator(".canvas path.sample")
    everything = (prototypes.count(), samples.count())
    assert everything[1] > 20
    found.get_by_label("test images", exact=True).uncheck()
    assert (prototypes.count(), samples.count()) == (everything[0], 0)
    found.get_by_label("test images", exact=True).check()
    found.get_by_label("Class", exact=True).select_option(index=1)
    one_class = (prototypes.count(), samples.count())
    assert 0 < one_class[0] < everything[0]
    assert 0 < one_class[1] < everything[1]
    found.get_by_label("Client", exact=True).select_option(index=1)
    assert prototypes.count() <= one_class[0]


def test_arrow_keys_walk_a_chart(opened: Any) -> None:
    page = opened("run")
    drawing = block(page, "Round by round").locator(".canvas svg")
    tip = block(page, "Round by round").locator(".tip")
    drawing.focus()
    page.keyboard.press("Home")
    assert "round 1:" in tip.inner_text()
    page.keyboard.press("ArrowRight")
    assert "round 2:" in tip.inner_text()
    page.keyboard.press("ArrowLeft")
    name = tip.inner_text().splitlines()[0]
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    assert "round 1:" in tip.inner_text()
    assert name
    shoot(page, "run-keyboard")
    page.keyboard.press("Escape")
    assert not tip.is_visible()


def test_matrices_and_bubbles_answer_to_keys_and_pointer(opened: Any) -> None:
    page = opened("run")
    held = block(page, "Who holds what")
    held.locator(".canvas svg").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    assert held.locator(".tip").inner_text().startswith("client-1")
    assert "training images" in held.locator(".tip").inner_text()
    found = block(page, "Confusion matrix")
    found.locator(".heat").first.hover()
    assert "%" in found.locator(".tip").inner_text()


def test_focus_goes_through_the_page_and_is_seen(opened: Any) -> None:
    page = opened("run")
    seen = set()
    for _ in range(25):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.tagName.toLowerCase()"))
        width = page.evaluate("parseFloat(getComputedStyle(document.activeElement).outlineWidth)")
        assert width >= 1
    assert {"a", "select", "svg", "summary"} <= seen


def test_tables_of_numbers_open(opened: Any) -> None:
    page = opened("run")
    for summary in page.locator("figure details.numbers > summary").all():
        summary.click()
    tables = page.locator("figure details.numbers table")
    # A table is made when its details have opened, which a busy browser tells a moment later.
    tables.nth(page.locator("figure").count() - 1).wait_for()
    assert tables.count() == page.locator("figure").count()
    assert all(each.locator("tbody tr").count() for each in tables.all())
    shoot(page, "run-numbers")


def test_commands_can_be_copied(opened: Any) -> None:
    page = opened("run", permissions=["clipboard-read", "clipboard-write"])
    found = block(page, "Run it again")
    found.get_by_role("button", name="Copy").first.click()
    # A locator waits; a function as text would be evaluated, which the page forbids.
    page.locator(".said", has_text=re.compile(".")).first.wait_for(state="attached")
    assert found.locator("code").first.inner_text().startswith("mpfedcl run")


def test_a_search_is_shown_whole(opened: Any) -> None:
    page = opened("tuning")
    found = block(page, "mp-fedcl: what was tried")
    assert found.locator(".results tbody tr").count() == 5
    assert found.locator(".canvas .line").count() == 4
    assert "chosen" in found.locator(".results tr", has=page.locator(".strong")).inner_text()
    drawing = found.locator(".canvas svg")
    drawing.focus()
    page.keyboard.press("Home")
    assert "round 1:" in found.locator(".tip").inner_text()
    assert "mpfedcl tune" in block(page, "Run it again").locator("code").inner_text()


def test_hostile_names_do_nothing(opened: Any) -> None:
    page = opened("hostile")
    assert "taken" not in page.title()
    assert page.locator("img").count() == 0
    assert page.locator("main script").count() == 0
    # As text they are all there.
    options = block(page, "Confusion matrix").get_by_label("Client", exact=True).locator("option")
    # Signs that turn the direction of text are replaced: they would turn the words around too.
    assert options.all_text_contents()[1:] == [n.replace("\u202e", "\ufffd") for n in HOSTILE]
    for drawing in page.locator(".canvas svg").all():
        drawing.hover()
    for summary in page.locator("summary").all():
        summary.click()
    assert page.locator("img").count() == 0


def test_the_embedded_data(opened: Any, pages: dict[str, Path]) -> None:
    """A run as a newcomer has it, for the eye."""
    path = pages["run"].parent / "digits"
    run(Experiment(rounds=3, evaluate_every=1), path)
    pages["digits"] = path / "report.html"
    pages["digits"].write_text(render_page(build_document(find_result_folders([path]))))
    page = opened("digits")
    block(page, "Map of the prototypes").locator(".canvas svg").focus()
    assert block(page, "Map of the prototypes").locator("circle.prototype").count() > 10
    shoot(page, "digits")
    shoot(opened("digits", width=360), "digits-phone")
