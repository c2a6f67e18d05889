"""How clients differ: the moments by loops over all pairs, and effects that are known."""

import numpy
import pytest
import torch
from clients_cases import draw_clients, group_means
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfedcl.gaussian import ClientEffects, ClientMeans, estimate_effects

TRACE = 0.7


def effects_by_loops(groups: ClientMeans, trace: float) -> tuple[float, float]:
    """Return t_b and t_e from Q_ijc written out."""
    num_clients, num_classes = groups.num_clients, groups.num_classes
    n = numpy.zeros((num_clients, num_classes))
    means = numpy.zeros((num_clients, num_classes, groups.vectors.shape[1]))
    for row in range(len(groups.counts)):
        place = int(groups.owners[row]), int(groups.labels[row])
        n[place], means[place] = groups.counts[row], groups.vectors[row]
    n_c, n_i = n.sum(0), n.sum(1)
    mu = (n[:, :, None] * means).sum(0) / numpy.maximum(n_c, 1)[:, None]
    away = numpy.where(n[:, :, None] > 0, means - mu, 0)
    num_groups, held = int((n > 0).sum()), int((n_c > 0).sum())
    excess = (n * (away**2).sum(2)).sum() / trace - (num_groups - held)
    room = n.sum() - (n**2 / numpy.maximum(n_c, 1)).sum()
    total = max(0.0, excess) / room if room > 1e-9 else 0.0
    p, w = n / n_i[:, None], n / numpy.maximum(n_c, 1)
    between = (n_i * ((p[:, :, None] * away).sum(1) ** 2).sum(1)).sum() / trace
    x_b = x_e = x_0 = 0.0
    for i in range(num_clients):
        for j in range(num_clients):
            q = p[i] * ((i == j) - w[j])
            x_b += n_i[i] * q.sum() ** 2
            x_e += n_i[i] * (q**2).sum()
            x_0 += n_i[i] * sum(q[c] ** 2 / n[j, c] for c in range(num_classes) if n[j, c])
    if abs(x_b - x_e) < 1e-9 * n.sum():
        return 0.0, total
    shift = min(max((between - x_0 - total * x_e) / (x_b - x_e), 0.0), total)
    return shift, total - shift


@settings(max_examples=40)
@given(
    st.lists(
        st.lists(st.integers(0, 6), min_size=3, max_size=3).filter(any), min_size=1, max_size=5
    ),
    st.integers(0, 5),
    st.sampled_from([0.0, 1.0]),
)
def test_variances_match_loops_over_all_pairs(
    sizes: list[list[int]], seed: int, shift: float
) -> None:
    groups = group_means(draw_clients(seed, sizes, shift=shift), 3)
    found = estimate_effects(groups.totals(), groups.class_means, TRACE)
    assert found == pytest.approx(effects_by_loops(groups, TRACE), abs=1e-9)


def test_clients_of_one_distribution_have_no_effect() -> None:
    """By chance alone the excess is about nothing: far below the spread of samples."""
    groups = group_means(draw_clients(1, [[60, 60, 60]] * 8), 3)
    trace = float(1 - groups.class_means.square().sum(1).mean())
    found = estimate_effects(groups.totals(), groups.class_means, trace)
    assert found.shift + found.by_class < 0.005


@pytest.mark.parametrize(("shift", "effect"), [(0.9, 0.0), (0.0, 0.9)])
def test_shift_and_class_effect_are_distinguished(shift: float, effect: float) -> None:
    clients = draw_clients(2, [[20] * 6] * 40, size=30, shift=shift, effect=effect)
    groups = group_means(clients, 6)
    trace = float(1 - groups.vectors.square().sum(1).mean())
    found = estimate_effects(groups.totals(), groups.class_means, trace)
    larger, smaller = found if shift else found[::-1]
    assert larger > 5 * smaller


def test_prototypes_match_the_formula() -> None:
    groups = group_means(draw_clients(3, [[3, 0, 5], [1, 4, 0]], shift=1.0), 3)
    mu, effects = groups.class_means, ClientEffects(0.4, 0.1)
    shifts = effects.shifts(groups, mu)
    prototypes = effects.group_means(groups, mu, shifts)
    for client in range(2):
        rows = (groups.owners == client).nonzero().squeeze(1).tolist()
        v = {row: 1 / (0.1 + 1 / float(groups.counts[row])) for row in rows}
        away = {row: groups.vectors[row] - mu[groups.labels[row]] for row in rows}
        b = 0.4 * sum(v[r] * away[r] for r in rows) / (1 + 0.4 * sum(v.values()))
        torch.testing.assert_close(shifts[client], b)
        for row in rows:
            expected = mu[groups.labels[row]] + b + 0.1 * v[row] * (away[row] - b)
            torch.testing.assert_close(prototypes[row], expected)


def test_without_effects_all_prototypes_of_a_class_coincide() -> None:
    groups = group_means(draw_clients(3, [[3, 0, 5], [1, 4, 0]]), 3)
    mu, effects = groups.class_means, ClientEffects(0.0, 0.0)
    shifts = effects.shifts(groups, mu)
    assert not shifts.any()
    assert torch.equal(effects.group_means(groups, mu, shifts), mu[groups.labels])
