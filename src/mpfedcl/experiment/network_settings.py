"""Settings of a federation over a network, and of secure aggregation."""

from typing import Annotated, ClassVar

from pydantic import Field

from mpfedcl.experiment.settings import Settings


class NetworkSettings(Settings):
    """A federation over a network: how long to wait, and for whom. Only `enough` is used in a
    simulation."""

    section: ClassVar[str] = "network"
    round_timeout: Annotated[float, Field(gt=0, le=7 * 86_400)] = 600.0
    """Seconds that a round waits for answers; a client that has not answered by then is missing."""
    enough: Annotated[float, Field(gt=0, le=1)] = 1.0
    """A round ends early once this share of the clients asked have answered. In a simulation it
    needs a virtual clock (systems.kind)."""
    patience: Annotated[float, Field(gt=0, le=7 * 86_400)] = 300.0
    """Seconds to wait for clients to connect, at the start and whenever too few are left."""
    max_images: Annotated[int, Field(ge=1)] = 10_000_000
    """Most training images that a client may claim: they are its weight in the average, and nobody
    can check them. A client that claims more may not take part."""


class SecureSettings(Settings):
    """Secure aggregation (`--secure-aggregation`): when a sum is opened."""

    section: ClassVar[str] = "secure"
    threshold: Annotated[float, Field(ge=0.5, lt=1)] = 0.5
    """More than this share of a round's clients must be left at its end, or nothing is opened. With
    more than two thirds, a server that cheats together with a third of the clients learns no more
    than an honest one."""
