"""Kept sums against loops over samples: exact both ways, and nothing is left of who leaves."""

import numpy
import pytest
import torch
from clients_cases import Client, draw_clients, within_by_loop

from mpfedcl.core.tensors import Tensors
from mpfedcl.gaussian import (
    SecondMoment,
    add_statistics,
    complete_pool,
    own_statistics,
    pack_symmetric,
    pool_of_one,
    pool_parts,
    scatter_rows,
    sum_samples,
    sums_to_fit,
    take_from_pool,
    within_from_moment,
)

CLIENTS = draw_clients(3, [[5, 0, 4], [1, 7, 0], [6, 2, 3]], shift=0.5)


def sent_by(client: Client, second_moment: SecondMoment | None = "within") -> Tensors:
    return sum_samples(client.features, client.labels, 3, second_moment)


def statistics_of(client: Client) -> Tensors:
    return own_statistics(sent_by(client))


def pool_of(clients: list[Client], second_moment: SecondMoment | None = "within") -> Tensors:
    pooled: Tensors = {}
    for client in clients:
        pooled = add_statistics(pooled, pool_of_one(statistics_of(client), second_moment))
    return pooled


def test_statistics_of_a_client_are_sums_over_its_samples() -> None:
    for client in CLIENTS:
        own = statistics_of(client)
        torch.testing.assert_close(own["moment"], client.features.T @ client.features)
        within = within_from_moment(own["moment"], own["counts"], own["sums"])
        numpy.testing.assert_allclose(within.numpy(), within_by_loop(client, 3), atol=1e-14)
        rows = scatter_rows(own)
        assert len(rows) <= len(client.labels) - int((own["counts"] > 0).sum())
        torch.testing.assert_close(rows.T @ rows, within, rtol=0, atol=1e-13)


def test_pooled_statistics_match_loops() -> None:
    pooled = pool_of(CLIENTS)
    everything = torch.cat([client.features for client in CLIENTS])
    torch.testing.assert_close(pooled["moment"], everything.T @ everything)
    within = [within_by_loop(client, 3) for client in CLIENTS]
    numpy.testing.assert_allclose(pooled["within"].numpy(), sum(within), atol=1e-14)
    degrees = [len(c.labels) - len(set(c.labels.tolist())) for c in CLIENTS]
    scatter = sum((w**2).sum() / f for w, f in zip(within, degrees, strict=True))
    assert float(pooled["scatter"]) == pytest.approx(scatter, rel=1e-12)
    assert pooled["groups"].tolist() == [3, 2, 2]
    assert pooled["counts_squared"].tolist() == [25 + 1 + 36, 49 + 4, 16 + 9]
    squares = [0.0, 0.0, 0.0]
    for client in CLIENTS:
        for label in set(client.labels.tolist()):
            own = client.features[client.labels == label]
            squares[label] += float(own.sum(0).square().sum()) / len(own)
    assert pooled["squares"].tolist() == pytest.approx(squares, rel=1e-12)


@pytest.mark.parametrize("second_moment", [None, "within", "moment"])
def test_unlearning_restores_the_other_clients_statistics(
    second_moment: SecondMoment | None,
) -> None:
    leaver = statistics_of(CLIENTS[1])
    if second_moment is None:
        leaver = {name: leaver[name] for name in ("counts", "sums")}
    whole = add_statistics(
        pool_of([CLIENTS[0]], second_moment), pool_of_one(statistics_of(CLIENTS[1]), second_moment)
    )
    if second_moment is None:
        whole.pop("moment")
    left = take_from_pool(whole, leaver, second_moment)
    alone = pool_of([CLIENTS[0]], second_moment)
    for name, value in left.items():
        torch.testing.assert_close(value, alone[name], rtol=0, atol=1e-14)
    # Nobody else had class 1: no rounding is left of it.
    assert left["sums"][1].tolist() == [0.0] * 6
    assert float(left["squares"][1]) == 0


def test_unlearning_leaves_no_rounding_in_an_empty_scatter() -> None:
    single = draw_clients(5, [[1, 1, 0], [0, 1, 1]], shift=0.5)
    pooled = pool_of([*single, *CLIENTS])
    for client in CLIENTS:
        pooled = take_from_pool(pooled, statistics_of(client), "within")
    assert not pooled["within"].any()
    assert not pooled["scatter"]


def test_statistics_are_selected_for_a_method() -> None:
    pooled = pool_of(CLIENTS)
    fitted = sums_to_fit(pooled, "within")
    assert fitted.keys() == {"counts", "sums", "within", "scatter"}
    sent = [sent_by(client) for client in CLIENTS]
    torch.testing.assert_close(fitted["within"], sum(each["within"] for each in sent))
    assert torch.equal(sums_to_fit(pooled, "moment")["moment"], pack_symmetric(pooled["moment"]))
    assert sums_to_fit(pooled, None).keys() == {"counts", "sums"}


@pytest.mark.parametrize("second_moment", [None, "within", "moment"])
def test_totals_give_the_same_pooled_statistics(second_moment: SecondMoment | None) -> None:
    parts: Tensors = {}
    sums: Tensors = {}
    for client in CLIENTS:
        sent = sent_by(client, second_moment)
        parts = add_statistics(parts, pool_parts(sent))
        sums = add_statistics(sums, sent)
    found = complete_pool(parts, sums)
    wanted = pool_of(CLIENTS, second_moment)
    assert found.keys() == wanted.keys() - ({"moment"} if second_moment is None else set())
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-13)
