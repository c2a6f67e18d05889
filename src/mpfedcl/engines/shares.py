"""Which process has which clients of a run, so that all are done at about the same time.

Five clients on two processes are three and two: one waits for a third of the round. Where processes
share memory a client may therefore be trained by two of them: the one takes its first steps before
all else, the other its last ones after all else, and answers for it. What lies between is the
client's model in memory that both have. No sum is taken in another order for it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from mpfedcl.data.client_data import ClientData
from mpfedcl.engines.linear_layers import find_layers
from mpfedcl.engines.trainer import ClientTask
from mpfedcl.engines.trainer_costs import describe_training
from mpfedcl.methods import Asynchronous, SharesPrototypes, prototype_rule
from mpfedcl.methods.messages import Broadcast
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.assembly import Assembly

_WORTH_IT = 0.97
"""A client is trained by two processes where a round is then shorter by more than this."""
LEADERS_OWN = 0.03
"""How much less the leader trains than the others: it writes checkpoints meanwhile."""
_MOST_BEGUN = 0.95
"""Of a client's steps: where more would be taken elsewhere, all of them are."""


@dataclass(frozen=True)
class Share:
    """What one process does in a round."""

    names: list[str]
    """The clients that it answers for, in order of name."""
    begun: str | None = None
    """The client of the process before it of which it takes the first steps."""
    part: float = 0.0
    """How many of them, of all its steps."""
    finished: str | None = None
    """Of its own clients the one that the process after it begins."""


def assign_clients(
    work: Mapping[str, int], num_processes: int, *, movable: Callable[[int], float] | None = None
) -> list[Share]:
    """Assign clients to processes so that all have about the same work.

    `movable` returns the part of a client's work, of so many samples, that another process may take
    over: that of its steps.
    """
    whole = _assign_whole(work, num_processes)
    if movable is None or not work:
        return whole
    split = _assign_parts(work, num_processes, movable)
    longest = [max(_loads(shares, work, movable)) for shares in (split, whole)]
    return split if longest[0] < _WORTH_IT * longest[1] else whole


def movable_work(
    assembly: Assembly, client: ClientData, num_together: int
) -> Callable[[int], float] | None:
    """Return which part of a client's work are steps that another process could take, by its size.

    None: nobody's. `client` is one of them, `num_together` how many of them a process has.
    """
    experiment, method = assembly.experiment, assembly.method
    stays = (
        client.inputs.device.type != "cpu"
        or not method.trains
        or isinstance(method, Asynchronous)
        or experiment.engine != "auto"
        # Who trains differs from round to round: whole clients are as good a guess as any.
        or experiment.fraction < 1
        or experiment.privacy.has_budget
        # What clients keep for themselves is where they are.
        or not all(method.shared(name) for name in assembly.initial)
        or not _has_only_layers(assembly, client)
    )
    if stays:
        return None
    # An epoch goes over the model three times, embedding once.
    passes = 3 * experiment.train.epochs
    part = passes / (passes + isinstance(method, SharesPrototypes))

    @cache
    def movable(num_samples: int) -> float:
        # Only what is trained directly, and by itself, can be continued elsewhere.
        training = describe_training(method, assembly.initial, num_samples, num_together)
        costs = training.with_layers()
        return part if costs["direct"] == min(costs.values()) else 0.0

    return movable


def _has_only_layers(assembly: Assembly, client: ClientData) -> bool:
    """Tell whether clients are trained directly, which can be continued elsewhere."""
    method, model, initial = assembly.method, assembly.model, assembly.initial
    like = next(iter(initial.values()))
    pool = PrototypePool.empty(
        method.num_classes,
        model.embedding_size,
        prototype_rule(method).num_prototypes,
        dtype=like.dtype,
        device=like.device,
    )
    try:
        extra = method.init_server(initial).extra
        received = method.prepare(Broadcast(1, initial, extra, pool))
        state, own = method.init_client(initial), method.describe(client.labels)
        task = ClientTask(client, initial, state, own)
        return find_layers(method, model, task, received) is not None
    except Exception:
        # Whatever it is: the first round will tell.
        return False


def _assign_whole(work: Mapping[str, int], num_processes: int) -> list[Share]:
    shares: list[list[str]] = [[] for _ in range(num_processes)]
    loads = [0] * num_processes
    # The largest first, each to whoever has least: the order of names settles what is equal.
    for name in sorted(work, key=lambda each: (-work[each], each)):
        # The last of them: the leader, number 0, writes checkpoints beside its share.
        idlest = max(range(num_processes), key=lambda each: (-loads[each], each))
        shares[idlest].append(name)
        loads[idlest] += work[name]
    return [Share(sorted(names)) for names in shares]


def _assign_parts(
    work: Mapping[str, int], num_processes: int, movable: Callable[[int], float]
) -> list[Share]:
    """Fill one process after the other; a client that does not fit is begun by the next one.

    That is McNaughton's rule. The two parts do not overlap in time, because no client takes longer
    than all are given.
    """
    time = max(sum(work.values()) / (num_processes - LEADERS_OWN), *work.values())
    names: list[list[str]] = [[]]
    begun: list[tuple[str, float] | None] = [None]
    left = time * (1 - LEADERS_OWN)
    for name in sorted(work):
        rest = work[name] - left
        steps = movable(work[name]) * work[name]
        part = rest / steps if steps else math.inf
        is_last = len(names) == num_processes
        if rest <= 0 or is_last:
            names[-1].append(name)
            left -= work[name]
        elif part > _MOST_BEGUN:
            names.append([name])
            begun.append(None)
            left = time - work[name]
        else:
            names[-1].append(name)
            names.append([])
            begun.append((name, part))
            left = time - rest
    missing = num_processes - len(names)
    names += [[] for _ in range(missing)]
    begun += [None] * missing
    following = [*begun[1:], None]
    return [
        Share(
            sorted(own),
            before[0] if before else None,
            before[1] if before else 0.0,
            after[0] if after else None,
        )
        for own, before, after in zip(names, begun, following, strict=True)
    ]


def _loads(
    shares: list[Share], work: Mapping[str, int], movable: Callable[[int], float]
) -> list[float]:
    """Return how much each process has to do."""
    loads = [float(sum(work[name] for name in share.names)) for share in shares]
    for rank, share in enumerate(shares):
        if share.begun is not None:
            moved = share.part * movable(work[share.begun]) * work[share.begun]
            loads[rank] += moved
            loads[rank - 1] -= moved
    return loads
