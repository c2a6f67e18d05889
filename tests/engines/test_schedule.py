"""The schedule of samples: the batches of the loop for several clients at once."""

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tasks import make_client

from mpfedcl.data.client_data import ClientData
from mpfedcl.engines.trainers.base import ClientTask, Schedule, draw_batches
from mpfedcl.engines.trainers.base import make_schedule as schedule_tasks
from mpfedcl.experiment import Experiment
from mpfedcl.methods import LocalTraining

FLAMBY = {"train__steps": 100, "train__batch_size": 4}
quick = settings(deadline=None, max_examples=40)
sizes = st.lists(st.integers(1, 23), min_size=1, max_size=7)


def make_experiment(seed: int = 0, epochs: int = 1, batch_size: int = 4) -> Experiment:
    return Experiment(seed=seed).replace(train__epochs=epochs, train__batch_size=batch_size)


def make_schedule(
    clients: Sequence[ClientData], experiment: Experiment, round_number: int
) -> Schedule:
    tasks = [ClientTask(client, {}, {}, {}, round_number) for client in clients]
    return schedule_tasks(tasks, experiment)


@quick
@given(sizes, st.integers(0, 99), st.integers(1, 3), st.integers(1, 30), st.integers(1, 5))
def test_schedule_has_every_sample_once_per_epoch_in_loop_order(
    sizes: list[int], seed: int, epochs: int, batch_size: int, round_number: int
) -> None:
    experiment = make_experiment(seed, epochs, batch_size)
    clients = [make_client(size, number) for number, size in enumerate(sizes)]
    schedule = make_schedule(clients, experiment, round_number)

    assert sorted(client.name for client in schedule.clients) == [c.name for c in clients]
    assert list(schedule.num_steps) == sorted(schedule.num_steps, reverse=True)
    assert schedule.samples.shape == schedule.mask.shape
    assert schedule.samples.shape[:2] == (len(clients), schedule.num_steps[0])
    assert schedule.num_rows == schedule.samples.shape[2] == min(batch_size, max(sizes))
    assert schedule.samples[~schedule.mask].eq(0).all()

    for number, client in enumerate(schedule.clients):
        size = len(client.labels)
        batches = draw_batches(client, experiment, round_number)
        assert schedule.num_steps[number] == len(batches) == epochs * -(-size // batch_size)
        for step in range(schedule.num_steps[0]):
            due = schedule.samples[number, step][schedule.mask[number, step]]
            wanted = batches[step].tolist() if step < len(batches) else []
            assert due.tolist() == wanted
            # Real samples come first.
            assert schedule.mask[number, step, : len(wanted)].all()
        in_order = schedule.samples[number][schedule.mask[number]].tolist()
        for epoch in range(epochs):
            assert sorted(in_order[epoch * size : (epoch + 1) * size]) == list(range(size))
        assert len(in_order) == epochs * size


@quick
@given(st.integers(1, 23), st.integers(1, 30), st.integers(1, 40))
def test_fixed_steps_are_the_first_batches_of_as_many_epochs_as_needed(
    size: int, batch_size: int, steps: int
) -> None:
    client = make_client(size)
    fixed = Experiment().replace(train__steps=steps, train__batch_size=batch_size)
    found = draw_batches(client, fixed, 2)
    epochs = draw_batches(client, make_experiment(0, steps, batch_size), 2)
    assert len(found) == steps == fixed.train.num_steps(size)
    assert [b.tolist() for b in found] == [b.tolist() for b in epochs[:steps]]
    passes = LocalTraining.of(fixed.train, 2).passes(size, batch_size)
    assert size * passes == pytest.approx(sum(map(len, found)))


@quick
@given(st.integers(1, 40), st.integers(1, 3), st.integers(2, 8))
def test_single_last_sample_shares_evenly_with_the_batch_before(
    size: int, epochs: int, batch_size: int
) -> None:
    experiment = make_experiment(0, epochs, batch_size)
    plain = draw_batches(make_client(size), experiment, 1)
    found = draw_batches(make_client(size), experiment, 1, least=2)
    assert torch.equal(torch.cat(found), torch.cat(plain))
    if size % batch_size != 1 or size == 1:
        assert [b.tolist() for b in found] == [b.tolist() for b in plain]
    else:
        full = [batch_size] * (size // batch_size - 1)
        last = [-(-(batch_size + 1) // 2), (batch_size + 1) // 2]
        assert [len(b) for b in found] == [*full, *last] * epochs


def test_hundred_updates_of_four_samples_as_in_flamby() -> None:
    # 10 samples: 33 epochs of 4, 4 and 2, then a batch of 4.
    batches = draw_batches(make_client(10), Experiment().replace(**FLAMBY), 1)
    assert [len(batch) for batch in batches] == [4, 4, 2] * 33 + [4]
    assert set(Counter(torch.cat(batches).tolist()).values()) == {33, 34}


def test_batches_after_whole_epochs_and_repeats_are_in_order() -> None:
    training = LocalTraining(0.1, 0.0, epochs=1, repeats=2, batches=2)
    found = draw_batches(make_client(5), make_experiment(), 1, training)
    once = draw_batches(make_client(5), make_experiment(epochs=2), 1)
    assert [b.tolist() for b in found] == [b.tolist() for b in once for _ in range(2)]
    assert training.passes(5, 4) == 2 * (1 + 1)


@quick
@given(sizes, st.integers(1, 3), st.integers(1, 30))
def test_clients_that_still_train_are_the_first_ones(
    sizes: list[int], epochs: int, batch_size: int
) -> None:
    clients = [make_client(size, number) for number, size in enumerate(sizes)]
    schedule = make_schedule(clients, make_experiment(0, epochs, batch_size), 1)
    for step in range(schedule.num_steps[0] + 1):
        busy = [step < count for count in schedule.num_steps]
        assert schedule.active(step) == sum(busy)
        assert busy == sorted(busy, reverse=True)
        if step < schedule.num_steps[0]:
            assert schedule.mask[:, step].any(1).tolist() == busy


@quick
@given(sizes, st.integers(1, 3), st.integers(1, 30))
def test_inputs_and_labels_are_in_the_order_of_steps(
    sizes: list[int], epochs: int, batch_size: int
) -> None:
    clients = [make_client(size, number) for number, size in enumerate(sizes)]
    schedule = make_schedule(clients, make_experiment(0, epochs, batch_size), 1)
    inputs, labels = schedule.inputs(), schedule.labels()
    for number, client in enumerate(schedule.clients):
        for row, sample in enumerate(schedule.samples[number].flatten().tolist()):
            assert torch.equal(inputs[number, row], client.inputs[sample])
            assert labels[number, row] == client.labels[sample]


def test_one_sample_clients_have_one_row_a_step() -> None:
    clients = [make_client(1, 0), make_client(9, 1), make_client(1, 2)]
    schedule = make_schedule(clients, make_experiment(epochs=2, batch_size=4), 1)
    assert [client.name for client in schedule.clients] == ["client-1", "client-0", "client-2"]
    assert schedule.num_steps == [6, 2, 2]
    assert schedule.mask.sum(2).tolist() == [
        [4, 4, 1, 4, 4, 1],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
    ]
    alone = make_schedule(clients[:1], make_experiment(batch_size=4), 1)
    assert alone.samples.tolist() == [[[0]]]
    assert alone.mask.tolist() == [[[True]]]


@pytest.mark.parametrize("change", ["seed", "round", "name", "epoch"])
def test_order_depends_on_seed_round_name_and_epoch(change: str) -> None:
    client = make_client(20)
    first = draw_batches(client, make_experiment(epochs=2, batch_size=20), 1)
    other = {
        "seed": lambda: draw_batches(client, make_experiment(1, 2, 20), 1)[0],
        "round": lambda: draw_batches(client, make_experiment(0, 2, 20), 2)[0],
        "name": lambda: draw_batches(make_client(20, 1), make_experiment(0, 2, 20), 1)[0],
        "epoch": lambda: first[1],
    }[change]()
    assert Counter(other.tolist()) == Counter(first[0].tolist())
    assert other.tolist() != first[0].tolist()
