"""Lookups: by function, table and matrix."""

import pytest
import torch

from fenchel.measures import Empirical, Lookup

from .draws import F64, close, measure, normal, shares


def test_a_matrix_acts_as_a_matrix():
    w, mu = normal(2, 3), measure(5, 3)
    assert close((mu @ Lookup(w)).points, mu.points @ w.mT, 0.0)
    assert close((mu @ Lookup(torch.tanh)).points, mu.points.tanh(), 0.0)


def test_a_table_gives_each_key_its_value():
    keys, values = normal(4, 2), normal(4, 3, seed=1)
    table = Lookup.table(keys, values)
    order = torch.tensor([2, 0, 3, 3])
    assert close(table.at(keys[order]).mean, values[order], 0.0)


def test_a_repeated_key_has_mass_one():  # Vuckovic et al., 2020, definition 5
    keys = torch.tensor([[0.0], [1.0], [0.0], [0.0]], dtype=F64)
    values = normal(4, 2)
    at = Lookup.table(keys, values).at(keys[:2])
    assert close(at.weights.sum(-1), torch.ones(2, dtype=F64), 1e-15)
    assert close(at.mean[0], values[[0, 2, 3]].mean(0), 1e-15)
    assert close(at.mean[1], values[1], 0.0)


def test_weights_of_pairs_give_the_law_of_the_value_given_the_key():
    keys = torch.tensor([[0.0], [1.0], [0.0]], dtype=F64)
    values, w = normal(3, 2), shares(3)
    joint = (w.unsqueeze(-1) * values).sum(0)
    table = Lookup.table(keys, values, w)
    assert close((Empirical(keys, w) @ table).mean, joint, 1e-15)
    even = (Empirical(keys, w) @ Lookup.table(keys, values)).mean
    assert not close(even, joint, 1e-3)


def test_a_stranger_is_refused():
    keys = normal(3, 2)
    for lookup in (Lookup.table(keys, keys), Lookup.stochastic(keys, shares(3, 3))):
        with pytest.raises(ValueError, match=r"x at \(1,\) is not a key .* Lookup\(function\)"):
            lookup.at(torch.stack([keys[0], keys[1] + 1e-12]))


def test_batches_of_tables():
    keys, values = normal(2, 4, 3), normal(2, 4, 1, seed=1)
    assert close(Lookup.table(keys, values).at(keys).mean, values, 0.0)


def test_a_stochastic_matrix_may_lead_elsewhere():
    points, targets, matrix = normal(3, 2), normal(5, 1, seed=1), shares(3, 5)
    K = Lookup.stochastic(points, matrix, targets)
    assert close(K.at(points).mean, matrix @ targets, 1e-15)
    mu = Empirical(points, shares(3, seed=4))
    assert close((mu @ K).weights, mu.weights @ matrix, 1e-15)


def test_derivatives_reach_values_and_matrix():
    points = normal(3, 2)

    def by_matrix(scores):
        return Lookup.stochastic(points, torch.softmax(scores, -1)).at(points).mean

    def by_value(values):
        return Lookup.table(points, values).at(points[:2]).mean

    assert torch.autograd.gradcheck(by_matrix, (normal(3, 3).requires_grad_(),))
    assert torch.autograd.gradcheck(by_value, (normal(3, 1).requires_grad_(),))
