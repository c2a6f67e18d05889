"""Which samples a client takes in each step of a round: the same whatever the engine."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpfedcl.core.rng import generator
from mpfedcl.data.client_data import ClientData
from mpfedcl.experiment import Experiment


def draw_batches(
    client: ClientData,
    experiment: Experiment,
    round_number: int,
    *,
    epochs: int | None = None,
    repeats: int = 1,
) -> list[Tensor]:
    """Return the samples of each step: every epoch in a new order, the last batch as it comes.

    The epochs are the experiment's where none are given; each batch serves `repeats` steps.
    """
    size = min(len(client.labels), experiment.train.batch_size)
    batches: list[Tensor] = []
    for epoch in range(experiment.train.epochs if epochs is None else epochs):
        key = generator(experiment.seed, round_number, client.name, "batches", epoch)
        order = torch.randperm(len(client.labels), generator=key).to(client.labels.device)
        batches += [batch for batch in torch.split(order, size) for _ in range(repeats)]
    return batches


@dataclass(frozen=True)
class Schedule:
    """The steps of several clients side by side, clients with most steps first."""

    clients: Sequence[ClientData]
    samples: Tensor
    """[clients, steps, rows] int64 indices into each client's own samples; 0 where none is due."""
    mask: Tensor
    """[clients, steps, rows] where a sample is due."""
    num_steps: Sequence[int]
    """Steps of each client; they never increase, so those at work are always the first ones."""

    @property
    def num_rows(self) -> int:
        """Rows of a step: the largest batch."""
        return self.samples.shape[2]

    def active(self, step: int) -> int:
        """Return how many clients have not finished before a step."""
        return sum(step < each for each in self.num_steps)

    def inputs(self) -> Tensor:
        """Return [clients, steps * rows, ...]: the inputs in the order in which they are due."""
        first = self.clients[0].inputs
        shape = (len(self.clients), self.samples[0].numel(), *first.shape[1:])
        due = first.new_empty(shape)
        for place, client, samples in zip(due, self.clients, self.samples, strict=True):
            torch.index_select(client.inputs, 0, samples.flatten(), out=place)
        return due

    def labels(self) -> Tensor:
        """Return [clients, steps * rows]: the labels in the order in which they are due."""
        pairs = zip(self.clients, self.samples, strict=True)
        return torch.stack([client.labels[samples.flatten()] for client, samples in pairs])


def make_schedule(
    clients: Sequence[ClientData],
    experiment: Experiment,
    round_number: int | Sequence[int],
    *,
    epochs: int | None = None,
    repeats: int = 1,
) -> Schedule:
    """Lay the steps of several clients side by side: of one round, or of one for each client."""
    rounds = [round_number] * len(clients) if isinstance(round_number, int) else round_number
    drawn = [
        (draw_batches(each, experiment, number, epochs=epochs, repeats=repeats), each)
        for each, number in zip(clients, rounds, strict=True)
    ]
    drawn.sort(key=lambda each: len(each[0]), reverse=True)
    num_rows = max(len(batch) for batches, _ in drawn for batch in batches)
    shape = (len(drawn), len(drawn[0][0]), num_rows)
    device = clients[0].labels.device
    samples = torch.zeros(shape, dtype=torch.int64, device=device)
    sizes = torch.zeros(shape[:2], dtype=torch.int64)
    for number, (batches, _) in enumerate(drawn):
        for step, batch in enumerate(batches):
            samples[number, step, : len(batch)] = batch
            sizes[number, step] = len(batch)
    mask = torch.arange(num_rows) < sizes.unsqueeze(2)
    return Schedule(
        [client for _, client in drawn],
        samples,
        mask.to(device),
        [len(batches) for batches, _ in drawn],
    )
