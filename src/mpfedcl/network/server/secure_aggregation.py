"""A round of secure aggregation over a network: four messages to each client, and one total."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mpfedcl.methods.messages import Failure, Total
from mpfedcl.network.transport import AnswerLimit, Kind, Message, MessageError
from mpfedcl.privacy.secure_aggregation import ProtocolError
from mpfedcl.privacy.secure_aggregation.client import Revealed
from mpfedcl.privacy.secure_aggregation.layout import SumLayout
from mpfedcl.privacy.secure_aggregation.roster import Advert, Session, find_odd, read_bytes
from mpfedcl.privacy.secure_aggregation.server import SumServer

LIGHT_SHARE, HEAVY_SHARE = 1 / 6, 1 / 2
"""Fractions of a round's time: each of the three stages without training, and the training."""
_SPARE_BYTES = 2**16
_TEXT = 2**22
_PER_CLIENT = 2048
"""Bytes of text per client in an answer: a name and a sealed share."""

Exchange = Callable[..., Iterator[Any]]
"""`NetworkEngine._exchange`."""
Read = Callable[[str, Message], Any]


class SecureRound:
    """One round; a client that fails at a stage is left out while enough clients remain.

    Args:
        exchange: Sends messages to clients and yields the content of their answers.
        session: The run, the round and the threshold.
        layout: The values that clients add up.
        common: Values of every message.
        identities: Public keys of the clients seen before in this run; new ones are added.
    """

    def __init__(
        self,
        exchange: Exchange,
        session: Session,
        layout: SumLayout,
        common: Mapping[str, Any],
        identities: dict[str, bytes],
    ) -> None:
        self.failures: list[Failure] = []
        """Reasons why single clients are not in the total."""
        self._exchange, self._session, self._layout = exchange, session, layout
        self._identities = identities
        self._common = {**common, "run": session.run, "round": session.round}

    def run(self, messages: Mapping[str, Message], note: Callable[[str, Message], None]) -> Total:
        """Return the total of the remaining clients; raise `NothingOpened` if they are too few.

        Args:
            messages: The training message for each client; shares are added to it.
            note: Called with each answer to it.
        """
        adverts: dict[str, Advert] = {}
        for found in self._stage("advertise", list(messages), {}, _read_advert):
            adverts |= found
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
        self._train(server, messages, note)
        survivors = server.survivors
        # A client that fails from here on is still in the total.
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

    def _train(
        self,
        server: SumServer,
        messages: Mapping[str, Message],
        note: Callable[[str, Message], None],
    ) -> None:
        """Let clients train, and add up their masked values."""

        def take(name: str, message: Message) -> None:
            if "masked" not in message.arrays:
                raise MessageError("its masked values are missing")
            server.take_masked(name, message.arrays["masked"])
            note(name, message)

        with_shares = {}
        for name in server.sharers:
            sealed = {other: each.hex() for other, each in server.shares_for(name).items()}
            message = messages[name]
            with_shares[name] = Message({**message.values, "sealed": sealed}, message.arrays)
        size = 8 * self._layout.size + _SPARE_BYTES
        limit = AnswerLimit(num_arrays=1, array_bytes=size, text_bytes=_TEXT)
        self._gather("round", with_shares, take, limit, HEAVY_SHARE)

    def _stage(
        self, stage: str, names: Sequence[str], values: Mapping[str, Any], read: Read
    ) -> list[Any]:
        message = Message({**self._common, "stage": stage, **values})
        text = _SPARE_BYTES + _PER_CLIENT * len(names)
        limit = AnswerLimit(num_arrays=0, array_bytes=_SPARE_BYTES, text_bytes=text)
        return self._gather("secure", dict.fromkeys(names, message), read, limit, LIGHT_SHARE)

    def _gather(
        self,
        kind: Kind,
        messages: Mapping[str, Message],
        read: Read,
        limit: AnswerLimit,
        share: float,
    ) -> list[Any]:
        """Ask clients, note failures, and return the content of the other answers."""

        def read_checked(name: str, message: Message) -> Any:
            try:
                return read(name, message)
            except ProtocolError as error:
                raise MessageError(str(error)) from None

        found = []
        for each in self._exchange(kind, messages, read_checked, limit=limit, share=share):
            if isinstance(each, Failure):
                self.failures.append(each)
            else:
                found.append(each)
        return found


def _read_advert(name: str, message: Message) -> dict[str, Advert]:
    return {name: Advert.from_values(message.value("advert", dict))}


def _read_table(message: Message, name: str) -> dict[str, bytes]:
    return {str(key): read_bytes(each, name) for key, each in message.value(name, dict).items()}
