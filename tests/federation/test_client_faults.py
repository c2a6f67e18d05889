"""One long run, and what happens to its clients: every fault is named, and nothing waits for ever.

The tests of this file share a run and follow each other; each begins and ends with all well.
"""

import os
import re
import signal
import time

import pytest

from laboratory import CLIENT_APP, LONG, RESIDENT, SUPERNODE, Course, Laboratory, Notebook, until

pytestmark = pytest.mark.federation

ROUND_TIMEOUT = 20
TIMES = ["--network.round-timeout", ROUND_TIMEOUT, "--network.patience", 30, "--method", "fedavg"]


@pytest.fixture(scope="module")
def course(laboratory: Laboratory) -> Course:
    """A run of fedavg that would go on for hours."""
    course = laboratory.begin("faults", "--rounds", 10_000, *TIMES)
    course.until_round(1)
    return course


def test_a_killed_process_of_data_is_started_again(
    laboratory: Laboratory, course: Course, notebook: Notebook
) -> None:
    before, resident = course.round, laboratory.one(RESIDENT, "client-1")
    laboratory.until_asked("client-1")
    began = time.monotonic()
    os.kill(resident, signal.SIGKILL)
    until(
        lambda: [each for each in laboratory.find(RESIDENT, "client-1") if each != resident],
        "a new process of data",
    )
    record = course.until_answer("client-1", before)
    seconds = time.monotonic() - began
    is_missing = record["round"] > before + 1
    what = "its answer of one round" if is_missing else "nothing"
    notebook.write("the process with a client's data killed", "started again", seconds, what)


def test_a_client_that_hangs_is_missing_and_comes_back(
    laboratory: Laboratory, course: Course, notebook: Notebook
) -> None:
    laboratory.until_asked("client-0")
    before, resident = course.round, laboratory.one(RESIDENT, "client-0")
    began = time.monotonic()
    os.kill(resident, signal.SIGSTOP)
    try:
        record = course.until_record(
            lambda each: "client-0" not in each["clients"]["answered"], "it hangs", before
        )
    finally:
        os.kill(resident, signal.SIGCONT)
    # The server's time is up first, or the client says itself that its process does not answer.
    said = str({**record["remarks"].get("missing", {}), **record["clients"]["rejected"]})
    assert f"within {ROUND_TIMEOUT} s" in said
    assert {"client-1", "client-2"} <= set(record["clients"]["answered"])
    assert record["seconds"]["train"] < ROUND_TIMEOUT + 5
    course.until_answer("client-0", record["round"])
    seconds = time.monotonic() - began
    notebook.write(
        "a client hangs (SIGSTOP) until its round is over",
        f"missing after `network.round_timeout` ({ROUND_TIMEOUT} s)",
        seconds,
        "its answers while it hung",
    )


def test_killed_clients_are_missing_and_come_back_by_themselves(
    laboratory: Laboratory, course: Course, notebook: Notebook
) -> None:
    # Both at once: Flower takes a minute to notice either.
    victims = {
        "client-2": laboratory.fresh(CLIENT_APP, "client-2"),
        "client-0": laboratory.one(SUPERNODE, "client-0"),
    }
    began, killed_in = {}, {}
    back: dict[str, float] = {}
    for name, process in victims.items():
        killed_in[name] = laboratory.status()["round"]
        began[name] = time.monotonic()
        os.kill(process, signal.SIGKILL)
    for name, number in killed_in.items():
        record = course.until_missing(name, number - 1)
        assert record["remarks"]["missing"][name]
        assert "client-1" in record["clients"]["answered"]
        killed_in[name] = record["round"]
    while len(back) < len(victims):
        assert time.monotonic() - began["client-0"] < LONG
        for record in course.records():
            for name in set(record["clients"]["answered"]) & victims.keys() - back.keys():
                if record["round"] > killed_in[name]:
                    back[name] = time.monotonic() - began[name]
        time.sleep(0.2)
    notebook.write(
        "a SuperNode killed in mid-round",
        "missing; restarted by its command, refused while the server believes it alive",
        back["client-0"],
        "its answers in between",
    )
    notebook.write(
        "Flower's process for a message killed",
        "missing until its SuperNode notices",
        back["client-2"],
        "its answers in between",
    )
    keeper = laboratory.clients["client-0"]
    assert keeper.process.poll() is None
    assert "its Flower process was killed (signal 9) and is started again" in keeper.said()


def test_a_client_that_is_added_takes_part(
    laboratory: Laboratory, course: Course, notebook: Notebook
) -> None:
    before = course.round
    began = time.monotonic()
    laboratory.make("--names", "late")
    assert laboratory.server is not None
    laboratory.until_said(laboratory.server, "New clients: late")
    laboratory.start_client("late", "--share", 0)
    joined = course.until_answer("late", before)
    assert joined["round"] > 2
    notebook.write(
        "a client is made and joins a run under way", "takes part", time.monotonic() - began, "-"
    )
    late = laboratory.clients.pop("late")
    late.interrupt()
    assert late.wait(LONG) == 0
    assert "late has left" in late.said()
    # One that leaves in good order is not waited for.
    course.until_record(
        lambda each: each["remarks"].get("missing") == {"late": "not connected"},
        "it is known to have left",
        joined["round"],
    )


def test_interrupted_once_it_stops_after_the_round(laboratory: Laboratory, course: Course) -> None:
    laboratory.until_asked("client-0")
    before = laboratory.status()["round"]
    course.program.interrupt()
    assert course.program.wait(LONG) == 130
    said = re.search(r"Stopped after round (\d+) of 10000", course.program.said())
    assert said is not None
    number = int(said[1])
    # The round may have ended just before.
    assert before <= number <= before + 1
    # Clients read a round with the message of the next.
    assert course.round == number - 1
    again = laboratory.resume(course, "--rounds", number + 1)
    assert again.program.wait(LONG) == 0, again.program.said()
    assert again.round == number + 1
    assert (course.path / "summary.json").is_file()
