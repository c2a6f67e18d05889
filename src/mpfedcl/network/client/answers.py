"""A client's answers about its test samples: exact, noisy or none, as its policy says.

The same question gets the same answer, which is counted once: a server that resumes a run asks
again, and the mean of many noisy answers would have little noise.
"""

import hashlib
import json
import math
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy

from mpfedcl.core.files import write_atomically
from mpfedcl.experiment import Experiment
from mpfedcl.gaussian.mechanism import add_exact_counts
from mpfedcl.methods import PREDICTORS, TESTS, Asynchronous, Method, PredictorKind
from mpfedcl.network.client.budget import ClientLedger
from mpfedcl.network.client.policy import EvaluationPolicy
from mpfedcl.network.client.state import ClientStateStore
from mpfedcl.network.packing import ReportedEvaluation
from mpfedcl.network.transport import Kind, Message

_KEPT = 4
"""Number of answers of a run that are kept."""


def answer_kind(policy: EvaluationPolicy, experiment: Experiment) -> str:
    """Return how the client answers in a run: exact, noisy or none."""
    is_exact = policy.answers == "exact"
    return "noisy" if is_exact and experiment.privacy.has_budget else policy.answers


def answer_evaluation(
    policy: EvaluationPolicy,
    ledger: ClientLedger,
    store: ClientStateStore,
    method: Method,
    kind: Kind,
    message: Message,
    evaluation: ReportedEvaluation,
    num_tests: int,
) -> dict[str, Any]:
    """Return what the server is told of an evaluation, the answer to `message`."""
    how, experiment = answer_kind(policy, method.experiment), method.experiment
    untold = ReportedEvaluation(
        {test: dict.fromkeys(PREDICTORS) for test in TESTS}, evaluation.is_personal
    )
    if how == "none" or not num_tests:
        return vars(untold)
    key, path = _sign(kind, message), store.folder / "answers.json"
    known: dict[str, Any] = {}
    # A lost or damaged file costs an answer.
    with suppress(OSError, ValueError):
        known = json.loads(path.read_bytes())
    if key in known:
        return dict(known[key])
    most = sys.maxsize if isinstance(method, Asynchronous) else experiment.rounds + 1
    epsilon = policy.epsilon if how == "noisy" else 0.0
    if rule := ledger.answer(store.folder.name, most, epsilon):
        print(f"No answer about test samples: policy {rule}.", file=sys.stderr, flush=True)
        return vars(untold)
    told = evaluation
    if how == "noisy":
        told = replace(untold, table=_add_noise(evaluation.table, method, num_tests, epsilon))
    store.make_folder()
    latest = dict([*known.items(), (key, vars(told))][-_KEPT:])
    write_atomically(path, json.dumps(latest).encode())
    return vars(told)


def _add_noise(
    table: Mapping[str, Mapping[str, float | None]], method: Method, num_tests: int, epsilon: float
) -> dict[str, dict[str, float | None]]:
    """Return the accuracy of one predictor, from noisy counts of right and wrong predictions.

    Each test sample is in one of the two counts, so noise of scale 1 / epsilon suffices. A
    predictor that estimates label shares is not used: one sample changes its other predictions.
    """
    predictor: str = method.predictor_on("local_test")
    if PredictorKind.of(predictor).prior == "estimated":
        predictor = "global_classifier"
    told: dict[str, dict[str, float | None]] = {t: dict.fromkeys(PREDICTORS) for t in TESTS}
    percent = table["local_test"].get(predictor)
    if percent is None or not math.isfinite(percent):
        return told
    right = round(percent / 100 * num_tests)
    noisy = [max(0, each) for each in add_exact_counts([right, num_tests - right], epsilon)]
    told["local_test"][predictor] = 100 * noisy[0] / sum(noisy) if sum(noisy) else None
    return told


def _sign(kind: Kind, message: Message) -> str:
    """Return a digest of a question: the models, and the round that they are of."""
    digest = hashlib.sha256(f"{kind} {message.value('round', int)}".encode())
    digest.update(f" {message.value('settled', int)}".encode())
    for name in sorted(message.arrays):
        array = numpy.ascontiguousarray(message.arrays[name])
        digest.update(f"{name} {array.dtype} {array.shape} ".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
