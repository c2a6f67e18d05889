"""The clients' data: samples of a set, split among them and turned into tensors."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.by_client import ByClient
from mpfedcl.data.client_split import (
    ClientSplit,
    describe_public,
    split_among_clients,
    split_own_samples,
)
from mpfedcl.data.client_table import ClientData, ClientTable
from mpfedcl.data.inputs import InputMaker, make_plain_inputs
from mpfedcl.data.partition_table import with_input_means
from mpfedcl.data.reader import open_data_set
from mpfedcl.data.samples import SampleIndex, Subset
from mpfedcl.data.tables import find_columns, fit_tables
from mpfedcl.data.train_test_split import Indices
from mpfedcl.experiment import Experiment

__all__ = ["ClientData", "FederatedData", "load_federated_data", "load_own_samples"]


@dataclass(frozen=True)
class FederatedData:
    """All clients in order of name, and the union of their test images, each once."""

    dataset: str
    class_names: tuple[str, ...]
    clients: Sequence[ClientData]
    """Kept as a table, however they are given."""
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "clients", ClientTable.join(self.clients))

    @property
    def table(self) -> ClientTable:
        """The clients' samples in a few arrays, for whoever needs many clients at once."""
        assert isinstance(self.clients, ClientTable)
        return self.clients

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
        return self.table.names

    @property
    def sizes(self) -> dict[str, int]:
        """How many training samples each client has, in order of name."""
        return dict(zip(self.names, self.table.sizes.tolist(), strict=True))

    def client(self, name: str) -> ClientData:
        """Return a client by name."""
        return self.table.find(name)

    def with_clients(self, names: Collection[str]) -> Self:
        """Return the data of some clients, with the test images of all."""
        table = self.table.select(names)
        if table is self.table:
            return self
        # A copy: a view would hold on to the samples of all clients.
        return replace(self, clients=table, test_inputs=self.test_inputs.clone())

    def with_one_client(self, name: str, new_name: str | None = None) -> Self:
        """Return one client's data with its local test set images alone, under a new name if given."""
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
        return self.table.count_labels(self.num_classes)

    def label_counts_by_client(self) -> ByClient[list[int]]:
        """Return the same by name."""
        counts = self.label_counts()
        return ByClient(self.names, lambda place: counts[place].tolist())

    def to(self, device: torch.device | str) -> Self:
        """Return the data on a device."""
        public = self.public
        return replace(
            self,
            clients=self.table.to(device),
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
    # In the clients' order at once: then all that is anybody's is a view of this one tensor.
    inputs = make_inputs(sample_index, split.all_rows, experiment)
    # On record, because flat pixels no longer tell what images they were.
    shape, inputs = list(inputs.shape[1:]), inputs.flatten(start_dim=1)
    partition = {**split.describe(sample_index.class_names), "input_shape": shape}
    if columns := find_columns(sample_index):
        partition["columns"] = columns.to_json()
    num_public = 0 if split.public is None else len(split.public.labels)
    num_test = len(split.test.labels)
    trained, held_out, tested = torch.split(
        inputs, [len(inputs) - num_public - num_test, num_public, num_test]
    )
    table = _make_table(split, trained)
    public, notices = None, sample_index.notices
    if split.public is not None:
        public = held_out, torch.from_numpy(split.public.labels)
        notices = (*notices, *describe_public(num_public, experiment))
    return FederatedData(
        sample_index.name,
        sample_index.class_names,
        table,
        tested,
        torch.from_numpy(split.test.labels),
        with_input_means(partition, table.input_means()),
        sample_index.vector_width is not None,
        notices,
        public,
    )


def _make_table(split: ClientSplit, inputs: Tensor) -> ClientTable:
    training, local_test = split.training, split.local_test
    return ClientTable(
        training.names,
        inputs,
        torch.from_numpy(training.everything.labels),
        training.sizes,
        torch.arange(len(split.test.labels)),
        local_test.begins,
        local_test.sizes,
    )
