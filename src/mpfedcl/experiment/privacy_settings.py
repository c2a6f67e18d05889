"""The settings of a privacy budget; no torch, as in `mpfedcl.experiment.settings`."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from mpfedcl.experiment.settings import Settings


class PrivacySettings(Settings):
    """Differential privacy: how much anybody may learn about one image, or about one client."""

    section: ClassVar[str] = "privacy"
    epsilon: Annotated[float | None, Field(gt=0, le=100)] = None
    """The budget: smaller protects more, and costs more accuracy; `mpfedcl privacy plan` says how
    much [default: no budget, no noise and no guarantee]."""
    delta: Annotated[float, Field(gt=0, lt=0.1)] = 1e-5
    """The probability with which the guarantee may fail; well below one over the number of images,
    or of clients."""
    unit: Literal["record", "client"] | None = None
    """What the guarantee is about: one training image (one-shot methods), or all images of a
    client [default: record with one exchange, client with rounds]."""
    model: Literal["central", "local"] = "central"
    """Who adds the noise: the server, which then sees the bare numbers, or each client before
    anything leaves it (one-shot methods), which costs more accuracy."""
    clip: Annotated[float | None, Field(gt=0)] = None
    """Unit client: the greatest length of what one client adds [default: 1 for the change of a
    model, 10 for sums]."""
    dimensions: Annotated[int, Field(ge=1)] = 64
    """One exchange: project features to this many dimensions, by a matrix that everybody knows;
    fewer dimensions need less noise. As many as features have, or more: no projection."""
    moments: bool = False
    """One exchange (fedgauss, fedlda): send second moments too; worth it from thousands of images.
    fedridge always does."""
    release_every: Annotated[int, Field(ge=1)] = 1
    """Methods with prototypes: rounds between two releases of them; fewer releases leave more of
    the budget to the model."""
    noise: Annotated[float | None, Field(gt=0)] = None
    """Rounds: noise multiplier, the noise's deviation divided by the clip [default: as much as the
    budget needs over all rounds]. If given, the run ends before a round that the budget does not
    cover."""

    @property
    def has_budget(self) -> bool:
        """Whether there is a promise to keep."""
        return self.epsilon is not None

    def unit_for(self, *, trains: bool) -> Literal["record", "client"]:
        """Return what the promise is about, with a method that trains in rounds or not."""
        return self.unit or ("client" if trains else "record")
