"""One client at work for one round: it reads the round before, and trains."""

from dataclasses import replace

import torch

from mpfedcl.data.client_data import FederatedData
from mpfedcl.engines import InProcessEngine
from mpfedcl.experiment import Experiment
from mpfedcl.messages import Broadcast, LateReading, Share, Update
from mpfedcl.methods import Method
from mpfedcl.models import Model, Tensors
from mpfedcl.rng import generator
from mpfedcl.rounds.clock import Clock
from mpfedcl.rounds.evaluation import Examiner, by_reading, count_answers, single, tabulate


class Desk:
    """A client with its data and its model, and what it kept of earlier rounds."""

    def __init__(
        self,
        experiment: Experiment,
        method: Method,
        model: Model,
        data: FederatedData,
        device: torch.device,
    ) -> None:
        self._method, self._model, self._data = method, model, data
        self._name = data.names[0]
        dtype = getattr(torch, experiment.dtype)
        drawn = model.init(generator(experiment.seed, "weights"), dtype)
        self._initial = {name: value.to(device) for name, value in drawn.items()}
        self._engine = InProcessEngine(experiment, method, model, data, self._initial, Clock())

    def read(
        self, broadcast: Broadcast, settled: Tensors, is_personal: bool, confuse: bool
    ) -> LateReading:
        """Read the round before: the client's own model after it, and what it became on average."""
        shares_all = all(self._method.shared(name) for name in self._initial)
        averaged = broadcast.params if shares_all else None
        personal = _group(settled, "personal") if is_personal else None
        examiner = Examiner(
            self._data.test_inputs,
            self._data.test_labels,
            self._method.project,
            # The server sends what predictions are compared with.
            broadcast.pool if self._method.shares_prototypes else None,
        )
        asked = [
            examiner.ask(lambda inputs, p=params: single(self._model.apply(p, inputs)))[0]  # type: ignore[misc]
            if params
            else None
            for params in (personal, averaged)
        ]
        answers = by_reading(*asked)
        labels, own = self._data.test_labels, self._data.clients[0].test
        table = tabulate(answers, labels, own)
        said = answers[self._method.reading]
        counts = None
        if confuse and said is not None and len(labels):
            counts = count_answers(said, labels, self._data.num_classes)
        # Nobody here knows the others' test images.
        union = dict.fromkeys(table["union"])
        return LateReading({"own": table["own"], "union": union}, bool(personal), counts)

    def train(self, broadcast: Broadcast, settled: Tensors) -> tuple[Update, Tensors]:
        """Train; return the update, and what to keep in case the server accepts it."""
        at_home = {name: settled[name] for name in settled if not name.startswith("personal/")}
        self._engine.load_state(
            {_name_client(name, self._name): value for name, value in at_home.items()}
        )
        (update,) = self._engine.train(broadcast, [self._name], keep=[self._name])
        if isinstance(update.sums, Share):
            update = replace(update, sums=update.sums.stack.tensors(update.sums.index))
        self._engine.settle([self._name])
        ((_, personal),) = self._engine.personal_models(broadcast.params)
        kept = {
            _unname_client(name, self._name): value for name, value in self._engine.state().items()
        }
        return update, {**kept, **{f"personal/{name}": v for name, v in personal.items()}}


def _group(tensors: Tensors, name: str) -> Tensors:
    prefix = f"{name}/"
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _name_client(key: str, client: str) -> str:
    """Return an engine's key for what a site keeps without its own name: kept/x, kept/CLIENT/x."""
    kind, _, name = key.partition("/")
    return f"{kind}/{client}/{name}"


def _unname_client(key: str, client: str) -> str:
    kind, _, name = key.partition("/")
    return f"{kind}/{name.removeprefix(f'{client}/')}"
