"""The settings of the virtual clock and of public images; no torch, as in `settings`."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from mpfedcl.experiment.settings import Settings


class SystemsSettings(Settings):
    """How fast clients are, on a virtual clock: the same on every machine. Only in simulations,
    except for tick, concurrency and most_per_minute."""

    section: ClassVar[str] = "systems"
    kind: Literal["none", "lognormal", "tiers"] | None = None
    """lognormal: each client has speeds of its own, drawn once; tiers: five equal groups wait 0, 0
    to 5, 6 to 10, 11 to 15 and 20 to 30 seconds before each answer; none: no clock [default:
    lognormal with asynchronous methods, else none]."""
    spread: Annotated[float, Field(ge=0, le=5)] = 0.8
    """lognormal: deviation of the logarithm of a client's speeds; 0: all are equally fast."""
    follows: Literal["none", "size", "label"] = "none"
    """Who is slow: anybody; clients with many samples; or those that hold the last classes, which
    is where asynchronous methods are biased."""
    seconds_a_sample: Annotated[float, Field(gt=0, le=1e6)] = 0.001
    """Seconds that a client of median speed needs per sample and epoch."""
    jitter: Annotated[float, Field(ge=0, le=5)] = 0.1
    """How much a client's training time varies: deviation of its logarithm."""
    down: Annotated[float, Field(gt=0)] = 1e6
    """Bytes per second from the server to a client of median speed."""
    up: Annotated[float, Field(gt=0)] = 1e6
    """Bytes per second from a client of median speed to the server."""
    latency: Annotated[float, Field(ge=0, le=1e6)] = 0.1
    """Additional seconds per message, in each direction."""
    drop: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the answers that are lost on the way."""
    patience: Annotated[float, Field(ge=1, le=1000)] = 2.0
    """An answer is given up after this many times the seconds that its client usually needs."""
    tick: Annotated[float | None, Field(gt=0, le=1e9)] = None
    """Methods that collect answers at fixed intervals: seconds between them [default: the median of
    what clients usually need]."""
    concurrency: Annotated[int | None, Field(ge=1)] = None
    """Asynchronous methods: clients that train at the same time [default: as many as in a round,
    see fraction]."""
    most_per_minute: Annotated[float, Field(ge=0, le=1e6)] = 20.0
    """Asynchronous methods over a network: how often a client is sent the model in a minute at
    most, lest a fast one, or one that does not train at all, take the model over; 0: as often as
    it can."""

    @property
    def has_clock(self) -> bool:
        """Whether virtual seconds are counted."""
        return self.kind not in (None, "none")


class PublicSettings(Settings):
    """Training images that no client gets: the server judges models on them. Simulations only."""

    section: ClassVar[str] = "public"
    size: Annotated[int | None, Field(ge=0)] = None
    """How many are held out before the rest is split among clients; at most a tenth of all
    [default: 1000 with sageflow, else 0]."""
