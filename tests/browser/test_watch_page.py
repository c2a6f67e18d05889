"""The live page in a real browser, with real runs going on beside it."""

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import MARKS, Page, block, shoot, wait_until

from mpfedcl import Experiment, run
from mpfedcl.comparison import Comparison
from small_runs import command, environment, flags, small
from watched_folder import Server, watched
from written_runs import HOSTILE, write_run

pytestmark = MARKS

LONG = 20_000
"""Milliseconds that a busy machine may take."""
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def server(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A folder with all kinds of runs, watched."""
    root = tmp_path_factory.mktemp("watched") / "runs"
    run(Experiment(rounds=6), root / "digits")
    base = small(images, rounds=4, partition__alpha=0.3)
    comparison = Comparison.prepare(base, ("mp-fedcl", "fedavg"), (0, 1), root / "both")
    assert comparison.run(1, lambda: False, lambda: None)
    write_run(
        root / "absent", rounds=5, rejected={"client-7": "vectors are not finite: layer <b>1</b>"}
    )
    write_run(root / HOSTILE[1].replace("/", ""), clients=HOSTILE, classes=HOSTILE)
    write_run(root / "many", clients=[f"client-{n:03}" for n in range(150)], rounds=80)
    (root / "broken").mkdir()
    (root / "broken" / "experiment.toml").write_text("method = <b>")
    with watched(root) as found:
        yield found


@pytest.fixture
def opened(browser: Any, server: Server) -> Iterator[Open]:
    """Opens the page; afterwards nothing may have gone wrong in it, nor been asked elsewhere."""
    contexts: list[Any] = []
    troubles: list[str] = []

    def open_page(where: Server = server, *, width: int = 1200, **options: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        context.set_default_timeout(LONG)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("dialog", lambda dialog: troubles.append(dialog.message))
        page.on(
            "request",
            lambda each: None if each.url.startswith(where.address) else troubles.append(each.url),
        )
        page.goto(where.address)
        page.wait_for_selector("html[data-ready]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    # A server that has ended is told of by the page itself, too.
    assert [each for each in troubles if "net::ERR_" not in each] == []


@pytest.fixture
def going_on(images: Path, server: Server) -> Iterator["subprocess.Popen[str]"]:
    """A run that goes on while one looks: some 30 rounds a second at most, for minutes."""
    path = server.folder / "going-on"
    process = subprocess.Popen(
        command("run", "--out", path, *flags(images, rounds=5000, partition__alpha=0.3)),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    yield process
    process.send_signal(signal.SIGINT)
    process.wait(60)
    shutil.rmtree(path)


def row(page: Page, name: str) -> Any:
    return page.locator(".runs tbody tr", has=page.get_by_role("link", name=name, exact=True))


def open_run(page: Page, name: str) -> None:
    row(page, name).get_by_role("link").click()
    page.wait_for_selector("html[data-round]")


def shown_round(page: Page) -> int:
    return int(page.evaluate("document.documentElement.dataset.round"))


def wait_for_round(page: Page, number: int) -> None:
    wait_until(page, f"Number(document.documentElement.dataset.round) >= {number}")


def test_all_runs_are_listed(opened: Open) -> None:
    page = opened()
    assert page.locator(".runs tbody tr").count() == 9
    assert row(page, "digits").locator(".state").inner_text() == "finished"
    assert "6 of 6" in row(page, "digits").inner_text()
    assert "1 update rejected" in row(page, "absent").inner_text()
    assert "is not valid TOML" in row(page, "broken").inner_text()
    words = page.locator("body").inner_text()
    assert not any(each in words for each in ("[object", "undefined", "NaN", "null"))
    shoot(page, "watch")


def test_runs_can_be_found(opened: Open) -> None:
    page = opened()
    rows = page.locator(".runs tbody tr")
    page.get_by_label("Find").fill("fedavg seed 1")
    assert rows.count() == 1
    page.get_by_label("Find").fill("")
    page.get_by_label("State").select_option("damaged")
    assert rows.locator("a").all_inner_texts() == ["broken"]
    page.get_by_label("Find").fill("nothing like it")
    assert "No run fits." in page.locator(".runs").inner_text()


@pytest.mark.parametrize(
    ("name", "options"),
    [("phone", {"width": 360}), ("dark", {"color_scheme": "dark"}), ("desktop", {})],
)
def test_every_run_opens(opened: Open, name: str, options: dict[str, Any]) -> None:
    page = opened(**options)
    shoot(page, f"watch-{name}")
    most = page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= most
    for each in ("digits", "absent", "many"):
        open_run(page, each)
        wait_until(page, "document.querySelectorAll('svg[role=img]').length > 3")
        assert page.evaluate("document.documentElement.scrollWidth") <= most
        words = page.locator("body").inner_text()
        assert not any(each in words for each in ("[object", "undefined", "NaN", "null"))
        if each == "digits":
            page.wait_for_selector("circle.prototype")
        shoot(page, f"watch-{name}-{each}")
        page.go_back()
        page.wait_for_selector(".runs")


def test_a_run_that_goes_on(
    opened: Open, going_on: "subprocess.Popen[str]", server: Server
) -> None:
    page = opened()
    # It appears by itself, and grows.
    row(page, "going-on").wait_for()
    wait_until(page, "document.querySelector('.state.running') !== null")
    open_run(page, "going-on")
    wait_for_round(page, 3)
    rounds = block(page, "Round by round")
    chosen = rounds.get_by_label("Show", exact=True)
    chosen.select_option("loss")
    rounds.locator("summary").click()
    chosen.focus()
    hidden = block(page, "Client by client").locator("button.key").first
    hidden.click()
    points = rounds.locator(".canvas polyline").first
    before = points.get_attribute("points")
    seen = shown_round(page)
    wait_for_round(page, seen + 10)
    # Newer rounds leave alone what the reader has set, opened and hidden.
    assert points.get_attribute("points") != before
    assert rounds.locator("figcaption strong").inner_text() == "Training loss per round"
    assert rounds.locator("details").get_attribute("open") is not None
    assert rounds.locator("details tbody tr").count() > seen
    assert hidden.get_attribute("aria-pressed") == "false"
    stands = block(page, "Where it stands").inner_text()
    assert "of 5000" in stands
    assert "of 3 in round" in stands
    shoot(page, "watch-going-on")


def test_the_map_moves_with_its_slider(opened: Open, going_on: "subprocess.Popen[str]") -> None:
    page = opened()
    row(page, "going-on").wait_for()
    open_run(page, "going-on")
    wait_for_round(page, 6)
    found = block(page, "Map of the prototypes")
    slider = found.get_by_role("slider")
    slider.wait_for()
    title = found.locator("figcaption strong")
    first = title.inner_text()
    # At its end it goes on with the run.
    wait_until(
        page,
        "text => ![...document.querySelectorAll('figcaption strong')]"
        ".some(each => each.textContent === text)",
        first,
    )
    slider.focus()
    page.keyboard.press("Home")
    assert title.inner_text().startswith("Round 1:")
    assert slider.get_attribute("aria-valuetext") == "round 1"
    place = found.locator(".canvas circle.prototype").first.get_attribute("cx")
    page.keyboard.press("ArrowRight")
    assert found.locator(".canvas circle.before").count() > 0
    assert not title.inner_text().startswith("Round 1:")
    assert found.locator(".canvas circle.prototype").first.get_attribute("cx") != place
    # Elsewhere it stays, while the run goes on.
    page.keyboard.press("Home")
    wait_for_round(page, shown_round(page) + 10)
    page.wait_for_timeout(1500)
    assert title.inner_text().startswith("Round 1:")
    found.get_by_role("button", name="Play").click()
    wait_until(page, "!document.querySelector('input[type=range] + output').value.endsWith(' 1')")
    found.get_by_role("button", name="Stop").click()
    assert page.evaluate("document.querySelectorAll('circle.prototype').length") > 3


def test_a_finished_map_can_be_walked(opened: Open) -> None:
    page = opened()
    open_run(page, "digits")
    found = block(page, "Map of the prototypes")
    slider = found.get_by_role("slider")
    slider.wait_for()
    assert slider.get_attribute("max") == "5"
    found.get_by_label("Class", exact=True).select_option(index=3)
    few = found.locator(".canvas circle.prototype").count()
    slider.fill("0")
    assert found.locator("figcaption strong").inner_text().startswith("Round 1: ")
    assert found.locator(".plate-text").all_text_contents() == ["2"]
    assert 0 < found.locator(".canvas circle.prototype").count() <= few + 4


def test_runs_vanish_and_come_without_a_reload(opened: Open, server: Server) -> None:
    page = opened()
    path = write_run(server.folder / "late", rounds=3, finished=False)
    row(page, "late").wait_for()
    open_run(page, "late")
    shutil.rmtree(path)
    page.get_by_text("This run is not there any more.").wait_for()
    page.get_by_role("link", name="All runs").click()
    page.wait_for_selector(".runs tbody tr")
    assert row(page, "late").count() == 0


def test_who_was_rejected_and_why(opened: Open) -> None:
    page = opened()
    open_run(page, "absent")
    stands = block(page, "Where it stands")
    assert "was rejected: vectors are not finite: layer <b>1</b>" in stands.inner_text()
    assert "client-7" in block(page, "Rejected and missing clients").inner_text()
    lines = block(page, "Who answered").locator("button.key").all_inner_texts()
    assert lines == ["answered", "rejected", "did not answer"]


def test_runs_side_by_side(opened: Open) -> None:
    page = opened()
    page.get_by_label("Find").fill("both")
    for box in page.locator(".runs input[type=checkbox]").all():
        box.check()
    page.get_by_role("button", name="Compare 4 runs").click()
    rounds = block(page, "Round by round")
    rounds.locator(".canvas .line").first.wait_for()
    assert rounds.locator(".canvas .line").count() == 2
    assert rounds.locator(".canvas .band").count() == 2
    assert "mean(std) over 2 seeds" in block(page, "Result").inner_text()
    shoot(page, "watch-compare")
    page.go_back()
    page.wait_for_selector(".runs tbody tr")
    assert page.locator(".runs input:checked").count() == 4


def test_hostile_names_do_nothing(opened: Open) -> None:
    page = opened()
    page.get_by_label("Find").fill("onerror")
    page.locator(".runs tbody a").click()
    page.wait_for_selector("html[data-round]")
    assert "taken" not in page.title().replace("document.title='taken'", "")
    assert page.locator("img").count() == 0
    assert page.locator("main script").count() == 0
    assert HOSTILE[0] in page.locator("body").inner_text()


def test_markup_could_do_nothing_either(browser: Any, server: Server) -> None:
    """Were a name to become markup after all, the policy would not let it run or load a thing."""
    page = browser.new_page()
    page.goto(server.address)
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


def test_by_keyboard_alone(opened: Open) -> None:
    page = opened()
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


def test_a_server_that_ends_and_comes_back(opened: Open, tmp_path: Path) -> None:
    path = write_run(tmp_path / "runs" / "one", rounds=2, finished=False)
    with watched(tmp_path / "runs") as first:
        page = opened(first)
        open_run(page, "one")
        assert first.interrupt() == 0
    page.get_by_text("Not connected").wait_for()
    last = json.loads((path / "rounds.jsonl").read_text().splitlines()[-1])
    with (path / "rounds.jsonl").open("a") as file:
        file.write(json.dumps(last | {"round": 3}) + "\n")
    with watched(tmp_path / "runs", "--port", first.port):
        wait_for_round(page, 3)
        assert not page.get_by_text("Not connected").is_visible()


def test_two_hundred_runs_open_and_a_round_is_seen_at_once(
    opened: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `benchmarks/watch_page.py` measures, with slack for a busy machine."""
    for number in range(200):
        write_run(tmp_path / f"run-{number:03}", rounds=60)
    path = write_run(tmp_path / "growing", rounds=2, finished=False)
    with watched(tmp_path) as many:
        page = opened(many)
        began = time.perf_counter()
        page.reload()
        wait_until(page, "document.querySelectorAll('.runs tbody tr').length === 201")
        loaded = time.perf_counter() - began
        shoot(page, "watch-200")
        open_run(page, "growing")
        wait_for_round(page, 2)
        last = json.loads((path / "rounds.jsonl").read_text().splitlines()[-1])
        began = time.perf_counter()
        with (path / "rounds.jsonl").open("a") as file:
            file.write(json.dumps(last | {"round": 3}) + "\n")
        wait_for_round(page, 3)
        seen = time.perf_counter() - began
    with capsys.disabled():
        print(f"\n200 runs: page in {loaded:.2f} s; a new round seen after {seen:.2f} s")
    assert loaded < 5
    assert seen < 5
