"""A client's policy: what its operator allows, whatever the server asks for.

The operator edits `policy.toml` in the client's folder; the client's code enforces it. Nothing here
imports torch, because the process that supervises a client stays small.
"""

import tomllib
from pathlib import Path
from typing import Annotated, Literal, Self

import tomli_w
from pydantic import Field

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import read_bounded, write_atomically
from mpfedcl.experiment.settings import Settings
from mpfedcl.network.client import ClientRefusal

BUILT_IN = "built-in"
"""In `[allow]`: everything that the package brings."""
_Epsilon = Annotated[float, Field(gt=0, le=100)]
_Number = Annotated[int, Field(ge=0, le=10**6)]
_Names = tuple[Annotated[str, Field(min_length=1)], ...]


class BudgetPolicy(Settings):
    """The privacy budget of this client's samples."""

    section = "budget"
    max_epsilon: _Epsilon = 10.0
    """largest epsilon of all runs together, at delta max_delta"""
    max_epsilon_per_run: _Epsilon = 3.0
    """largest epsilon of one run, at delta max_delta"""
    max_delta: Annotated[float, Field(gt=0, lt=0.1)] = 1e-5
    """epsilon is counted at it; runs with a larger one are refused"""
    max_releases: _Number = 20
    """number of noisy updates over all runs"""
    required: bool = False
    """true: refuse runs whose updates no budget of this client covers"""


class EvaluationPolicy(Settings):
    """What the client says about the server's models on its test samples."""

    section = "evaluation"
    answers: Literal["exact", "noisy", "none"] = "exact"
    """exact, noisy or none; in runs with a budget exact becomes noisy"""
    epsilon: _Epsilon = 0.5
    """epsilon of one noisy answer; [budget] limits their sum"""
    max_answers_per_run: _Number = 1000
    """and never more than rounds + 1"""
    max_answers: _Number = 10_000
    """number of answers over all runs"""


class DataPolicy(Settings):
    """How the client uses its own data (--data)."""

    section = "data"
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """fraction for tests, drawn by a secret of this client"""
    min_class_count: Annotated[int, Field(ge=1)] = 1
    """smaller classes are not sent; above 1: no confusion counts"""


class SecureAggregationPolicy(Settings):
    """Conditions for secure aggregation."""

    section = "secure_aggregation"
    required: bool = False
    """true: refuse runs without secure aggregation"""
    min_verified_peers: Annotated[int, Field(ge=1)] = 2
    """smallest number of other clients with a known key"""
    honest_clients: Annotated[int | None, Field(ge=1)] = None
    """clients that share the noise of a budget, this one included"""


class AllowPolicy(Settings):
    """What the server may ask this client to use; "built-in" is everything in the package."""

    section = "allow"
    methods: _Names = (BUILT_IN,)
    """or names, or package.module:Class for code installed here"""
    models: _Names = (BUILT_IN,)
    """or names, or package.module:function for code installed here"""
    encoders: _Names = (BUILT_IN,)
    """or names; not asked if the client has --encoder"""

    def check(self, kind: Literal["methods", "models", "encoders"], name: str, own: bool) -> None:
        """Refuse a name that is not allowed; `own` tells whether the package has it."""
        allowed: tuple[str, ...] = getattr(self, kind)
        if name not in allowed and not (own and BUILT_IN in allowed):
            raise refusal(f"allow {kind}", ", ".join(allowed) or "empty", repr(name[:200]))


class ClientPolicy(Settings):
    """All sections of a policy."""

    section = ""
    budget: BudgetPolicy = BudgetPolicy()
    evaluation: EvaluationPolicy = EvaluationPolicy()
    data: DataPolicy = DataPolicy()
    secure_aggregation: SecureAggregationPolicy = SecureAggregationPolicy()
    allow: AllowPolicy = AllowPolicy()

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a policy; what it leaves out has its default."""
        try:
            values = tomllib.loads(read_bounded(path).decode())
        except FileNotFoundError:
            raise InvalidInput(
                f"policy is {str(path)!r}, which does not exist; mpfedcl federation init writes "
                "one with the defaults."
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidInput(f"{path} is not valid TOML: {error}.") from None
        try:
            found = cls(**values)
        except InvalidInput as error:
            raise InvalidInput(f"{path}: {error}") from None
        budget = found.budget
        if budget.max_epsilon_per_run > budget.max_epsilon:
            raise InvalidInput(
                f"{path}: budget.max_epsilon_per_run is {budget.max_epsilon_per_run:g}; it must be "
                f"at most budget.max_epsilon, {budget.max_epsilon:g}."
            )
        return found

    def write(self, path: Path) -> None:
        """Write the policy with a comment per line."""
        write_atomically(path, self.to_toml().encode())

    def to_toml(self) -> str:
        """Return the policy as TOML with a comment per line."""
        lines = ["# What this client allows, whatever the server asks for (docs/policy.md)."]
        for name, section in self:
            lines += ["", f"[{name}]"]
            for field, about in type(section).model_fields.items():
                value = getattr(section, field)
                shown = value if value is not None else 3
                line = tomli_w.dumps({field: shown}, multiline_strings=False).replace("\n", "")
                line = line.replace("[    ", "[").replace(",]", "]").replace(",    ", ", ")
                line = line if value is not None else f"# {line}"
                lines.append(f"{line:<32}  # {about.description}")
        return "\n".join(lines) + "\n"


def refusal(rule: str, value: object, asked: str) -> ClientRefusal:
    """Return the refusal of a request that breaks a rule, such as `budget max_delta`."""
    section, _, field = rule.partition(" ")
    return ClientRefusal(f"policy [{section}] {field} is {value}; the server asked for {asked}.")
