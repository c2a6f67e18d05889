"""What is counted for the record of an asynchronous run."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mpfedcl.rounds.arrival_state import ArrivalState
from mpfedcl.rounds.record import ArrivalRecord
from mpfedcl.rounds.update_collector import UpdateCollector


@dataclass
class CountedArrivals:
    """What has come in the time of one record."""

    answers: list[tuple[str, int]] = field(default_factory=list)
    """Accepted clients and their staleness, in order of arrival."""
    losses: list[tuple[float, int]] = field(default_factory=list)
    """With the client's samples."""
    loss_by_client: dict[str, float | None] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    rejected: dict[str, str] = field(default_factory=dict)
    withheld: set[str] = field(default_factory=set)
    left_out: set[str] = field(default_factory=set)
    processed: dict[str, set[str]] = field(default_factory=dict)
    largest: dict[str, int] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0

    @property
    def accepted(self) -> list[str]:
        """The clients whose answers count, in order of name."""
        return sorted({name for name, _ in self.answers})

    def add(self, collector: UpdateCollector, staleness: int, samples: Mapping[str, int]) -> None:
        """Count what a collector has taken in."""
        for name in collector.accepted:
            loss = collector.losses[name]
            self.answers.append((name, staleness))
            self.loss_by_client[name] = loss
            if loss is not None:
                self.losses.append((loss, samples[name]))
            if not collector.weights[name] and name not in collector.withheld:
                self.left_out.add(name)
        self.rejected |= collector.rejected
        self.withheld |= set(collector.withheld)
        for mark, names in collector.processed.items():
            self.processed.setdefault(mark, set()).update(names)
        for name, size in collector.largest.items():
            self.largest[name] = max(size, self.largest.get(name, 0))
        self.bytes_up += collector.bytes_up

    def mean_loss(self) -> float | None:
        """Return the mean training loss, each answer by its samples."""
        if not self.losses:
            return None
        return sum(loss * size for loss, size in self.losses) / sum(s for _, s in self.losses)

    def describe(self, arrivals: ArrivalState) -> ArrivalRecord:
        """Return what a record says of the arrivals."""
        stale = [staleness for _, staleness in self.answers]
        names = [name for name, _ in self.answers]
        return ArrivalRecord(
            version=arrivals.counts.version,
            by_client={name: names.count(name) for name in self.accepted},
            staleness={
                "mean": sum(stale) / max(1, len(stale)),
                "largest": float(max(stale, default=0)),
            },
            left_out=sorted(self.left_out),
            under_way=len(arrivals.counts.under_way),
        )
