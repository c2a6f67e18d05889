"""A server that lies to clients that run our code: about who is left, and about who there is.

It tells clients different lists of survivors, to collect the shares that open one client's update;
and it invents clients, so that a real one adds less noise.
"""

import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from lying_sums import LyingServer
from mpfedcl.experiment import Experiment
from mpfedcl.methods import find_method
from mpfedcl.methods.messages import Update
from mpfedcl.models import Mlp
from mpfedcl.network.client import ClientRefusal
from mpfedcl.network.client.policy import ClientPolicy
from mpfedcl.network.client.secure_aggregation import SecureAggregation, check_conditions
from mpfedcl.network.setup.folders import ClientFolder, ClientSettings, make_federation
from mpfedcl.network.transport import Message
from mpfedcl.privacy.accounting import spent_epsilon
from mpfedcl.privacy.secure_aggregation import least_left
from mpfedcl.privacy.secure_aggregation.layout import SumLayout, fix_noise
from mpfedcl.privacy.secure_aggregation.protocol import Session, SumClient
from mpfedcl.prototypes import Prototypes
from mpfedcl.rounds.assembly import assemble
from outcome import Outcome

_RUN = "0" * 32
_INVENTED = 49


def attack(*, full: bool) -> list[Outcome]:
    """Try it; for all of 3 to 30 clients where `full`."""
    counts = range(3, 31) if full else (3, 4, 5, 7, 10, 15, 20)
    return [*_lie_about_survivors(counts), *_invent_clients(), _thin_noise()]


def _lie_about_survivors(counts: range | tuple[int, ...]) -> list[Outcome]:
    read, without_signatures, tried = [], [], 0
    for count in counts:
        names = [f"client {number:02}" for number in range(count)]
        # Fewer colluders than would have to sign two lists.
        most = min(2 * least_left(count, 2 / 3) - count - 1, count - 2)
        for colluders in {0, most}:
            tried += 2
            if LyingServer(names, colluders).read_victim() is not None:
                read.append(count)
            if LyingServer(names, colluders, hides=True).read_victim_by_hiding() is not None:
                read.append(count)
        control = LyingServer(names, most, hides=True, signs=False)
        if control.read_victim_by_hiding() is not None:
            without_signatures.append(count)
    return [
        Outcome(
            f"tell clients different lists of survivors, {min(counts)} to {max(counts)} clients, "
            "as many colluding as t > 2n/3 withstands",
            "no update read",
            f"read in {len(read)} of {tried} tries",
            not read,
        ),
        Outcome(
            "the same if clients did not sign the list (control)",
            "read for some numbers of clients",
            f"read for {without_signatures}",
            bool(without_signatures),
        ),
    ]


def _invent_clients() -> list[Outcome]:
    """Show a client a roster of clients that only the server knows."""
    with tempfile.TemporaryDirectory(prefix="mpfedcl-attack-") as place:
        make_federation(Path(place) / "lab", ["ana", "bo", "cy"], None, 9800)
        folder = ClientFolder.open(Path(place) / "lab", "ana")
        settings = ClientSettings(
            "ana", folder.memory, key=folder.key, known_clients=folder.known_clients
        )
        experiment = Experiment(secure_aggregation=True, privacy={"epsilon": 1.0})

        def ask(stage: str, asked: ClientSettings = settings, **values: object) -> Message:
            message = Message({"run": _RUN, "round": 1, "stage": stage, **values})
            return SecureAggregation(asked, experiment, message).answer()

        adverts = {"ana": ask("advertise").values["advert"]}
        session = Session(_RUN, 1, experiment.secure.threshold)
        for number in range(_INVENTED):
            name = f"invented {number}"
            adverts[name] = SumClient(name, session).advertise().to_values()
        invented = _refused(lambda: ask("share", adverts=adverts))
        more = experiment.replace(secure__honest_clients=_INVENTED + 1)
        smaller = _refused(lambda: check_conditions(settings, more))
        policy = ClientPolicy(secure_aggregation={"honest_clients": 3})
        stated = ClientSettings(
            "ana", folder.memory, key=folder.key, known_clients=folder.known_clients, policy=policy
        )
        beyond = _refused(lambda: check_conditions(stated, more))
    rows = [
        (f"show {_INVENTED} invented clients with keys of their own", invented),
        (
            f"ask for a share of the noise of 1/{_INVENTED + 1}; the operator states no number",
            smaller,
        ),
        ("the same; the operator states 3 honest clients", beyond),
    ]
    return [Outcome(words, "refused", seen, seen != "accepted") for words, seen in rows]


def _refused(ask: Callable[[], object]) -> str:
    try:
        ask()
    except ClientRefusal as error:
        return f"refused: {error}"
    return "accepted"


def _thin_noise() -> Outcome:
    """Measure the noise that a client adds next to invented clients."""
    experiment = Experiment(
        method="fedavg",
        rounds=1,
        secure_aggregation=True,
        privacy={"epsilon": 1.0},
        encoder={"name": "none"},
    )
    experiment = fix_noise(experiment.resolved(find_method("fedavg").defaults))
    assembly = assemble(experiment, Mlp((20, 8, 400), 10), num_classes=10, input_size=20)
    layout = SumLayout(assembly)
    update = Update("ana", 7, dict(assembly.initial), Prototypes.empty(400), 0.5)
    opened = layout.total(layout.encode(update, _INVENTED + 1), ["ana"], 0)
    parts = [opened.averaged[n] - value.double() for n, value in assembly.initial.items()]
    sigma = float(torch.cat([part.flatten() for part in parts]).std())
    delta = experiment.privacy.delta
    real = spent_epsilon({sigma: 1}, delta)
    before = spent_epsilon({sigma / math.sqrt(least_left(_INVENTED + 1, 0.5)): 1}, delta)
    return Outcome(
        f"the noise that a client adds in a sum with {_INVENTED} invented clients, epsilon 1",
        "epsilon 1 against that server",
        f"{real:.2f} (divided by all clients it would be {before:.2f})",
        abs(real - 1) < 0.05,
    )
