"""An asking server: it asks an honest client again, for more, or for something else.

The client has 120 images and the default policy, and runs the unchanged code. The server sends it
messages of its own making: more rounds than the run has, new runs, a large delta, models of its
choice to evaluate, and other settings of the split. Expected: what the policy says, and no more.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from asking_server_messages import LyingServer
from federations import folder_experiment, save_pictures

from mpfedcl.gaussian.mechanism import gaussian_epsilon, gaussian_multiplier
from mpfedcl.network.client import ClientRefusal
from mpfedcl.network.client.policy import ClientPolicy
from mpfedcl.network.transport import Message
from mpfedcl.privacy.accounting import spent_epsilon
from outcome import Outcome

IMAGES = 120
ASKED = 40
BUDGET = ClientPolicy().budget


def attack(*, full: bool) -> list[Outcome]:
    """Ask, and count the answers."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        data = save_pictures(folder / "own", "cat", "dog", count=IMAGES // 2)

        def meet(name: str, method: str, **settings: Any) -> LyingServer:
            return LyingServer(
                folder_experiment(method, rounds=1, **settings), data, folder / name, {}
            )

        local = {"privacy__epsilon": 1.0, "privacy__model": "local"}
        return [
            _ask_again(meet("again", "fedncm", **local)),
            _begin_new_runs(meet("runs", "fedncm", **local)),
            _choose_delta(meet("delta", "fedncm", **local)),
            _count_exactly(meet("counts", "fedavg")),
            _count_exactly_under_budget(meet("budget", "fedncm", **local)),
            _choose_the_split(meet("split", "fedavg")),
        ]


def _answers(ask: Callable[[int], Message], count: int = ASKED) -> list[Message]:
    """Return the answers that are no refusals."""
    found = []
    for number in range(1, count + 1):
        try:
            found.append(ask(number))
        except ClientRefusal:
            continue
    return found


def _ask_again(server: LyingServer) -> Outcome:
    sent = _answers(lambda number: server.ask(number=number, rounds=ASKED))
    means = {each.arrays["summed/sums"].tobytes() for each in sent}
    return Outcome(
        f"{ASKED} rounds of a run with local noise and rounds = 1",
        "1 noisy update",
        f"{len(means)}",
        len(means) == 1,
    )


def _begin_new_runs(server: LyingServer) -> Outcome:
    sent = _answers(lambda number: server.ask(run=f"{number:032x}"))
    noise = gaussian_multiplier(1.0, BUDGET.max_delta)
    epsilon = spent_epsilon({noise: len(sent)}, BUDGET.max_delta)
    return Outcome(
        f"{ASKED} runs with local noise, epsilon 1 each",
        f"at most {BUDGET.max_releases} updates, epsilon {BUDGET.max_epsilon:g} together",
        f"{len(sent)}, epsilon {epsilon:.2f}",
        0 < len(sent) <= BUDGET.max_releases and epsilon <= BUDGET.max_epsilon,
    )


def _choose_delta(server: LyingServer) -> Outcome:
    sent = _answers(lambda number: server.ask(privacy__delta=(0.01, 0.0999)[number - 1]), 2)
    noise = gaussian_multiplier(1.0, 0.0999)
    return Outcome(
        f"delta 0.0999 (epsilon {gaussian_epsilon(noise, 1e-5):.1f} at 1e-5)",
        "refused",
        "refused" if not sent else "accepted",
        not sent,
    )


def _told(messages: list[Message]) -> int:
    """Return the number of answers with a confusion matrix or an accuracy."""
    late = [each.value("late", dict) for each in messages]
    tables = [[*each["table"]["local_test"].values(), each["confusion"]] for each in late]
    return sum(any(value is not None for value in table) for table in tables)


def _count_exactly(server: LyingServer) -> Outcome:
    sent = _answers(lambda number: server.ask("close", 2, read=True, seed=number))
    return Outcome(
        f"{ASKED} models to count confusions of, in a run of one round",
        "2 exact answers (rounds + 1)",
        f"{_told(sent)}",
        _told(sent) == 2,
    )


def _count_exactly_under_budget(server: LyingServer) -> Outcome:
    sent = _answers(lambda number: server.ask("close", 2, read=True, seed=number))
    exact = sum(each.value("late", dict)["confusion"] is not None for each in sent)
    return Outcome(
        f"{ASKED} models to count confusions of, in a run with a budget",
        "no exact answer, 2 noisy ones",
        f"{exact} exact, {_told(sent)} noisy",
        exact == 0 and _told(sent) == 2,
    )


def _choose_the_split(server: LyingServer) -> Outcome:
    """Count the images that are test images under any of five seeds and a fraction of 0.98."""
    trained: list[torch.Tensor] = []
    for changes in ({"seed": n, "dataset__test_fraction": 0.98} for n in range(5)):
        server.hello(**changes)
        assert server.client.loaded is not None
        trained.append(server.client.loaded[1].clients[0].inputs)
    same = all(numpy.array_equal(each, trained[0]) for each in trained)
    tested = IMAGES - len(trained[0])
    return Outcome(
        f"five seeds of the split and test_fraction 0.98, {IMAGES} images",
        "the same test images, about 24",
        f"{'the same' if same else 'others'}, {tested}",
        same and 8 <= tested <= 44,
    )
