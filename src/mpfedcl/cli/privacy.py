"""Plan privacy budgets and show the messages of a client: `privacy plan`, `privacy receipt`."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from mpfedcl.cli.arguments import PrivacyPlan, PrivacyReceipt
from mpfedcl.cli.terminal import print_json, stdout_console
from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.network.client.policy import ClientPolicy, DataPolicy
from mpfedcl.network.receipt import Field, Receipt, make_receipt
from mpfedcl.network.setup.folders import ClientFolder, ClientSettings
from mpfedcl.privacy.plan import Plan, RoundsPlan, SumsPlan, to_json
from mpfedcl.report.tables import TextTable

_ADVICE = {"nothing": "too noisy", "means": "means", "moments": "moments too", "model": "usable"}
_OWN = ("epsilon", "dimension", "json")
"""Arguments that are not fields of a plan."""


def privacy_plan_command(arguments: PrivacyPlan) -> None:
    """Show the cost of privacy budgets."""
    if not arguments.epsilon:
        raise InvalidInput("epsilon is empty; it must name at least one budget: --epsilon 1 3.")
    given = {name: value for name, value in vars(arguments).items() if name not in _OWN}
    plan = Plan(**given, dimensions=arguments.dimension)
    of_sums = [] if plan.rounds else plan.for_sums(arguments.epsilon)
    of_rounds = plan.for_rounds(arguments.epsilon) if plan.rounds else []
    if arguments.json:
        print_json(to_json(plan, of_rounds or of_sums))
        return
    console = stdout_console()
    whom = {"record": "one image", "client": "all images of one client"}[plan.unit]
    console.print(
        f"Cost of privacy budgets for adding or removing {whom}, at delta {plan.delta:g}; "
        f"{'the server adds' if plan.model == 'central' else 'each client adds'} the noise."
    )
    if plan.rounds:
        _show_rounds(console, plan, of_rounds)
    else:
        _show_sums(console, plan, of_sums)


def _show_sums(console: Console, plan: Plan, rows: Sequence[SumsPlan]) -> None:
    of_means = ["noise in means", "error of a mean"]
    of_moments = ["noise with moments", "in the moment", "per eigenvalue"]
    TextTable(
        f"one-shot method: {plan.images:,} images, {plan.clients:,} clients, {plan.classes:,} "
        f"classes, {plan.dimensions:,} dimensions",
        ["epsilon", *of_means, *of_moments, "send"],
        [
            [
                f"{row.epsilon:g}",
                f"{row.sigma_means:.3g}",
                f"{100 * row.means_error:.3g} %",
                f"{row.sigma_moments:.3g}",
                f"{row.moment_sigma:.3g}",
                f"{100 * row.moments_error:.3g} %",
                _ADVICE[row.advice],
            ]
            for row in rows
        ],
        "Noise: standard deviation in each count and each entry of a sum. Error of a mean: its "
        "expected norm, for features of norm 1. Per eigenvalue: the largest effect of the noise on "
        "the second moment in one direction, divided by the mean eigenvalue. Second moments are "
        "sent with --privacy.moments.",
    ).show(console)


def _show_rounds(console: Console, plan: Plan, rows: Sequence[RoundsPlan]) -> None:
    TextTable(
        f"{plan.rounds:,} rounds: {plan.clients:,} clients, a fraction of {plan.fraction:g}, "
        f"{plan.parameters:,} parameters",
        ["epsilon", "noise / clip", "error per round", "clients for 100 %", "model"],
        [
            [
                f"{row.epsilon:g}",
                f"{row.multiplier:.3g}",
                f"{100 * row.model_error:.3g} %",
                f"{row.clients_needed:,}",
                _ADVICE[row.advice],
            ]
            for row in rows
        ],
        "Error per round: norm of the noise in the mean model change, divided by the largest norm "
        "of a client's change (privacy.clip).",
    ).show(console)


def privacy_receipt_command(arguments: PrivacyReceipt) -> None:
    """Show the messages that a client would send."""
    if (arguments.data is None) == (arguments.share is None):
        raise InvalidInput("one of --data and --share must be given.")
    threshold = arguments.threshold
    if threshold is not None and threshold < 1:
        raise InvalidInput(f"threshold is {threshold}; it must be at least 1.")
    if arguments.data is not None and not arguments.data.exists():
        raise InvalidInput(f"data is {str(arguments.data)!r}; it must be a folder or a file.")
    state, file = Path(), arguments.policy
    if arguments.client is not None:
        client = ClientFolder.open(arguments.client, None)
        state, file = client.memory, file or client.policy
    policy = ClientPolicy() if file is None else ClientPolicy.read(file)
    if threshold is not None:
        data = DataPolicy(**{**dict(policy.data), "min_class_count": threshold})
        policy = ClientPolicy(**{**dict(policy), "data": data})
    settings = ClientSettings(
        name="this-client",
        state=state,
        data=arguments.data,
        share=arguments.share,
        encoder=arguments.encoder,
        encoder_weights=arguments.encoder_weights,
        policy=policy,
    )
    file = arguments.settings
    if file.is_dir():
        file /= "experiment.toml"
    receipt = make_receipt(Experiment.from_toml(file), settings)
    if arguments.json:
        known = {"least": receipt.least, "policy": policy.model_dump(mode="json")}
        print_json({**asdict(receipt), **known})
    else:
        stdout_console().print(policy.to_toml(), markup=False, highlight=False, soft_wrap=True)
        _show_receipt(stdout_console(), receipt)
    if threshold is not None and (below := receipt.below(threshold)):
        raise InvalidInput(
            f"threshold is {threshold}; {below[0].name} would be sent with a value of only "
            f"{below[0].least} images: take part only with a privacy budget, or with more images."
        )


def _show_receipt(console: Console, receipt: Receipt) -> None:
    console.print(f"Messages of this client: {receipt.method}, {receipt.train:,} training samples.")
    headers = ["reply to", "field", "values", "bytes", "fewest samples per value"]
    if receipt.covered:
        TextTable(
            "covered by the ledger: noise protects each sample",
            [*headers, "epsilon"],
            [[*_row(each), f"{each.epsilon:.3g}"] for each in receipt.covered],
            "Epsilon of an update: of all noisy updates of the run together. Epsilon of late: of "
            "one answer.",
        ).show(console)
    TextTable(
        "not covered: sent as it is",
        headers,
        [_row(each) for each in receipt.not_covered],
        "- : the values depend on no single sample.",
    ).show(console)
    spent = ", ".join(f"{value:.3g} of {name}" for name, value in receipt.spent.items())
    console.print(f"Epsilon spent before this run: {spent}.")
    console.print(_describe_budget(receipt))
    console.print("Nothing was sent.", style="bold")


def _row(field: Field) -> list[str]:
    least = "-" if field.least is None else f"{field.least:,}"
    return [field.message, field.name, f"{field.numbers:,}", f"{field.num_bytes:,}", least]


def _describe_budget(receipt: Receipt) -> str:
    if receipt.epsilon is None:
        return "Privacy budget: none, so there is no guarantee."
    unit = {"record": "one image", "client": "all images of this client"}[receipt.unit]
    honest = f"if at least {receipt.honest_clients} of its clients are honest"
    if receipt.honest_clients == 1:
        honest = "by this client's own part of it"
    who = {
        "local": "protected by this client's noise, also against the server",
        "sum": f"protected by the noise in the clients' sum, also against the server, {honest}",
        "central": "protected by the server's noise; the server sees the exact values",
    }[receipt.model]
    promise = f"epsilon {receipt.epsilon:.3g} at delta {receipt.delta:g} for {unit}"
    return f"Privacy budget: {promise}, {who}."
