"""A method with settings of its own, as a user would bring it: `pull_method:Pull`."""

from typing import Annotated, Literal

from torch import Tensor

from mpfedcl.methods import Batch, Context, Field, Method, Settings, Tensors


class PullSettings(Settings):
    """A pull of the weights to zero."""

    section = "pull"
    beta: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the pull
    to zero."""
    norm: Literal["square", "absolute"] = "square"
    """How weights are measured."""
    layers: tuple[str, ...] = ("classifier",)
    """Layers that are pulled."""
    limit: Annotated[float | None, Field(gt=0)] = None
    """Longest pull [default: none]."""


class Pull(Method):
    """FedAvg whose clients pull some of their weights to zero."""

    name, summary = "pull", "FedAvg with a pull to zero"
    settings: PullSettings
    search_space = {**Method.search_space, "pull__beta": (0.0, 0.01, 1.0)}  # noqa: RUF012

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        own = self.settings
        pulled = [value for name, value in params.items() if name.startswith(own.layers)]
        sizes = [(v.square() if own.norm == "square" else v.abs()).sum() for v in pulled]
        return super().loss(params, batch, context) + own.beta * sum(sizes[1:], sizes[0])


class GentlePull(Pull):
    """Another method with the same settings."""


class Careless(Method):
    """Its section is one of the experiment's own."""

    class _Settings(Settings):
        section = "train"

    settings: _Settings


class Shadow(Method):
    """Its section is a word that an experiment uses otherwise."""

    class _Settings(Settings):
        section = "resolved"

    settings: _Settings


class Demanding(Method):
    """It has a setting without a default."""

    class _Settings(Settings):
        section = "demanding"
        beta: float

    settings: _Settings


class Undecided(Method):
    """Its settings may all be left open."""

    class _Settings(Settings):
        section = "undecided"
        flag: bool | None = None
        sizes: tuple[int, ...] | None = None

    settings: _Settings


class Nameless(Method):
    """Its settings have no section."""

    class _Settings(Settings):
        beta: float = 1.0

    settings: _Settings


class Copy(Method):
    """Its section is that of another class of settings."""

    class _Settings(Settings):
        section = "pull"
        gamma: float = 1.0

    settings: _Settings


class Untyped(Method):
    """Its settings are no settings."""

    settings: dict  # type: ignore[type-arg, assignment]


class Unknown(Method):
    """Nobody knows the class of its settings."""

    settings: "Missing"  # type: ignore[name-defined]  # noqa: F821
