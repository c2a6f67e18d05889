"""A server that asks a real client for whatever it likes, as often as it likes."""

from pathlib import Path
from typing import Any

import torch

from mpfedcl.data.client_data import FederatedData
from mpfedcl.experiment import Experiment
from mpfedcl.methods import find_method, prototype_rule
from mpfedcl.methods.messages import Broadcast
from mpfedcl.models import Model
from mpfedcl.network.client import ClientRefusal
from mpfedcl.network.client.client import NetworkClient
from mpfedcl.network.client.policy import ClientPolicy
from mpfedcl.network.packing import pack_broadcast
from mpfedcl.network.setup.folders import ClientSettings
from mpfedcl.network.transport import FORMAT, Kind, Message
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.assembly import assemble

RUN = "0123456789abcdef" * 2


class LyingServer:
    """Messages to one client; each is answered by a new process, which knows what is on disk."""

    def __init__(self, experiment: Experiment, data: Path, memory: Path, policy: Any) -> None:
        self.experiment = experiment.resolved(find_method(experiment.method).defaults).replace(
            dataset__classes=("cat", "dog")
        )
        self.settings = ClientSettings("north", memory, data, policy=ClientPolicy(**policy))
        self.client = NetworkClient(self.settings)
        self._loaded: tuple[Experiment, FederatedData, Model] | None = None

    def hello(self, **changes: Any) -> Message:
        """Ask the client to introduce itself."""
        self.client = NetworkClient(self.settings)
        asked = self.experiment.replace(**changes)
        document = {"format": FORMAT, "experiment": asked.to_toml()}
        return self.client.answer("hello", Message(document))

    def ask(
        self,
        kind: Kind = "round",
        number: int = 1,
        *,
        run: str = RUN,
        read: bool = False,
        seed: int = 0,
        **changes: Any,
    ) -> Message:
        """Send a request of a round; `seed` draws the model that comes with it."""
        asked = self.experiment.replace(**changes)
        if self._loaded is None:
            self.hello()
            self._loaded = self.client.loaded
            assert self._loaded is not None
        _, data, model = self._loaded
        self.client = NetworkClient(self.settings)
        parts = assemble(asked, model, num_classes=data.num_classes, input_size=data.input_size)
        drawn = torch.Generator().manual_seed(seed)
        params = {
            name: value + 0.1 * seed * torch.randn(value.shape, generator=drawn).to(value)
            for name, value in parts.initial.items()
        }
        rule, method = prototype_rule(parts.method), parts.method
        pool = PrototypePool.empty(
            data.num_classes,
            parts.model.embedding_size,
            rule.num_prototypes,
            dtype=next(iter(params.values())).dtype,
        )
        extra = method.init_server(parts.initial).extra
        packed = pack_broadcast(Broadcast(number, params, extra, pool))
        values = {
            **packed.values,
            "format": FORMAT,
            "experiment": asked.to_toml(),
            "run": run,
            "settled": 0,
            "read": read,
        }
        return self.client.answer(kind, Message(values, packed.arrays))

    def refusal(self, *args: Any, **changes: Any) -> str:
        """Return the client's refusal of a request."""
        try:
            self.ask(*args, **changes)
        except ClientRefusal as error:
            return str(error)
        raise AssertionError("the client has answered")
