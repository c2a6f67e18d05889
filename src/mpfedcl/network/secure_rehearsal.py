"""A secure sum with callbacks who are not there: what one client would say in each stage."""

from collections.abc import Callable

from mpfedcl.experiment import Experiment
from mpfedcl.network.message import Kind, Message
from mpfedcl.privacy.secure_aggregation.client import SumClient
from mpfedcl.privacy.secure_aggregation.roster import Advert, Roster, Session

_COMPANIONS = ("a callback", "another callback")


def rehearse_secure_sum(
    answer: Callable[[Kind, Message], Message], name: str, experiment: Experiment, begun: Message
) -> dict[Kind, Message]:
    """Let a client answer all four stages; return what it said beside the round, and in it.

    Args:
        answer: The client.
        name: The client's.
        experiment: With secure aggregation.
        begun: The message of the round, without what secure aggregation add to it.
    """
    values = {name: begun.values[name] for name in ("format", "experiment", "run", "round")}
    session = Session(values["run"], values["round"], experiment.secure.threshold)

    def ask(stage: str, **more: object) -> Message:
        return answer("secure", Message({**values, "stage": stage, **more}))

    advertised = ask("advertise")
    others = {each: SumClient(each, session) for each in _COMPANIONS if each != name}
    adverts = {each: client.advertise() for each, client in others.items()}
    adverts[name] = Advert.from_values(advertised.values["advert"])
    shared = ask("share", adverts={each: advert.to_values() for each, advert in adverts.items()})
    roster = Roster(session, adverts)
    sealed = {each: client.share(roster)[name].hex() for each, client in others.items()}
    masked = answer("round", Message({**begun.values, "sealed": sealed}, begun.arrays))
    revealed = ask("reveal", survivors=sorted(adverts))
    said = {**advertised.values, **shared.values, **revealed.values}
    return {"secure": Message(said), "round": masked}
