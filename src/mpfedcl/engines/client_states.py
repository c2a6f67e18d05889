"""What clients keep between rounds: in memory, or in one file where they are too many for it.

A round writes its clients' new states to free slots of the file, never over old ones, and each
checkpoint says which slot each client's state is in. So a kill at any moment leaves a checkpoint
with all its states, and what a round writes grows with its clients, not with all there are.
"""

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterator, Mapping, MutableMapping

import numpy
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors, pack_tensors
from mpfedcl.engines.slot_file import SlotFile
from mpfedcl.rounds.engine import StatePlace

MOST_IN_MEMORY = 2**28
"""Bytes that the states of all clients may take before they are kept in a file."""
_RESTING = 8
"""Where some clients rest in each round a file is worth it from so many times fewer bytes on: each
checkpoint would have all states again, and the file has those that are new."""
SLOTS = "slots"
"""What begins the names of the tensors of a checkpoint that say where states are."""
_ROUNDS_KEPT = 3
"""Rounds after which a slot is free whose state was replaced: the checkpoint of the round under
way is not written yet, the one before it may still be on its way to disk, and of those on disk the
newest two are kept."""


class ClientStates(MutableMapping[str, Tensors]):
    """The clients' states of one kind, by name.

    Args:
        kind: What begins their names in a checkpoint.
        clients: Those of this process.
        device: Where states are needed.
    """

    def __init__(self, kind: str, clients: Collection[str], device: torch.device) -> None:
        self.kind = kind
        self._clients = clients
        self._device = device
        self._memory: dict[str, Tensors] = {}
        self._place: StatePlace | None = None
        self._most = MOST_IN_MEMORY
        self._file: SlotFile | None = None
        self._slots: NDArray[numpy.int64] = numpy.empty(0, dtype=numpy.int64)
        """Of each client of the run, in name order; -1 for none, or another process's."""
        self._free: list[int] = []
        self._next = 0
        self._replaced: deque[list[int]] = deque([[]])
        """Slots by the round in which they were replaced; the last is the round under way."""

    def keep_in(self, place: StatePlace, *, some_rest: bool) -> None:
        """Keep states in a file there from now on, if they are too many for the memory."""
        self._place = place
        self._most = MOST_IN_MEMORY // _RESTING if some_rest else MOST_IN_MEMORY

    def begin_round(self) -> None:
        """Free the slots that no checkpoint needs any more."""
        self._replaced.append([])
        if len(self._replaced) > _ROUNDS_KEPT:
            for slot in self._replaced.popleft():
                heapq.heappush(self._free, slot)

    def __getitem__(self, name: str) -> Tensors:
        slot = self._find(name)
        if slot < 0:
            return self._memory[name]
        assert self._file is not None
        content = self._file.read(slot, self._number(name))
        try:
            return {each: value.to(self._device) for each, value in load(content).items()}
        except SafetensorError as error:
            raise InvalidInput(f"the state of {name} cannot be read: {error}.") from None

    def __setitem__(self, name: str, state: Tensors) -> None:
        if self._file is None and self._place is not None and self._is_too_large(state):
            self._open(len(pack_tensors(state)))
        if self._file is None:
            self._memory[name] = state
            return
        self._release(name)
        content = pack_tensors(state)
        if len(content) > self._file.capacity:
            # Not all clients' states are alike.
            self._memory[name] = state
            return
        self._memory.pop(name, None)
        slot, number = self._take(), self._number(name)
        self._file.write(slot, number, content)
        self._slots[number] = slot

    def __delitem__(self, name: str) -> None:
        if self._find(name) < 0:
            del self._memory[name]
        else:
            self._release(name)

    def __contains__(self, name: object) -> bool:
        return name in self._memory or (isinstance(name, str) and self._find(name) >= 0)

    def __iter__(self) -> Iterator[str]:
        yield from self._memory
        if self._place is not None:
            held = numpy.flatnonzero(self._slots >= 0).tolist()
            yield from (self._place.names[place] for place in held)

    def __len__(self) -> int:
        return len(self._memory) + int((self._slots >= 0).sum())

    # For checkpoints

    def snapshot(self) -> Tensors:
        """Return the states in memory, and where the others are; `sync` makes these safe."""
        found = {
            f"{self.kind}/{client}/{name}": value
            for client, state in self._memory.items()
            for name, value in state.items()
        }
        if self._file is None:
            return found
        return {**found, f"{SLOTS}/{self.kind}": torch.from_numpy(self._slots.copy())}

    def sync(self) -> None:
        """Wait until the states of the last snapshot are on disk; perhaps in another thread."""
        if self._file is not None:
            self._file.sync()

    def restore(self, states: Mapping[str, Tensors], slots: Tensor | None) -> None:
        """Continue from a checkpoint: the states it holds, and where the others are.

        What belongs to clients of other processes is passed over.
        """
        self._memory = {
            client: {name: value.to(self._device) for name, value in state.items()}
            for client, state in states.items()
            if client in self._clients
        }
        self._close()
        if slots is None:
            return
        if self._place is None:
            raise InvalidInput(
                "workers is too many: the clients' states are in the run's folder, which every "
                "worker must be able to reach; where they cannot, it must be 1."
            )
        self._file = SlotFile(self._place.folder / self._file_name)
        found = slots.numpy().copy()
        reach = self._file.num_slots
        if found.shape != (len(self._place.names),) or found.dtype != numpy.int64:
            raise ValueError("not the clients of this run")
        used = set(found[found >= 0].tolist())
        if len(used) < int((found >= 0).sum()) or max(used, default=-1) >= reach:
            raise InvalidInput(
                f"{self._place.folder / self._file_name} is cut off; it must be as the run wrote "
                "it, or the run must be started again in a new folder."
            )
        self._slots = self._own_part(found)
        self._begin_at(reach)
        # The checkpoint before this one may need them: they wait as if they were replaced just now.
        mine = range(self._place.rank, reach, self._place.ranks)
        self._replaced = deque([[slot for slot in mine if slot not in used]])

    def _open(self, most_bytes: int) -> None:
        assert self._place is not None
        self._file = SlotFile.create(self._place.folder / self._file_name, most_bytes)
        self._slots = numpy.full(len(self._place.names), -1, dtype=numpy.int64)
        self._begin_at(0)

    def _begin_at(self, reach: int) -> None:
        """Take new slots from `reach` on: each process its own, so that none needs to ask."""
        assert self._place is not None
        ranks, rank = self._place.ranks, self._place.rank
        self._next = reach + (rank - reach) % ranks
        self._free, self._replaced = [], deque([[]])

    def _own_part(self, slots: NDArray[numpy.int64]) -> NDArray[numpy.int64]:
        """Return where the states of this process's clients are, and -1 for the others."""
        assert self._place is not None
        if self._place.ranks == 1:
            return slots
        own = numpy.full_like(slots, -1)
        numbers = [self._number(name) for name in self._clients]
        own[numbers] = slots[numbers]
        return own

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._slots = None, numpy.empty(0, dtype=numpy.int64)

    @property
    def _file_name(self) -> str:
        return f"clients-{self.kind}.slots"

    def _is_too_large(self, state: Tensors) -> bool:
        assert self._place is not None
        size = sum(value.numel() * value.element_size() for value in state.values())
        return size * len(self._place.names) > self._most

    def _number(self, name: str) -> int:
        assert self._place is not None
        return bisect_left(self._place.names, name)

    def _find(self, name: str) -> int:
        """Return a client's slot, or -1."""
        if self._file is None or name not in self._clients:
            return -1
        return int(self._slots[self._number(name)])

    def _take(self) -> int:
        assert self._place is not None
        if self._free:
            return heapq.heappop(self._free)
        slot, self._next = self._next, self._next + self._place.ranks
        return slot

    def _release(self, name: str) -> None:
        if (slot := self._find(name)) >= 0:
            self._replaced[-1].append(slot)
            self._slots[self._number(name)] = -1


def restore_states(kept: Collection[ClientStates], state: Tensors) -> None:
    """Continue, for each kind of states, from the snapshots of all of them together."""
    kinds: dict[str, dict[str, Tensors]] = {each.kind: {} for each in kept}
    for key, value in state.items():
        if not key.startswith(f"{SLOTS}/"):
            kind, client, name = key.split("/", 2)
            kinds[kind].setdefault(client, {})[name] = value
    for each in kept:
        each.restore(kinds[each.kind], state.get(f"{SLOTS}/{each.kind}"))
