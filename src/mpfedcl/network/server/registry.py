"""The clients of a federation: their introductions, the classes they agree on, their silences."""

import time
from collections import Counter
from collections.abc import Collection, Mapping

import torch

from mpfedcl.core.errors import InvalidInput, RunCutShort
from mpfedcl.core.tensors import Tensors, take_group
from mpfedcl.experiment import Experiment
from mpfedcl.network.packing import DataFormat, Introduction, pack_experiment
from mpfedcl.network.server.status import Status
from mpfedcl.network.transport import (
    FORMAT,
    KILLED,
    AnswerLimit,
    Message,
    MessageError,
    Reply,
    Transport,
)

POLL_SECONDS = 0.5
"""Seconds between two polls."""
_INTRODUCTION = AnswerLimit(num_arrays=16, array_bytes=2**20, text_bytes=2**22)
"""Enough for ten thousand classes with long names."""
_POLL_TIMEOUT = 30.0
"""Time limit in seconds for sending or receiving introductions."""
_AGAIN_SECONDS = 5.0
"""Seconds after which refused clients are asked again while the server waits for clients."""
_MOST_CLASSES = 1000
"""Total over all clients unless dataset.classes names them: every model has as many outputs, and
the confusion matrix grows quadratically."""
_PASSING = (KILLED, "it went away", "its message was lost", "its answer was lost")
"""Reasons that say nothing about the next answer."""
_SILENT = "silent/"
_PATIENCE = 2
"""Silences in a row before a client is skipped."""
_LONGEST_REST = 64
"""Maximum number of rounds to skip."""


class ClientRegistry:
    """The known clients by name, which is that of their key, and how to reach them.

    With `only` the registry ignores all other clients.
    """

    def __init__(
        self,
        experiment: Experiment,
        transport: Transport,
        status: Status,
        data_format: DataFormat | None = None,
        *,
        only: str | None = None,
    ) -> None:
        self.members: dict[str, Introduction] = {}
        self.introduced: set[str] = set()
        """Clients introduced since the engine last looked."""
        self.refused: dict[str, str] = {}
        """Reasons for refusals, by client."""
        self.data_format = data_format
        """Given if a run is resumed; otherwise the most common one among the clients."""
        self._transport = transport
        self._status = status
        self._only = only
        self._asked: dict[str, str] = {}
        """Clients asked for an introduction, by message id."""
        self._seen: set[str] = set()
        """Clients that are not asked again."""
        self.use_experiment(experiment)

    @property
    def sizes(self) -> dict[str, int]:
        """Training samples by client, in name order."""
        return {name: self.members[name].num_samples for name in sorted(self.members)}

    @property
    def label_counts(self) -> dict[str, list[int]]:
        """Training samples by client and class, in the experiment's class order."""
        classes = self._experiment.dataset.classes
        return {name: _count_by_class(self.members[name], classes) for name in sorted(self.members)}

    def use_experiment(self, experiment: Experiment) -> None:
        """Send and check introductions for this experiment from now on."""
        self._experiment = experiment
        self._hello = Message({"format": FORMAT, "experiment": pack_experiment(experiment)})

    def wait_for_clients(self) -> None:
        """Wait until the expected number of clients is connected, at most `network.patience` s."""
        wanted = self._experiment.clients or self._experiment.min_clients
        self._wait_for(wanted, "waiting for clients")
        if self.data_format is None and self.members:
            # The most common one: a single misconfigured client must not exclude the others.
            counts = Counter(self._format_of(self.members[name]) for name in sorted(self.members))
            self.data_format = counts.most_common(1)[0][0]
        odd = {name: self._check_format(each) for name, each in self.members.items()}
        self.exclude({name: reason for name, reason in odd.items() if reason})

    def wait_for_only(self) -> None:
        """Wait for the only client, at most `network.patience` seconds."""
        if not self._wait_for(1, f"waiting for {self._only}"):
            raise self._cut_short(f"{self._only} was not connected after")

    def find_connected(self, *, is_new_round: bool = True) -> dict[str, int]:
        """Return the node of each connected client; ask new nodes for an introduction.

        In a new round refused clients are asked again. If too few clients are connected, wait up
        to `network.patience` seconds, then raise `RunCutShort`.
        """
        if is_new_round:
            self._ask_refused_again()
        here = self._poll()
        needed = min(self._experiment.min_clients, len(self.members))
        if len(here) < needed:
            here = self._wait_for(needed, "waiting for clients to come back")
        if len(here) < needed:
            raise self._too_few("are left")
        return here

    def exclude(self, reasons: Mapping[str, str]) -> None:
        """Exclude clients for the given reasons; the others must be at least `min_clients`."""
        for name, reason in reasons.items():
            self.members.pop(name, None)
            self.refused[name] = reason
        if len(self.members) < self._experiment.min_clients:
            raise self._too_few("were connected")

    def ask_for_introduction(self, names: Collection[str]) -> None:
        """Ask clients for a new introduction, because their data may have changed."""
        self._seen -= set(names)

    def _ask_refused_again(self) -> None:
        """Ask refused clients again: they may have been repaired."""
        self._seen -= self.refused.keys() - set(self._asked.values())

    def _wait_for(self, wanted: int, what: str) -> dict[str, int]:
        now = time.monotonic()
        end, again = now + self._experiment.network.patience, now + _AGAIN_SECONDS
        here = self._poll()
        while len(here) < wanted and (now := time.monotonic()) < end:
            if now > again:
                self._ask_refused_again()
                again = now + _AGAIN_SECONDS
            self._status.write(what, here=sorted(here), wanted=wanted, refused=self.refused)
            if self._refuse_too_many(wanted, here):
                break
            if self._status.stop_requested():
                raise RunCutShort("stopped while waiting for clients; completed rounds are kept.")
            time.sleep(POLL_SECONDS)
            here = self._poll()
        return here

    def _refuse_too_many(self, wanted: int, here: Collection[str]) -> bool:
        """Return whether too few are left even if all others come, because clients refuse."""
        if self._asked:
            # Their answers may come at any moment.
            return False
        final = {n for n, why in self.refused.items() if why not in _PASSING} - set(here)
        known = len(final.union(here, self.members))
        expected = 1 if self._only else max(wanted, self._experiment.clients or 0, known)
        needed = 1 if self._only else min(wanted, self._experiment.min_clients)
        return bool(final) and expected - len(final) < needed

    def _poll(self) -> dict[str, int]:
        nodes = self._transport.connected_nodes().items()
        present = {name: node for node, name in nodes if self._only in (None, name)}
        new = {node: name for name, node in present.items() if name not in self._seen}
        if new:
            settings = self._experiment.network
            # The run may start before clients have loaded their data; they join later.
            seconds = max(settings.patience, settings.round_timeout)
            hello = dict.fromkeys(new, self._hello)
            sent = self._transport.send("hello", hello, seconds, seconds=_POLL_TIMEOUT)
            self._asked |= {request_id: new[node] for node, request_id in sent.items()}
            self._seen |= {new[node] for node in sent}
        end = time.monotonic() + _POLL_TIMEOUT
        while self._asked and (left := end - time.monotonic()) > 0:
            replies = self._transport.receive(dict.fromkeys(self._asked, _INTRODUCTION), left)
            for reply in replies:
                self._handle_introduction(reply)
            if not replies:
                break
        # A client that disconnected before its introduction is asked again when it reconnects.
        self._seen &= {*present, *self.members, *self._asked.values()}
        known = self.members.keys() - self.refused.keys()
        return {name: node for name, node in present.items() if name in known}

    def _handle_introduction(self, reply: Reply) -> None:
        name = self._asked.pop(reply.request_id, None)
        if name is None:
            return
        if reply.message is None:
            self.refused[name] = reply.reason
            if reply.failure == "gone":
                self._seen.discard(name)
            return
        try:
            member = Introduction.from_message(name, reply.message)
        except MessageError as error:
            self.refused[name] = str(error)
            return
        if reason := self._find_refusal(member):
            self.refused[name] = reason
            return
        self.refused.pop(name, None)
        self.members[name] = member
        self.introduced.add(name)

    def _find_refusal(self, member: Introduction) -> str | None:
        """Return why a client is refused, or None."""
        if not member.train and self._experiment.tells_counts:
            return "it does not report its number of samples"
        most = self._experiment.network.max_images
        if member.num_samples > most:
            return f"it reports {member.num_samples} samples; network.max_images is {most}"
        known = self._experiment.dataset.classes
        if known and not set(member.classes) <= set(known):
            odd = sorted(set(member.classes) - set(known))
            return f"it has the class {odd[0]!r}; the classes are {shorten_list(known)}"
        encoder = self._experiment.encoder.name
        if member.samples != "images" and encoder not in (None, "none"):
            what = member.samples
            return f"it has {what}, but encoder.name is {encoder!r}, and encoders take images"
        if self._experiment.model.clients and not member.embedding_size:
            return "it does not report the size of its model's embeddings"
        return self._check_format(member)

    def _format_of(self, member: Introduction) -> DataFormat:
        """Return what all clients must share: models, or the size of embeddings if they differ."""
        found = member.data_format
        if not self._experiment.model.clients:
            return found
        return found._replace(model="", embedding_size=member.embedding_size)

    def _check_format(self, member: Introduction) -> str | None:
        wanted = self.data_format
        if wanted is None or self._format_of(member) == wanted:
            return None
        if member.samples != wanted.samples:
            return f"it has {member.samples}, the others {wanted.samples}"
        if member.input_size != wanted.input_size:
            rule = {
                "images": "images must be of one size, or go through the same encoder",
                "vectors": "vectors must be of one width",
                "tokens": "texts must have one number of tokens",
            }[wanted.samples]
            sizes = f"{member.input_size} values, the others' {wanted.input_size}"
            return f"its inputs have {sizes}: {rule}"
        own, others = (" x ".join(map(str, e)) for e in (member.image_shape, wanted.image_shape))
        if own and others and own != others:
            return f"its {wanted.samples} are {own}, the others' {others}: they must be of one size"
        if (own_size := self._format_of(member).embedding_size) != wanted.embedding_size:
            return (
                f"its embeddings have {own_size} values, the others' {wanted.embedding_size}: "
                "models may differ, but not in the size of embeddings"
            )
        if member.model != wanted.model and not self._experiment.model.clients:
            return "its model is not the others': all must have the same version of its code"
        return "its encoder is not the others'"

    def _too_few(self, words: str) -> RunCutShort:
        most = self._experiment.min_clients
        return self._cut_short(f"min_clients is {most}; fewer {words} after", " of waiting")

    def _cut_short(self, words: str, more: str = "") -> RunCutShort:
        patience = self._experiment.network.patience
        refusals = sorted(self.refused.items())
        reasons = "".join(f" {name}: {why.removesuffix('.')}." for name, why in refusals)
        if self._refuse_too_many(self._experiment.clients or self._experiment.min_clients, ()):
            needed = f"min_clients is {self._experiment.min_clients}; too many clients refuse"
            words = f"{self._only} refuses" if self._only else needed
            return RunCutShort(f"{words} or cannot take part.{reasons}")
        return RunCutShort(f"{words} {patience:g} s{more}.{reasons}")


def _count_by_class(member: Introduction, classes: Collection[str]) -> list[int]:
    # Under a privacy budget clients do not send counts.
    counts = dict(zip(member.classes, member.train, strict=True)) if member.train else {}
    return [counts.get(name, 0) for name in classes]


def agree_on_classes(
    experiment: Experiment, members: Mapping[str, Introduction]
) -> tuple[Experiment, dict[str, str]]:
    """Return the experiment with the classes of its clients, unless it names classes itself.

    Also return the clients to exclude, with reasons. Clients whose classes are compatible with most
    others take precedence, so that a single client with odd classes is the one excluded.
    """
    if experiment.dataset.classes:
        return experiment, {}
    refused = _find_too_many(members.values())
    left = [each for name, each in members.items() if name not in refused]
    if not left:
        reasons = (f"{name}: {reason}." for name, reason in sorted(refused.items()))
        raise InvalidInput(f"all clients are refused. {' '.join(reasons)}")
    alike = {_kind(member): member for member in left}
    counts = Counter(map(_kind, left))
    fits = {
        kind: sum(counts[o] for o, other in alike.items() if not _explain_mixed_up(each, other))
        for kind, each in alike.items()
    }
    agreed: list[Introduction] = []
    for member in sorted(left, key=lambda each: (-fits[_kind(each)], each.name)):
        if reason := _explain_mixed_up(member, *agreed):
            refused[member.name] = reason
        else:
            agreed.append(member)
    classes = _all_classes(agreed)
    if len(classes) < 2:
        raise InvalidInput(
            f"the clients have only the class {', '.join(classes)}; there must be two or more."
        )
    return experiment.replace(dataset__classes=classes), refused


def _find_too_many(members: Collection[Introduction]) -> dict[str, str]:
    """Return the clients that bring too many classes, with reasons."""
    known: set[str] = set()
    refused: dict[str, str] = {}
    # In order of number of classes, so that the client with most is excluded first.
    for member in sorted(members, key=lambda each: (len(each.classes), each.name)):
        together = known.union(member.classes)
        if len(together) <= _MOST_CLASSES:
            known = together
        else:
            refused[member.name] = (
                f"with its {len(member.classes):,} classes there are {len(together):,}; at most "
                f"{_MOST_CLASSES:,} unless dataset.classes names them"
            )
    return refused


def _kind(member: Introduction) -> tuple[tuple[str, ...], bool]:
    """Return the key that decides compatibility; equal keys are compared once."""
    return member.classes, member.own_data


def _all_classes(members: Collection[Introduction]) -> list[str]:
    return sorted({name for member in members for name in member.classes})


def _explain_mixed_up(newest: Introduction, *others: Introduction) -> str | None:
    """Return why adding the newest client would change the meaning of class numbers, or None."""
    classes = _all_classes([newest, *others])
    for each in (newest, *others):
        if not each.own_data and len(each.classes) < len(classes):
            return (
                f"{each.name} has a share of the experiment's data set, which has the classes "
                f"{shorten_list(each.classes)}, and not all of {shorten_list(classes)}"
            )
        if _are_numbers(each.classes) and list(each.classes) != classes[: len(each.classes)]:
            subject = "it has" if each is newest else f"with it {each.name} has"
            return (
                f"{subject} classes by number, {shorten_list(each.classes)}, which are not the "
                f"first of all clients' classes, {shorten_list(classes)}: dataset.classes must "
                "name "
                "the classes in order"
            )
    return None


def _are_numbers(classes: Collection[str]) -> bool:
    """Return whether classes may be integer labels of an npz file, which are positions."""
    return all(name.isdecimal() for name in classes)


def shorten_list(names: Collection[str]) -> str:
    """Return at most twelve names for an error message."""
    shown = ", ".join(list(names)[:12])
    return shown if len(names) <= 12 else f"{shown} and {len(names) - 12} more"


class SilentClients:
    """Skips clients that repeatedly miss the deadline, with exponential backoff.

    A connected client that never answers would cost the full timeout in every round. After two
    silences in a row a client is skipped for 2 rounds, then for 4, 8 and so on. When a round times
    out because of a client that was not silent before, skipping saved no time, and all clients are
    asked in the next round.
    """

    def __init__(self) -> None:
        self._silences: dict[str, tuple[int, int]] = {}
        """The silences in a row of each client, and the round in which it is asked next."""

    def note_answers(self, names: Collection[str]) -> None:
        """Record that clients have answered, reconnected or introduced themselves."""
        for name in names:
            self._silences.pop(name, None)

    def note_silence(self, names: Collection[str], round_number: int) -> None:
        """Record that clients missed the deadline of a round."""
        is_new = any(name not in self._silences for name in names)
        for name in names:
            times = self._silences.get(name, (0, 0))[0] + 1
            rest = 2 ** (times - 1) if times >= _PATIENCE else 0
            self._silences[name] = times, round_number + 1 + min(rest, _LONGEST_REST)
        if is_new:
            self._silences = {n: (t, round_number + 1) for n, (t, _) in self._silences.items()}

    def resting(self, round_number: int) -> dict[str, str]:
        """Return the clients to skip in a round, with the reason for its record."""
        return {
            name: f"silent {times} times in a row; asked again in round {asked_in}"
            for name, (times, asked_in) in self._silences.items()
            if asked_in > round_number
        }

    def state(self) -> Tensors:
        """Return the state for a checkpoint."""
        return {f"{_SILENT}{name}": torch.tensor(each) for name, each in self._silences.items()}

    def restore(self, state: Tensors) -> None:
        """Continue from the result of `state`; other entries are ignored."""
        found = take_group(state, _SILENT)
        self._silences = {name: (int(each[0]), int(each[1])) for name, each in found.items()}
