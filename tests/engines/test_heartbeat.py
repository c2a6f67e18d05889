"""Signs of life: who hangs is taken for lost, who works for long is not."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import pytest
from torch._C._distributed_c10d import HashStore

from mpfedcl.core.errors import LostWorker
from mpfedcl.engines import heartbeat
from mpfedcl.engines.gloo_group import StoreSigns
from mpfedcl.engines.heartbeat import Heartbeat

TIMEOUT = 1.0


@pytest.fixture(autouse=True)
def quick_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_BEAT_SECONDS", 0.05)
    monkeypatch.setattr(heartbeat, "LOOK_SECONDS", 0.05)


@contextmanager
def other_process(signs: StoreSigns, work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Let a thread stand for process 1: it gives signs of life while it does its work."""
    over = threading.Event()

    def live() -> None:
        beating = Heartbeat(signs, 1, (), TIMEOUT)
        work(over)
        beating.close()

    thread = threading.Thread(target=live)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.fixture
def watch() -> Iterator[Heartbeat]:
    beating = Heartbeat(StoreSigns(HashStore()), 0, [1], TIMEOUT)
    yield beating
    beating.close()


def test_who_computes_is_waited_for(watch: Heartbeat) -> None:
    def compute(over: threading.Event) -> None:
        while not over.is_set():
            sum(range(10_000))

    outcome: Future[str] = Future()
    threading.Timer(3 * TIMEOUT, outcome.set_result, ["done"]).start()
    with other_process(watch._signs, compute):  # type: ignore[arg-type]
        assert watch.wait(outcome) == "done"


def test_who_is_stuck_is_lost_though_its_threads_live(watch: Heartbeat) -> None:
    with (
        other_process(watch._signs, lambda over: over.wait() and None),  # type: ignore[arg-type]
        pytest.raises(LostWorker, match=r"process 1 has given no sign of life for 1 s"),
    ):
        watch.wait(Future())


def test_who_was_never_heard_of_is_lost_in_the_set_time(watch: Heartbeat) -> None:
    began = time.monotonic()
    with pytest.raises(LostWorker):
        watch.wait(Future())
    assert time.monotonic() - began > TIMEOUT - 0.1


def test_what_went_wrong_in_an_exchange_is_raised_as_it_is(watch: Heartbeat) -> None:
    for error in (RuntimeError("closed"), TimeoutError("too long")):
        outcome: Future[None] = Future()
        outcome.set_exception(error)
        with pytest.raises(type(error), match=str(error)):
            watch.wait(outcome)


def test_silence_is_counted_anew_after_a_pause_of_ones_own(
    watch: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after Ctrl-Z and fg: every look then takes longer than was asked for."""
    monkeypatch.setattr(heartbeat, "_PAUSE_SECONDS", -1.0)
    outcome: Future[str] = Future()
    threading.Timer(2 * TIMEOUT, outcome.set_result, ["done"]).start()
    assert watch.wait(outcome) == "done"
