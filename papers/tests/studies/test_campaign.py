"""The long attack: a short run of every kind, and the long one (pytest -m slow)."""

import math

import pytest
import torch

from fenchel.bounds import Everywhere, VectorMap, token_map_lipschitz
from papers.studies import campaign
from papers.studies.campaign import MAPS, TRANSPORT, Draw, stand


def name(make):
    return make.__name__


@pytest.mark.parametrize("make", MAPS + TRANSPORT, ids=name)
def test_every_kind_stands(make):
    outcome = stand(make, 600, each=300, seed=1)
    assert outcome.trials == 600
    assert outcome.settings >= 2
    assert outcome.exceeded == 0
    assert 0 <= outcome.median <= outcome.worst <= 1 + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("make", MAPS, ids=name)
def test_every_map_stands_a_million_trials(make):
    outcome = stand(make, 1_000_000)
    print(outcome)
    assert outcome.trials >= 1_000_000
    assert outcome.exceeded == 0


@pytest.mark.slow
@pytest.mark.parametrize("make", TRANSPORT, ids=name)
def test_every_bound_between_measures_stands_a_hundred_thousand_trials(make):
    outcome = stand(make, 100_000)
    print(outcome)
    assert outcome.trials >= 100_000
    assert outcome.exceeded == 0


def false_sometimes(draw):
    """True for half of the settings."""
    bound = 1.0 if draw.uniform() < 0.5 else 0.9
    return token_map_lipschitz("sine", bound, VectorMap(torch.sin, (1, 2), Everywhere()))


def test_a_false_kind_is_counted():
    outcome = stand(false_sometimes, 4000, each=500)
    assert 0 < outcome.exceeded < outcome.settings
    assert outcome.worst > 1
    assert outcome.kind == "false sometimes"


def test_what_a_run_tells():
    told = []
    outcome = stand(false_sometimes, 1000, each=400, seed=3, tell=told.append)
    assert sum(told) == outcome.trials
    assert len(told) == outcome.settings
    assert outcome.as_json() == {
        "kind": "false sometimes",
        "settings": outcome.settings,
        "trials": outcome.trials,
        "worst": outcome.worst,
        "median": outcome.median,
        "exceeded": outcome.exceeded,
    }


def test_runs_repeat_themselves():
    once, again, other = (stand(campaign.query_softmax, 200, seed=s) for s in (0, 0, 1))
    assert once == again
    assert once != other


def test_draws_cover_what_they_say():
    draw = Draw(0)
    dims, sizes = ([make() for _ in range(4000)] for make in (draw.dim, draw.size))
    assert (min(dims), max(dims)) == (1, 64)
    assert (min(sizes), max(sizes)) == (2, 128)
    heats = [draw.temperature() for _ in range(4000)]
    assert 0.05 <= min(heats) < 0.06
    assert 9 < max(heats) <= 10
    ranks = {int(torch.linalg.matrix_rank(draw.matrix(4, 3))) for _ in range(100)}
    assert ranks == {1, 2, 3}
    assert {draw.choice("a", "b", "c") for _ in range(100)} == {"a", "b", "c"}
    assert math.isclose(sum(draw.uniform(2, 4) for _ in range(4000)) / 4000, 3, rel_tol=0.02)


def test_kinds_are_named_once():
    kinds = [make.__name__ for make in MAPS + TRANSPORT]
    assert len(set(kinds)) == len(kinds) == 21
