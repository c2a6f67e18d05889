"""The part of a model card that says what the model may give away."""

from collections.abc import Mapping
from typing import Any

from mpfedcl.experiment.wording import describe_budget
from mpfedcl.report.card_subject import CardSubject


def privacy_section(subject: CardSubject) -> str:
    """Return what the model may give away, and what is promised."""
    if told := subject.summary.get("privacy"):
        return "## Privacy\n\n" + "".join(f"- {note}\n" for note in _budget_notes(subject, told))
    summary, pool, noun = subject.summary, subject.pool, subject.noun
    notes = ["There is no privacy guarantee of any kind."]
    if pool is not None and len(pool):
        alone = int((pool.counts == 1).sum())
        notes.append(
            f"Prototypes are averages of embeddings. The pool has {len(pool):,}; the smallest "
            f"is the average of {int(pool.counts.min()):,} {subject.noun}s."
        )
        if alone:
            notes.append(
                f"A prototype of one {noun} is that {noun}'s embedding; {alone:,} are like this. "
                "`--prototypes.min-cluster-size` forbids them."
            )
    if summary["parameters_sent"] and subject.trains:
        notes.append("Weights were sent too, and weights can reveal what they were trained on.")
    elif summary["parameters_sent"]:
        notes.append(f"Sums were sent, and sums over few {noun}s can reveal these {noun}s.")
    if any(name.startswith("models/") for name in subject.files):
        notes.append(
            "The folder `models` holds each client's own model: leave it out before you publish."
        )
    return "## Privacy\n\n" + "".join(f"- {note}\n" for note in notes)


def _budget_notes(subject: CardSubject, told: Mapping[str, Any]) -> list[str]:
    """Return what a budget promises of this card's files, and what it does not."""
    model = subject.experiment.privacy.model
    noun = subject.noun
    against = (
        "It holds against everybody but the server, which saw what clients sent without noise."
        if model == "central"
        else "It holds against everybody, the server included: noise was added before anything "
        "left a client."
    )
    return [
        f"Differential privacy: {describe_budget(told)}. {against}",
        f"It is about training {noun}s, and holds for the model, the pool, the sums and the "
        f"records. It does not cover test {noun}s, which nobody trained on: accuracies are "
        "exact.",
        "`partition.json` of a simulation and the folders `checkpoint` and `privacy` reveal more: "
        "leave them out before you publish.",
        "Each further run on the same data spends a budget of its own; they add up.",
    ]
