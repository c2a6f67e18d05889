"""The clients of a federation over a network: they connect, introduce themselves, go, come back."""

import time
from collections import Counter
from collections.abc import Collection, Mapping

from mpfedcl.core.errors import RunCutShort
from mpfedcl.experiment import Experiment
from mpfedcl.network.message import FORMAT, Message, MessageError
from mpfedcl.network.packing import Form, Introduction, pack_experiment
from mpfedcl.network.server.class_agreement import shorten_list
from mpfedcl.network.server.status import Status
from mpfedcl.network.transport import AnswerLimit, Reply, Transport

POLL_SECONDS = 0.5
"""Seconds between two polls: far below what starting a client's process takes."""
_INTRODUCTION = AnswerLimit(num_arrays=16, array_bytes=2**20, text_bytes=2**22)
"""Ten thousand classes with long names fit in."""
_POLL_TIMEOUT = 30.0
"""Seconds that sending and receiving introductions may take at a time."""
_AGAIN_SECONDS = 5.0
"""Between two introductions that are asked of a refused client while others are waited for."""
_MOST_REFUSED = 50
"""Refused clients whose reason is remembered: a stranger may use any number of names."""


class ClientRegistry:
    """The clients that are known, by name, and the nodes at which they were last seen."""

    def __init__(
        self,
        experiment: Experiment,
        transport: Transport,
        status: Status,
        form: Form | None = None,
        *,
        only: str | None = None,
    ) -> None:
        self.members: dict[str, Introduction] = {}
        self.refused: dict[str, str] = {}
        """Why a client may not take part, by the name it gave or its node's."""
        self.introduced: set[str] = set()
        """Clients that have introduced themselves since somebody last looked."""
        self.form = form
        """Known from the start where a run is resumed; else what most clients have."""
        self._transport = transport
        self._status = status
        self._only = only
        """The one client that is wanted; others that are connected are left alone."""
        self._nodes: dict[int, str] = {}
        """Clients by node."""
        self._asked: dict[str, int] = {}
        """Nodes that have been asked who they are, by message id."""
        self.seen: set[int] = set()
        """Nodes that need not be asked again."""
        self.refused_nodes: dict[int, str] = {}
        """Under which name each node that may not take part stands in `refused`."""
        self.use_experiment(experiment)

    @property
    def sizes(self) -> dict[str, int]:
        """Training samples by client, in order of name."""
        return {name: self.members[name].num_samples for name in sorted(self.members)}

    @property
    def label_counts(self) -> dict[str, list[int]]:
        """The same by class, in the experiment's order of classes."""
        classes = self._experiment.dataset.classes
        return {name: _count_by_class(self.members[name], classes) for name in sorted(self.members)}

    def use_experiment(self, experiment: Experiment) -> None:
        """Introduce and check clients by this experiment from now on."""
        self._experiment = experiment
        self._hello = Message({"format": FORMAT, "experiment": pack_experiment(experiment)})

    def wait_for_clients(self) -> None:
        """Wait until as many clients as expected have come, at most `network.patience` seconds."""
        wanted = self._experiment.clients or self._experiment.min_clients
        self._wait_for(wanted, "waiting for clients")
        if self.form is None and self.members:
            self.form = _most_common(self.members)
        odd = {name: self._check_form(each) for name, each in self.members.items()}
        self.exclude({name: reason for name, reason in odd.items() if reason})

    def wait_for_only(self) -> None:
        """Wait for the one client that is wanted, at most `network.patience` seconds."""
        if not self._wait_for(1, f"waiting for {self._only}"):
            reasons = self._tell_reasons()
            patience = self._experiment.network.patience
            raise RunCutShort(f"{self._only} was not there after {patience:g} s.{reasons}")

    def find_connected(self, *, is_new_round: bool = True) -> dict[str, int]:
        """Return the node of each connected client; ask nodes that are new who they are.

        In a new round ask refused ones again. If there are too few, wait as long as
        `network.patience` allows; then the run is cut short.
        """
        if is_new_round:
            self._ask_refused_again()
        here = self._poll()
        needed = min(self._experiment.min_clients, len(self.members))
        if len(here) < needed:
            here = self._wait_for(needed, "waiting for clients to come back")
        if len(here) < needed:
            raise RunCutShort(self._explain_too_few("are left"))
        return here

    def exclude(self, reasons: Mapping[str, str]) -> None:
        """Leave clients out that cannot take part, by name; the others must be enough."""
        for node, name in list(self._nodes.items()):
            if name in reasons:
                del self.members[name]
                self._remove(node, name, reasons[name])
        if len(self.members) < self._experiment.min_clients:
            raise RunCutShort(self._explain_too_few("were there"))

    def ask_for_introduction(self, names: Collection[str]) -> None:
        """Let clients introduce themselves again: what they said may not be true any more."""
        self.seen -= {node for node, name in self._nodes.items() if name in names}

    def _ask_refused_again(self) -> None:
        """They may have been repaired, or were killed when they were asked."""
        self.seen -= self.refused_nodes.keys() - set(self._asked.values())

    def _wait_for(self, wanted: int, what: str) -> dict[str, int]:
        now = time.monotonic()
        end, again = now + self._experiment.network.patience, now + _AGAIN_SECONDS
        here = self._poll()
        while len(here) < wanted and (now := time.monotonic()) < end:
            if now > again:
                self._ask_refused_again()
                again = now + _AGAIN_SECONDS
            self._status.write(what, here=sorted(here), wanted=wanted, refused=dict(self.refused))
            self._status.raise_if_stop_requested()
            time.sleep(POLL_SECONDS)
            here = self._poll()
        return here

    def _poll(self) -> dict[str, int]:
        present = self._find_present()
        new = [node for node in present if node not in self.seen]
        if new:
            settings = self._experiment.network
            # A run may begin without those who load their images for long; they come in later.
            seconds = max(settings.patience, settings.round_timeout)
            hello = dict.fromkeys(new, self._hello)
            sent = self._transport.send("hello", hello, seconds, seconds=_POLL_TIMEOUT)
            self._asked |= {request_id: node for node, request_id in sent.items()}
            self.seen |= set(sent)
        end = time.monotonic() + _POLL_TIMEOUT
        while self._asked and (left := end - time.monotonic()) > 0:
            replies = self._transport.receive(dict.fromkeys(self._asked, _INTRODUCTION), left)
            for reply in replies:
                self._handle_introduction(reply, present)
            if not replies:
                break
        # A node that went away before it said who it is will be asked again if it comes back.
        waiting = set(self._asked.values())
        self.seen &= {*present, *self._nodes, *waiting}
        return {name: node for node, name in self._nodes.items() if node in present}

    def _find_present(self) -> Mapping[int, str]:
        present = self._transport.connected_nodes()
        if self._only is None:
            return present
        # Without keys nobody knows who it is, until all have been asked.
        return {node: name for node, name in present.items() if name in ("", self._only)}

    def _handle_introduction(self, reply: Reply, present: Mapping[int, str]) -> None:
        node = self._asked.pop(reply.request_id, None)
        if node is None:
            return
        registered = present.get(node, "")
        who = registered or self._nodes.get(node) or f"node {node}"
        if reply.message is None:
            self._refuse(node, who, reply.reason)
            if reply.failure == "gone":
                self.seen.discard(node)
            return
        try:
            member = Introduction.from_message(reply.message)
        except MessageError as error:
            self._remove(node, who, str(error))
            return
        # Whatever one client says of itself costs that client alone.
        except Exception as error:
            self._remove(node, who, f"its introduction cannot be read ({type(error).__name__})")
            return
        if reason := self._check(member, registered, node, present):
            self._remove(node, registered or member.name, reason)
            return
        self._forget_refusal(node)
        # The same client at a new node: the newest one counts.
        self._nodes = {n: name for n, name in self._nodes.items() if name != member.name}
        self._nodes[node] = member.name
        self.members[member.name] = member
        self.introduced.add(member.name)

    def _remove(self, node: int, who: str, reason: str) -> None:
        self._refuse(node, who, reason)
        self._nodes.pop(node, None)

    def _refuse(self, node: int, who: str, reason: str) -> None:
        self._forget_refusal(node)
        self.refused_nodes[node], self.refused[who] = who, reason
        for oldest in list(self.refused_nodes)[:-_MOST_REFUSED]:
            self._forget_refusal(oldest)

    def _forget_refusal(self, node: int) -> None:
        self.refused.pop(self.refused_nodes.pop(node, ""), None)

    def _check(
        self, member: Introduction, registered: str, node: int, present: Mapping[int, str]
    ) -> str | None:
        """Return why a client may not take part, or None if it may."""
        if self._only is not None and member.name != self._only:
            return f"it is not {self._only}"
        if registered and member.name != registered:
            return f"it calls itself {member.name!r}, but its key is registered as {registered!r}"
        elsewhere = [n for n, name in self._nodes.items() if name == member.name and n != node]
        if any(each in present for each in elsewhere):
            return "another client of that name is connected"
        if not member.train and self._experiment.tells_counts:
            return "it does not say how many images it has"
        most = self._experiment.network.max_images
        if member.num_samples > most:
            return f"it says that it has {member.num_samples} images; network.max_images is {most}"
        known = self._experiment.dataset.classes
        if known and not set(member.classes) <= set(known):
            odd = sorted(set(member.classes) - set(known))
            return f"it has the class {odd[0]!r}; the classes are {shorten_list(known)}"
        encoder = self._experiment.encoder.name
        if member.samples == "vectors" and encoder not in (None, "none"):
            return f"it has vectors, but encoder.name is {encoder!r}, and encoders take images"
        return self._check_form(member)

    def _check_form(self, member: Introduction) -> str | None:
        if self.form is None or member.form == self.form:
            return None
        form = self.form
        if member.samples != form.samples:
            return f"it has {member.samples}, the others {form.samples}"
        if member.input_size != form.input_size:
            what = {
                "images": "images must be of one size, or go through the same encoder",
                "vectors": "vectors must be of one width",
            }
            return (
                f"its inputs have {member.input_size} numbers, the others' {form.input_size}: "
                f"{what[form.samples]}"
            )
        if member.image_shape != form.image_shape and member.image_shape and form.image_shape:
            own, wanted = (
                " x ".join(map(str, each)) for each in (member.image_shape, form.image_shape)
            )
            return (
                f"its images are {own}, the others' {wanted}: images must be of one size and color"
            )
        return "its encoder is not the others'"

    def _tell_reasons(self) -> str:
        told = sorted(self.refused.items())
        return "".join(f" {name}: {why.removesuffix('.')}." for name, why in told)

    def _explain_too_few(self, words: str) -> str:
        reasons = self._tell_reasons()
        return (
            f"min_clients is {self._experiment.min_clients}; fewer {words} after "
            f"{self._experiment.network.patience:g} s of waiting.{reasons}"
        )


def _count_by_class(member: Introduction, classes: Collection[str]) -> list[int]:
    # Under a privacy budget nobody says how many.
    counts = dict(zip(member.classes, member.train, strict=True)) if member.train else {}
    return [counts.get(name, 0) for name in classes]


def _most_common(members: Mapping[str, Introduction]) -> Form:
    """Return what most clients have; one that is set up wrongly must not shut the others out."""
    counts = Counter(members[name].form for name in sorted(members))
    return counts.most_common(1)[0][0]
