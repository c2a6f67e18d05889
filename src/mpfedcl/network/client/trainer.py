"""Evaluation and training of one client in one round."""

from dataclasses import replace

from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.data.client_data import FederatedData
from mpfedcl.engines import InProcessEngine
from mpfedcl.methods import (
    PREDICTORS,
    Asynchronous,
    ClosedForm,
    PredictorKind,
    PredictorName,
    SharesPrototypes,
    prototype_rule,
)
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.network.client.state import FinalState
from mpfedcl.network.messages import ReportedEvaluation
from mpfedcl.privacy.releases import released_predictors
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.assembly import Assembly
from mpfedcl.rounds.metrics import count_confusions, percent_correct
from mpfedcl.rounds.predictions import (
    Evaluator,
    GlobalScorer,
    PersonalScorer,
    Predictions,
    as_stack,
)


class ClientTrainer:
    """Evaluates and trains one client."""

    def __init__(self, assembly: Assembly, data: FederatedData) -> None:
        self._method, self._model, self._data = assembly.method, assembly.model, data
        self._rule = prototype_rule(assembly.method)
        self._name = data.names[0]
        self._initial = assembly.initial
        self._engine = InProcessEngine(assembly, data)

    def personal_model(self, broadcast: Broadcast, state: Tensors) -> Tensors:
        """Return the personalized model after the previous round; empty if there is none.

        It is part of the state, or for one-shot methods computed from the broadcast.
        """
        if self._method.trains:
            return _group(state, "personal")
        if not isinstance(self._method, ClosedForm):
            return {}
        client, received = self._data.clients[0], self._method.prepare(broadcast)
        return self._method.personalize(received, client.inputs, client.labels) or {}

    def received_models(self, broadcast: Broadcast) -> tuple[Tensors | None, PrototypePool | None]:
        """Return the global model and the prototype pool; None if the server does not send them."""
        shares_all = all(self._method.shared(name) for name in self._initial)
        method, before = self._method, broadcast.round - 1
        pool = None
        if isinstance(method, SharesPrototypes) and method.sends_pool and method.shares_in(before):
            pool = broadcast.pool
        return broadcast.params if shares_all else None, pool

    def evaluate(
        self, broadcast: Broadcast, personal: Tensors, with_confusion: bool
    ) -> ReportedEvaluation:
        """Evaluate the personalized and the global model after the previous round."""
        averaged, pool = self.received_models(broadcast)
        evaluator = Evaluator(
            self._data.test_inputs,
            self._data.test_labels,
            self._rule.project,
            pool,
            self._method.experiment.contrast.temperature,
        )
        shared = self._predict(evaluator, averaged, with_similarities=True) if averaged else None
        if not self._method.trains:
            # Features are the same for all clients; only scores are personal.
            evaluator = replace(evaluator, reference=None)
        elif evaluator.reference is not None:
            own_reference = self._rule.reference_of(self._name, evaluator.reference)
            evaluator = replace(evaluator, reference=own_reference)
        own = self._predict(evaluator, personal) if personal else None
        read, judged = self._predict_local(shared, own), self._method.predictor_on("local_test")
        said, told = read.get(judged), released_predictors(self._method)
        truth, counts = self._data.test_labels, None
        if with_confusion and said is not None and len(truth):
            counts = count_confusions(said, truth, self._data.num_classes)
        # The global test set is unknown here.
        global_test: dict[str, float | None] = dict.fromkeys(PREDICTORS)
        local_test: dict[str, float | None] = dict.fromkeys(PREDICTORS)
        local_test |= {r: percent_correct(each == truth) for r, each in read.items() if r in told}
        is_personal = bool(personal) and not self._method.experiment.privacy.has_budget
        table = {"local_test": local_test, "global_test": global_test}
        return ReportedEvaluation(table, is_personal, counts)

    def _predict_local(
        self, averaged: Predictions | None, personal: Predictions | None
    ) -> dict[PredictorName, Tensor]:
        """Return the predicted classes of the local test set by predictor."""
        tests = self._engine.predictors.tests
        said: dict[PredictorName, Tensor | None] = {}
        if averaged is not None and len(tests.labels):
            shared = GlobalScorer(tests, averaged, tests.sizes.new_zeros(1))
            said |= {
                r: shared.predict(r, 0) for r in PREDICTORS if PredictorKind.of(r).model == "global"
            }
        if personal is not None:
            own = PersonalScorer(tests, 0, personal, True)
            said |= {
                r: own.predict("local_test", r)
                for r in PREDICTORS
                if PredictorKind.of(r).model == "personal"
            }
        return {predictor: each for predictor, each in said.items() if each is not None}

    def final_state(
        self, broadcast: Broadcast, state: Tensors, evaluation: ReportedEvaluation
    ) -> FinalState:
        """Return the client's models after the last round."""
        averaged, pool = self.received_models(broadcast)
        personal = self.personal_model(broadcast, state)
        return FinalState(broadcast.round - 1, averaged, pool, personal, evaluation)

    def _predict(
        self, evaluator: Evaluator, params: Tensors, *, with_similarities: bool = False
    ) -> Predictions:
        def apply(inputs: Tensor) -> tuple[Tensor, Tensor]:
            return as_stack(self._model.apply(params, inputs))

        (predictions,) = evaluator.predict(apply, with_similarities=with_similarities)
        return predictions

    def note_delay(self, state: Tensors, seconds: float) -> Tensors:
        """Return the state updated by the delay of the client's last accepted answer."""
        own = _group(state, "own")
        if not own or not isinstance(self._method, Asynchronous):
            return state
        noted = self._method.note_delay(own, seconds)
        return {**state, **{f"own/{name}": value for name, value in noted.items()}}

    def train(self, broadcast: Broadcast, state: Tensors) -> tuple[Update, Tensors]:
        """Train; return the update, and the new state in case the server accepts it."""
        kept_before = {n: value for n, value in state.items() if not n.startswith("personal/")}
        kept = {_add_client(name, self._name): value for name, value in kept_before.items()}
        self._engine.restore(kept, {})
        (update,) = self._engine.train(broadcast, [self._name], keep=[self._name])
        self._engine.keep_accepted([self._name])
        personal = dict(self._engine.personal_models(broadcast.params)).get(self._name, {})
        kept = {
            _remove_client(name, self._name): value for name, value in self._engine.state().items()
        }
        return update.written_out(), kept | as_personal(personal)


def as_personal(params: Tensors) -> Tensors:
    """Return a personalized model under the names of a client's state."""
    return {f"personal/{name}": value for name, value in params.items()}


def _group(tensors: Tensors, name: str) -> Tensors:
    prefix = f"{name}/"
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _add_client(key: str, client: str) -> str:
    """Return the engine's key for a key of the client's state: kept/CLIENT/x for kept/x."""
    kind, _, name = key.partition("/")
    return f"{kind}/{client}/{name}"


def _remove_client(key: str, client: str) -> str:
    kind, _, name = key.partition("/")
    return f"{kind}/{name.removeprefix(f'{client}/')}"
