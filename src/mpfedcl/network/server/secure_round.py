"""A round of secure aggregation over a network: four messages to each client, and one total."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from mpfedcl.methods.messages import Failure, Total
from mpfedcl.network.message import Kind, Message, MessageError
from mpfedcl.network.transport import AnswerLimit
from mpfedcl.privacy.secure_aggregation import ProtocolError
from mpfedcl.privacy.secure_aggregation.client import Revealed
from mpfedcl.privacy.secure_aggregation.roster import Advert, Session, find_odd, read_bytes
from mpfedcl.privacy.secure_aggregation.server import SumServer
from mpfedcl.rounds.sum_layout import SumLayout

LIGHT_SHARE, HEAVY_SHARE = 1 / 6, 1 / 2
"""Of a round's time: for each of the three stages without training, and for the training."""
_SPARE_BYTES = 2**16
_TEXT = 2**22
_PER_CLIENT = 2048
"""Bytes of text that a stage may say of each client: a name and a sealed share."""

_Content = TypeVar("_Content")


class Ask(Protocol):
    """Sends clients messages and yields what is read of their answers, in a share of a round."""

    def __call__(
        self,
        kind: Kind,
        messages: Mapping[str, Message],
        read: Callable[[str, Message], _Content],
        *,
        limit: AnswerLimit,
        share: float,
    ) -> "Iterator[_Content | Failure]":
        """Ask each of the named clients."""


class SecureRound:
    """One round; a client that fails at a stage costs itself alone while enough are left.

    Args:
        ask: How clients are asked.
        session: The sum.
        layout: What clients add.
        common: Values that each message has.
        identities: The keys by which clients have signed before in this run; those of now are
            added.
    """

    def __init__(
        self,
        ask: Ask,
        session: Session,
        layout: SumLayout,
        common: Mapping[str, Any],
        identities: dict[str, bytes],
    ) -> None:
        self.failures: list[Failure] = []
        """Why single clients are not in the total."""
        self._ask, self._session, self._layout = ask, session, layout
        self._identities = identities
        self._common = {**common, "run": session.run, "round": session.round}

    def run(
        self,
        names: Sequence[str],
        heavy: Callable[[str], Message],
        note: Callable[[str, Message], None],
    ) -> Total:
        """Return the total of those who are left; where they are too few it is not opened.

        Args:
            names: The clients that are asked.
            heavy: The message of the round itself to a client; shares are added to it.
            note: Told of each answer to it.
        """
        adverts = {
            name: advert
            for found in self._stage("advertise", names, {}, _read_advert)
            for name, advert in found.items()
        }
        for name, reason in find_odd(self._session, adverts, self._identities).items():
            del adverts[name]
            self.failures.append(Failure(name, reason))
        self._identities.update({name: each.identity for name, each in adverts.items()})
        server = SumServer(self._session, self._layout.size, adverts)
        told = {name: advert.to_values() for name, advert in adverts.items()}
        self._stage(
            "share",
            server.roster.names,
            {"adverts": told},
            lambda name, message: server.take_shares(name, _read_table(message, "sealed")),
        )
        self._add_up(server, heavy, note)
        survivors = server.survivors
        # Who fails now is in the sum all the same.
        before = len(self.failures)
        self._stage(
            "reveal",
            survivors,
            {"survivors": survivors},
            lambda name, message: server.take_revealed(
                name, Revealed(_read_table(message, "seeds"), _read_table(message, "keys"))
            ),
        )
        del self.failures[before:]
        taken_part = len(server.roster.names)
        return self._layout.total(server.open(), survivors, taken_part, server.bytes_up)

    def _add_up(
        self,
        server: SumServer,
        heavy: Callable[[str], Message],
        note: Callable[[str, Message], None],
    ) -> None:
        """Let clients train, and add up what they send."""

        def take(name: str, message: Message) -> None:
            if "masked" not in message.arrays:
                raise MessageError("its masked numbers are missing")
            server.take_masked(name, message.arrays["masked"])
            note(name, message)

        messages = {}
        for name in server.sharers:
            begun = heavy(name)
            sealed = {other: each.hex() for other, each in server.shares_for(name).items()}
            messages[name] = Message({**begun.values, "sealed": sealed}, begun.arrays)
        size = 8 * self._layout.size + _SPARE_BYTES
        limit = AnswerLimit(num_arrays=1, array_bytes=size, text_bytes=_TEXT)
        self._gather("round", messages, take, limit, HEAVY_SHARE)

    def _stage(
        self,
        stage: str,
        names: Sequence[str],
        values: Mapping[str, Any],
        read: Callable[[str, Message], _Content],
    ) -> list[_Content]:
        message = Message({**self._common, "stage": stage, **values})
        text = _SPARE_BYTES + _PER_CLIENT * len(names)
        limit = AnswerLimit(num_arrays=0, array_bytes=_SPARE_BYTES, text_bytes=text)
        return self._gather("secure", dict.fromkeys(names, message), read, limit, LIGHT_SHARE)

    def _gather(
        self,
        kind: Kind,
        messages: Mapping[str, Message],
        read: Callable[[str, Message], _Content],
        limit: AnswerLimit,
        share: float,
    ) -> list[_Content]:
        """Ask clients, note failures, and return the rest."""

        def refuse(name: str, message: Message) -> _Content:
            try:
                return read(name, message)
            except ProtocolError as error:
                raise MessageError(str(error)) from None

        found = []
        for each in self._ask(kind, messages, refuse, limit=limit, share=share):
            if isinstance(each, Failure):
                self.failures.append(each)
            else:
                found.append(each)
        return found


def _read_advert(name: str, message: Message) -> dict[str, Advert]:
    return {name: Advert.from_values(message.value("advert", dict))}


def _read_table(message: Message, name: str) -> dict[str, bytes]:
    return {str(key): read_bytes(each, name) for key, each in message.value(name, dict).items()}
