"""Who belongs to a federation over a network: nodes come, say who they are, go and come back."""

import time
from collections.abc import Mapping

from mpfedcl.errors import InvalidInput, RunCutShort
from mpfedcl.experiment import Experiment
from mpfedcl.network.courier import Answer, Courier
from mpfedcl.network.parcels import Introduction
from mpfedcl.network.status import Status
from mpfedcl.network.wire import Parcel, ParcelError

POLL_SECONDS = 0.2
"""Between two looks at what has come: far below what starting a client's process takes."""


class Roster:
    """The clients that are known, by name, and the nodes at which they were last seen."""

    def __init__(
        self, experiment: Experiment, courier: Courier, status: Status, greeting: Parcel
    ) -> None:
        self.members: dict[str, Introduction] = {}
        self.refused: dict[str, str] = {}
        """Why a client may not take part, by the name it gave or its node's."""
        self._experiment = experiment
        self._courier = courier
        self._status = status
        self._greeting = greeting
        self._nodes: dict[int, str] = {}
        """Clients by node."""
        self._asked: dict[str, int] = {}
        """Nodes that have been asked who they are, by message."""
        self._seen: set[int] = set()

    @property
    def sizes(self) -> dict[str, int]:
        """Training samples by client, in order of name."""
        return {name: self.members[name].num_samples for name in sorted(self.members)}

    def gather(self) -> None:
        """Wait until as many clients as expected have come, at most as long as patience lasts."""
        wanted = self._experiment.clients or self._experiment.min_clients
        self._wait_for(wanted, "waiting for clients")
        if len(self.members) < self._experiment.min_clients:
            raise RunCutShort(self._say_too_few("were there"))

    def look(self) -> dict[str, int]:
        """Return where each known client is now, and greet nodes that are new.

        Too few are waited for as long as patience lasts; then the run is cut short.
        """
        here = self._look_once()
        needed = min(self._experiment.min_clients, len(self.members))
        if len(here) < needed:
            here = self._wait_for(needed, "waiting for clients to come back")
        if len(here) < needed:
            raise RunCutShort(self._say_too_few("are left"))
        return here

    def _wait_for(self, wanted: int, what: str) -> dict[str, int]:
        end = time.monotonic() + self._experiment.network.patience
        here = self._look_once()
        while len(here) < wanted and time.monotonic() < end:
            self._status.say(what, here=sorted(here), wanted=wanted, refused=self.refused)
            self._status.check()
            time.sleep(POLL_SECONDS)
            here = self._look_once()
        return here

    def _look_once(self) -> dict[str, int]:
        present = self._courier.present()
        strangers = [node for node in present if node not in self._seen]
        if strangers:
            sent = self._courier.send(
                "hello",
                dict.fromkeys(strangers, self._greeting),
                self._experiment.network.patience,
            )
            self._asked |= {message: node for node, message in sent.items()}
            self._seen |= set(sent)
        for answer in self._courier.collect(list(self._asked)) if self._asked else []:
            self._admit(answer, present)
        # A node that went away before it said who it is will be asked again if it comes back.
        waiting = set(self._asked.values())
        self._seen &= {*present, *self._nodes, *waiting}
        return {name: node for node, name in self._nodes.items() if node in present}

    def _admit(self, answer: Answer, present: Mapping[int, str]) -> None:
        node = self._asked.pop(answer.message, None)
        if node is None:
            return
        registered = present.get(node, "")
        if answer.parcel is None:
            self.refused[registered or f"node {node}"] = answer.reason
            if answer.trouble == "gone":
                self._seen.discard(node)
            return
        try:
            member = Introduction.unpack(answer.parcel)
        except ParcelError as error:
            self.refused[registered or f"node {node}"] = str(error)
            return
        if reason := self._judge(member, registered, node, present):
            self.refused[registered or member.name] = reason
            return
        self.refused.pop(member.name, None)
        # The same client at a new node: it is where it was last heard of.
        self._nodes = {n: name for n, name in self._nodes.items() if name != member.name}
        self._nodes[node] = member.name
        self.members[member.name] = member

    def _judge(
        self, member: Introduction, registered: str, node: int, present: Mapping[int, str]
    ) -> str | None:
        """Return why a client may not take part, or None."""
        if registered and member.name != registered:
            return f"it calls itself {member.name!r}, but its key is registered as {registered!r}"
        elsewhere = [n for n, name in self._nodes.items() if name == member.name and n != node]
        if any(each in present for each in elsewhere):
            return "another client of that name is connected"
        known = self._experiment.dataset.classes
        if known and not set(member.classes) <= set(known):
            odd = sorted(set(member.classes) - set(known))
            return f"it has the class {odd[0]!r}; the classes are {', '.join(known)}"
        others = [each for name, each in self.members.items() if name != member.name]
        if others and member.input_size != others[0].input_size:
            return (
                f"its inputs have {member.input_size} numbers, the others' {others[0].input_size}: "
                "images must be of one size, or go through the same encoder"
            )
        if others and member.encoder != others[0].encoder:
            return "its encoder is not the others'"
        return None

    def _say_too_few(self, words: str) -> str:
        reasons = "".join(f" {name}: {why}." for name, why in sorted(self.refused.items()))
        return (
            f"fewer than min_clients, {self._experiment.min_clients}, {words} after "
            f"{self._experiment.network.patience:g} s of waiting.{reasons}"
        )


def agree_on_classes(experiment: Experiment, members: Mapping[str, Introduction]) -> Experiment:
    """Return the experiment with the classes of all its clients, where it did not name them."""
    if experiment.dataset.classes:
        return experiment
    classes = sorted({name for member in members.values() for name in member.classes})
    if len(classes) < 2:
        raise InvalidInput(
            f"the clients know the class {', '.join(classes)} alone; there must be two or more."
        )
    return experiment.replace(dataset__classes=classes)
