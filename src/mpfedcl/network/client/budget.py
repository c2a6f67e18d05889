"""A client's own account of what it has released, over all runs; no request can reset it.

It is in the client's memory folder, beside the folders of runs, so that it outlives them. Each
noisy update is drawn once, stored, and charged before it is sent. Training samples and test samples
are disjoint, so updates and answers about test samples are counted separately: the total for a
sample is the larger of the two (parallel composition).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import write_atomically
from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.gaussian.mechanism import PrivateSums
from mpfedcl.methods import Method, OneShot, find_method
from mpfedcl.network.client import ClientRefusal
from mpfedcl.network.client.policy import ClientPolicy, refusal
from mpfedcl.network.client.state import ClientStateStore
from mpfedcl.privacy.accounting import spent_epsilon
from mpfedcl.privacy.private_rounds import release_sensitivity
from mpfedcl.privacy.secure_aggregation.layout import fix_noise

LEDGER_FILE = "released.json"
_SLACK = 1 + 1e-6
_Unit = Literal["record", "client"]
_Part = Literal["record", "client", "test"]
"""What a total is for: a training sample, all training samples together, or a test sample."""
_PARTS: tuple[_Unit, ...] = ("record", "client")
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class Plan:
    """The noisy updates that a run asks for under a budget that this client keeps."""

    unit: _Unit
    multiplier: float
    """Noise over sensitivity of one update."""
    releases: int
    delta: float
    """The server's."""

    def epsilon(self, delta: float) -> float:
        """Return what all updates of the run cost."""
        return spent_epsilon({self.multiplier: self.releases}, delta)


def plan_releases(experiment: Experiment) -> Plan | None:
    """Return the noisy updates of a run; None if this client's noise does not protect them."""
    privacy = experiment.privacy
    if not privacy.has_budget or not (experiment.secure_aggregation or privacy.model == "local"):
        return None
    method: type[Method] = find_method(experiment.method)
    if issubclass(method, OneShot):
        mechanism = PrivateSums.of(privacy, has_moments=False)
        assert mechanism is not None
        return Plan(mechanism.unit, mechanism.multiplier, 1, privacy.delta)
    if not experiment.secure_aggregation:
        # `check_budget` rejects it.
        return None
    noise = fix_noise(experiment).privacy.noise
    assert noise is not None
    multiplier = noise / release_sensitivity(method)
    return Plan(privacy.unit_for(trains=True), multiplier, experiment.rounds, privacy.delta)


def check_plan(experiment: Experiment, plan: Plan | None, policy: ClientPolicy) -> None:
    """Refuse a run that the policy does not allow, whatever was released before."""
    budget = policy.budget
    if budget.required:
        if plan is None:
            asked = f"privacy.model {experiment.privacy.model!r}"
            asked = asked if experiment.privacy.has_budget else "a run without a budget"
            raise refusal("budget required", "true", asked)
        if experiment.secure_aggregation and policy.secure_aggregation.honest_clients is None:
            asked = (
                "noise of all clients, whose number [secure_aggregation] honest_clients must set"
            )
            raise refusal("budget required", "true", asked)
    if experiment.privacy.has_budget and policy.data.min_class_count > 1:
        # Whether a class is left out would depend on a single sample, without noise.
        raise refusal("data min_class_count", policy.data.min_class_count, "a run with a budget")
    if plan is None:
        return
    if plan.delta > budget.max_delta:
        raise refusal("budget max_delta", f"{budget.max_delta:g}", f"{plan.delta:g}")
    if plan.releases > budget.max_releases:
        raise refusal("budget max_releases", budget.max_releases, f"{plan.releases} in this run")
    _check_run(plan.epsilon(budget.max_delta), policy)


def _check_run(epsilon: float, policy: ClientPolicy) -> None:
    budget = policy.budget
    if epsilon > budget.max_epsilon_per_run * _SLACK:
        asked = f"{epsilon:.3g} (at delta {budget.max_delta:g})"
        raise refusal("budget max_epsilon_per_run", f"{budget.max_epsilon_per_run:g}", asked)


@checked_dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Release:
    """One noisy update."""

    run: str
    round: int
    unit: _Unit
    multiplier: _Positive


@checked_dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Released:
    """Everything that was released, the content of the file."""

    announced: dict[str, _Count]
    """By run: the number of noisy updates that its first message announced."""
    releases: list[Release]
    answers: dict[str, _Count]
    """By run: the number of answers about test samples."""
    noisy: dict[str, _Positive]
    """By run: the sum of epsilon of its noisy answers."""

    def spent(self, part: _Part, delta: float, run: str = "") -> float:
        """Return epsilon of all runs, or of one.

        An update that hides all samples of a client hides one of them at half the multiplier: its
        values are clipped to a norm, so that one sample moves them by at most twice that norm.
        """
        if part == "test":
            return self.noisy.get(run, 0.0) if run else sum(self.noisy.values())
        made: dict[float, int] = {}
        for each in self.releases:
            if part in (each.unit, "record") and run in ("", each.run):
                multiplier = each.multiplier if each.unit == part else each.multiplier / 2
                made[multiplier] = made.get(multiplier, 0) + 1
        return spent_epsilon(made, delta)


_RELEASED = TypeAdapter(Released)


class ClientLedger:
    """The account of one client, on disk."""

    def __init__(self, folder: Path, policy: ClientPolicy) -> None:
        self._path, self._policy = folder / LEDGER_FILE, policy
        self.released = self._read()

    def is_charged(self, run: str, round_number: int) -> bool:
        """Return whether the update of a round was released."""
        return any((each.run, each.round) == (run, round_number) for each in self.released.releases)

    def begin(self, run: str, round_number: int, plan: Plan | None) -> None:
        """Refuse a round that is not covered; fix a run's number of updates at its first one."""
        if run in self.released.announced:
            if plan is None:
                raise ClientRefusal("this run began with a budget; it must keep it.")
        elif plan is not None:
            known = {**self.released.announced, run: plan.releases}
            self._check_total(replace(self.released, announced=known), plan, plan.releases)
            # A run that releases nothing leaves no trace, so that the file stays small.
            self.released = replace(self.released, announced=known)
        if plan is not None:
            self.charged(run, round_number, plan)

    def release(self, run: str, round_number: int, plan: Plan) -> None:
        """Charge the update of a round, once; refuse it if it is not covered."""
        self._write(self.charged(run, round_number, plan))

    def charged(self, run: str, round_number: int, plan: Plan) -> Released:
        """Return the account with the update of a round; refuse it if it is not covered."""
        budget, before = self._policy.budget, self.released
        if self.is_charged(run, round_number):
            return before
        made = sum(each.run == run for each in before.releases)
        if made >= before.announced[run]:
            raise ClientRefusal(
                f"policy [budget]: this run announced {before.announced[run]} noisy updates in its "
                f"first message; the server asked for number {made + 1}."
            )
        new = Release(run=run, round=round_number, unit=plan.unit, multiplier=plan.multiplier)
        after = replace(before, releases=[*before.releases, new])
        _check_run(after.spent(plan.unit, budget.max_delta, run), self._policy)
        self._check_total(before, plan, 1)
        return after

    def answer(self, run: str, most: int, epsilon: float) -> str | None:
        """Charge an answer about test samples; return the rule that forbids it, or None.

        `most` is the number of answers that the run needs, `epsilon` is 0 for an exact answer.
        """
        rules, budget, before = self._policy.evaluation, self._policy.budget, self.released
        count, total = before.answers.get(run, 0), sum(before.answers.values())
        if count >= min(most, rules.max_answers_per_run):
            return f"[evaluation] max_answers_per_run ({min(most, rules.max_answers_per_run)})"
        if total >= rules.max_answers:
            return f"[evaluation] max_answers ({rules.max_answers})"
        after = replace(before, answers={**before.answers, run: count + 1})
        if epsilon:
            spent = before.noisy.get(run, 0.0) + epsilon
            after = replace(after, noisy={**before.noisy, run: spent})
            if spent > budget.max_epsilon_per_run * _SLACK:
                return f"[budget] max_epsilon_per_run ({budget.max_epsilon_per_run:g})"
            if after.spent("test", budget.max_delta) > budget.max_epsilon * _SLACK:
                return f"[budget] max_epsilon ({budget.max_epsilon:g})"
        self._write(after)
        return None

    def summary(self) -> Mapping[str, float]:
        """Return epsilon spent so far: for a training sample, all of them, and a test sample."""
        delta, found = self._policy.budget.max_delta, self.released
        return {
            "training sample": found.spent("record", delta),
            "all training samples": found.spent("client", delta),
            "test sample": found.spent("test", delta),
        }

    def _check_total(self, before: Released, plan: Plan, count: int) -> None:
        """Refuse `count` more updates if they exceed the limits over all runs."""
        budget = self._policy.budget
        if len(before.releases) + count > budget.max_releases:
            asked = f"{count} more after {len(before.releases)}"
            raise refusal("budget max_releases", budget.max_releases, asked)
        new = Release(run="-", round=0, unit=plan.unit, multiplier=plan.multiplier)
        after = replace(before, releases=[*before.releases, *[new] * count])
        for part in _PARTS:
            total, spent = (each.spent(part, budget.max_delta) for each in (after, before))
            if total > budget.max_epsilon * _SLACK:
                asked = f"{total:.3g} in total, of which {spent:.3g} is spent"
                raise refusal("budget max_epsilon", f"{budget.max_epsilon:g}", asked)

    def _read(self) -> Released:
        if not self._path.is_file():
            return Released(announced={}, releases=[], answers={}, noisy={})
        try:
            return _RELEASED.validate_json(self._path.read_bytes())
        except (OSError, ValidationError):
            # A damaged file must not count as empty.
            raise InvalidInput(
                f"{self._path} cannot be read, so the spent budget is unknown; it must be restored "
                "from a backup."
            ) from None

    def _write(self, released: Released) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, _RELEASED.dump_json(released))
        self._path.chmod(0o600)
        self.released = released


def release_once(
    ledger: ClientLedger, store: ClientStateStore, round_number: int, plan: Plan, drawn: Tensors
) -> Tensors:
    """Return the noisy values of a round: the stored ones, or `drawn`, stored and charged.

    They are checked, stored and charged in this order: after a crash at any moment the round is
    either repeated with the same values, or not charged yet.
    """
    run, found = store.folder.name, store.find_drawn(round_number)
    if found is None:
        if ledger.is_charged(run, round_number):
            raise ClientRefusal(
                f"policy [budget]: the noisy update of round {round_number} was sent before and is "
                "no longer stored; it cannot be drawn again."
            )
        # Raises if it is not covered.
        ledger.charged(run, round_number, plan)
        store.keep_drawn(round_number, drawn)
        found = drawn
    ledger.release(run, round_number, plan)
    return found
