"""The clients' data: samples of a set, split among them and turned into tensors."""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy
import torch
from torch import Tensor

from mpfedcl.data.client_split import describe_public, split_among_clients, split_own_samples
from mpfedcl.data.inputs import InputMaker, make_plain_inputs
from mpfedcl.data.reader import open_data_set
from mpfedcl.data.samples import SampleIndex, Subset
from mpfedcl.data.tables import find_columns, fit_tables
from mpfedcl.data.train_test_split import Indices
from mpfedcl.errors import InvalidInput
from mpfedcl.experiment import Experiment


@dataclass(frozen=True)
class ClientData:
    """One client: its training images, and which images of the union test set are its own."""

    name: str
    inputs: Tensor
    """[samples, numbers]: pixels standardized by the set's constants or in 0 to 1, or features."""
    labels: Tensor
    """[images], int64."""
    test: Tensor
    """[test images], int64: indices into the union test set; may be empty."""


@dataclass(frozen=True)
class FederatedData:
    """All clients in order of name, and the union of their test images, each once."""

    dataset: str
    class_names: tuple[str, ...]
    clients: tuple[ClientData, ...]
    test_inputs: Tensor
    test_labels: Tensor
    partition: dict[str, Any]
    """Who holds what, as `ClientSplit.describe` tells it."""
    holds_vectors: bool = False
    """Whether samples are vectors, and no images."""
    notices: tuple[str, ...] = ()
    """What whoever uses the data should know of them, a sentence each."""
    public: tuple[Tensor, Tensor] | None = None
    """Inputs and labels of training images that the server has in place of a client."""

    @property
    def num_classes(self) -> int:
        """Number of classes of the set, whether or not a client holds them."""
        return len(self.class_names)

    @property
    def input_size(self) -> int:
        """Numbers that stand for one sample."""
        # By shape: one client alone may have no image to be tested on.
        return math.prod(self.test_inputs.shape[1:])

    @property
    def names(self) -> tuple[str, ...]:
        """The clients' names in order."""
        return tuple(client.name for client in self.clients)

    def client(self, name: str) -> ClientData:
        """Return a client by name."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, ClientData]:
        return {client.name: client for client in self.clients}

    def with_clients(self, names: Collection[str]) -> Self:
        """Return the data of some clients, with the test images of all."""
        return replace(self, clients=tuple(c for c in self.clients if c.name in names))

    def with_one_client(self, name: str, new_name: str | None = None) -> Self:
        """Return one client's data with its own test images alone, under a new name if given."""
        client = self.client(name)
        own = replace(
            client, name=new_name or name, test=torch.arange(len(client.test)).to(client.test)
        )
        return replace(
            self,
            clients=(own,),
            test_inputs=self.test_inputs[client.test],
            test_labels=self.test_labels[client.test],
        )

    def label_counts(self) -> Indices:
        """Count the training images [clients, classes]."""
        counts = [
            torch.bincount(client.labels, minlength=self.num_classes).cpu().numpy()
            for client in self.clients
        ]
        return numpy.stack(counts)

    def to(self, device: torch.device | str) -> Self:
        """Return the data on a device."""
        clients = tuple(
            replace(
                client,
                inputs=client.inputs.to(device),
                labels=client.labels.to(device),
                test=client.test.to(device),
            )
            for client in self.clients
        )
        public = self.public
        return replace(
            self,
            clients=clients,
            test_inputs=self.test_inputs.to(device),
            test_labels=self.test_labels.to(device),
            public=public and (public[0].to(device), public[1].to(device)),
        )


def load_own_samples(
    experiment: Experiment,
    make_inputs: InputMaker | None = None,
    *,
    sample_index: SampleIndex,
    name: str,
) -> FederatedData:
    """Open the samples of one client that has them to itself, and hold some of them out."""
    train, test = split_own_samples(sample_index, name, experiment)
    if not len(train.labels):
        raise InvalidInput(
            f"data has {len(test.labels)} {sample_index.noun}s, and the split leaves none to "
            "train on; there must be more of a class, or the test fraction must be smaller."
        )
    everything = Subset.join([train, test])
    inputs = (make_inputs or make_plain_inputs)(sample_index, everything.rows, experiment)
    inputs = inputs.flatten(start_dim=1)
    labels, count = torch.from_numpy(everything.labels), len(train.labels)
    own = torch.arange(len(test.labels))
    client = ClientData(name, inputs[:count], labels[:count], own)
    return FederatedData(
        sample_index.name,
        sample_index.class_names,
        (client,),
        inputs[count:],
        labels[count:],
        {},
        sample_index.vector_width is not None,
        sample_index.notices,
    )


def load_federated_data(
    experiment: Experiment, make_inputs: InputMaker | None = None
) -> FederatedData:
    """Split an experiment's data set among the clients, then open the samples they need."""
    experiment = experiment.resolved()
    sample_index = open_data_set(experiment.dataset)
    split = split_among_clients(sample_index, experiment)
    sample_index = fit_tables(sample_index, split.training.values())
    make_inputs = make_inputs or make_plain_inputs
    inputs = make_inputs(sample_index, split.all_rows, experiment)
    # On record, because flat pixels no longer tell what images they were.
    shape, inputs = list(inputs.shape[1:]), inputs.flatten(start_dim=1)
    partition = {**split.describe(sample_index.class_names), "input_shape": shape}
    if columns := find_columns(sample_index):
        partition["columns"] = columns.to_json()
    clients = tuple(
        ClientData(
            name,
            inputs[torch.from_numpy(split.positions_of(subset))],
            torch.from_numpy(subset.labels),
            torch.from_numpy(split.own_test[name]),
        )
        for name, subset in split.training.items()
    )
    public, notices = None, sample_index.notices
    if split.public is not None:
        held_out = inputs[torch.from_numpy(split.positions_of(split.public))]
        public = held_out, torch.from_numpy(split.public.labels)
        notices = (*notices, *describe_public(len(split.public.labels), experiment))
    return FederatedData(
        sample_index.name,
        sample_index.class_names,
        clients,
        inputs[torch.from_numpy(split.positions_of(split.test))],
        torch.from_numpy(split.test.labels),
        {**partition, "input_means": {c.name: float(c.inputs.double().mean()) for c in clients}},
        sample_index.vector_width is not None,
        notices,
        public,
    )


def is_same_partition(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Tell whether two descriptions are of the same partition, up to rounding in the inputs."""
    # Older runs have neither a shape nor all means on record.
    means = {**now["input_means"], **before.get("input_means", {})}
    return _is_close({"input_shape": now.get("input_shape"), **before, "input_means": means}, now)


def _is_close(before: Any, now: Any) -> bool:
    if isinstance(before, dict) and isinstance(now, dict):
        names = before.keys()
        return names == now.keys() and all(_is_close(before[each], now[each]) for each in names)
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(_is_close, before, now))
    if isinstance(before, float) and isinstance(now, float):
        return math.isclose(before, now, rel_tol=1e-4, abs_tol=1e-6)
    return bool(before == now)
