"""The live page in a real browser: what it shows of runs that have ended."""

from typing import Any

import pytest

from browser_pages import MARKS, Open, block, open_run, row, shoot, wait_until
from handwritten_runs import HOSTILE
from watch_server import Server

pytestmark = MARKS


def test_all_runs_are_listed(live: Open) -> None:
    page = live()
    # A run of another test may have just been deleted.
    wait_until(page, "document.querySelectorAll('.runs tbody tr').length === 9")
    assert row(page, "digits").locator(".state").inner_text() == "finished"
    assert "6 of 6" in row(page, "digits").inner_text()
    assert "updates rejected: 1" in row(page, "absent").inner_text()
    assert "is not valid TOML" in row(page, "broken").inner_text()
    words = page.locator("body").inner_text()
    assert not any(each in words for each in ("[object", "undefined", "NaN", "null"))
    shoot(page, "watch")


def test_runs_can_be_found(live: Open) -> None:
    page = live()
    rows = page.locator(".runs tbody tr")
    page.get_by_label("Find").fill("fedavg seed 1")
    wait_until(page, "document.querySelectorAll('.runs tbody tr').length === 1")
    page.get_by_label("Find").fill("damaged")
    page.get_by_role("link", name="broken").wait_for()
    wait_until(page, "document.querySelectorAll('.runs tbody tr').length === 1")
    assert rows.locator("a").all_inner_texts() == ["broken"]
    page.get_by_label("Find").fill("nothing like it")
    page.get_by_text("No run matches.").wait_for()


@pytest.mark.parametrize(
    ("name", "options"),
    [("phone", {"width": 360}), ("dark", {"color_scheme": "dark"}), ("desktop", {})],
)
def test_every_run_opens(live: Open, name: str, options: dict[str, Any]) -> None:
    page = live(**options)
    shoot(page, f"watch-{name}")
    most = page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= most
    for each in ("digits", "absent", "many"):
        open_run(page, each)
        wait_until(page, "document.querySelectorAll('figure img').length > 3")
        assert page.evaluate("document.documentElement.scrollWidth") <= most
        words = page.locator("body").inner_text()
        assert not any(each in words for each in ("[object", "undefined", "NaN", "null"))
        shoot(page, f"watch-{name}-{each}")
        page.go_back()
        page.wait_for_selector(".runs")


def test_who_was_rejected_and_why(live: Open) -> None:
    page = live()
    open_run(page, "absent")
    rejected = block(page, "Rejected and missing clients").inner_text()
    assert "vectors are not finite: layer <b>1</b>" in rejected
    assert "client-7" in rejected


def test_runs_side_by_side(live: Open) -> None:
    page = live()
    page.get_by_label("Find").fill("both")
    wait_until(page, "document.querySelectorAll('.runs tbody tr').length === 4")
    for box in page.locator(".runs input[type=checkbox]").all():
        box.check()
    page.get_by_role("button", name="Compare 4 runs").click()
    rounds = block(page, "Accuracy per round")
    rounds.locator("img").first.wait_for()
    assert "Band: one standard deviation" in rounds.inner_text()
    assert "mean(std) over 2 seeds" in block(page, "Result").inner_text()
    shoot(page, "watch-compare")
    page.go_back()
    page.wait_for_selector(".runs tbody tr")
    assert page.locator(".runs input:checked").count() == 4


def test_hostile_names_do_nothing(live: Open) -> None:
    page = live()
    page.get_by_label("Find").fill("onerror")
    wait_until(page, "document.querySelectorAll('.runs tbody tr').length === 1")
    page.locator(".runs tbody a").click()
    page.wait_for_selector("html[data-round]")
    assert "taken" not in page.title().replace("document.title='taken'", "")
    assert page.locator("iframe").count() == 0
    assert page.locator("main script").count() == 0
    assert HOSTILE[0] in page.locator("body").inner_text()


def test_markup_could_do_nothing_either(browser: Any, live_server: Server) -> None:
    """Were a name to become markup after all, the policy would not let it run or load a thing."""
    page = browser.new_page()
    page.goto(live_server.address)
    page.wait_for_selector("html[data-ready]")
    page.evaluate(
        "document.body.insertAdjacentHTML('beforeend', "
        '\'<p style="color:red">x</p><img src=x onerror="document.title=1">'
        '<iframe srcdoc="<script>parent.document.title=1</script>"></iframe>\')'
    )
    page.evaluate(
        "const s = document.createElement('script'); s.text = 'document.title=1'; "
        "document.body.append(s)"
    )
    page.wait_for_timeout(300)
    assert page.title() == "Runs - mpfedcl watch"
    assert page.evaluate("getComputedStyle(document.body.querySelector('p[style]')).color") != (
        "rgb(255, 0, 0)"
    )
    page.close()


def test_by_keyboard_alone(live: Open) -> None:
    page = live()
    for _ in range(40):
        page.keyboard.press("Tab")
        width = page.evaluate("parseFloat(getComputedStyle(document.activeElement).outlineWidth)")
        assert width >= 1
        if page.evaluate("document.activeElement.textContent") == "digits":
            break
    page.keyboard.press("Enter")
    page.wait_for_selector("html[data-round]")
    assert page.evaluate("document.activeElement.tagName") == "H1"
    assert page.evaluate("document.activeElement.textContent") == "digits"
    for control in page.locator("select, input").all():
        assert control.evaluate("each => each.labels.length > 0 || each.hasAttribute('aria-label')")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector(".runs tbody tr")
    unnamed = "each => !each.labels.length && !each.hasAttribute('aria-label')"
    assert not any(each.evaluate(unnamed) for each in page.locator("input, select").all())
