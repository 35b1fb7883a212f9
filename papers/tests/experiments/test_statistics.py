"""Means and differences over seeds, against numbers from tables and from scipy."""

import pytest
from scipy import stats

from papers.experiments.statistics import Estimate, estimate, paired


def test_an_interval_by_hand():
    """1 to 5: mean 3, deviation sqrt(5 / 2); Student's t with 4 degrees has 2.776445 at 97.5 %."""
    result = estimate([1.0, 2.0, 3.0, 4.0, 5.0])
    assert result.mean == 3.0
    assert result.half == pytest.approx(2.776445 * (2.5 / 5) ** 0.5, rel=1e-6)
    assert result.count == 5


def test_two_runs_have_a_wide_interval():
    """12.7062 with one degree, times |a - b| / 2."""
    assert estimate([0.80, 0.82]).half == pytest.approx(12.7062 * 0.01, rel=1e-5)


def test_an_interval_by_scipy():
    values = [0.871, 0.883, 0.8795, 0.9012]
    result = estimate(values)
    low, high = stats.t.interval(0.95, 3, loc=sum(values) / 4, scale=stats.sem(values))
    assert (result.mean - result.half, result.mean + result.half) == pytest.approx((low, high))


def test_one_run_tells_no_interval():
    result = estimate([0.7])
    assert result == Estimate(0.7, None, 1)
    assert not result.beyond_zero
    assert result.text() == "70.00"
    with pytest.raises(ValueError, match="at least one"):
        estimate([])


def test_differences_are_of_the_same_seed():
    scores = {0: 0.81, 1: 0.86, 2: 0.79, 7: 0.1}
    base = {2: 0.78, 1: 0.84, 0: 0.80, 9: 0.9}
    difference = paired(scores, base)
    assert difference.count == 3
    assert difference.mean == pytest.approx((0.01 + 0.02 + 0.01) / 3)
    test = stats.ttest_rel([0.81, 0.86, 0.79], [0.80, 0.84, 0.78])
    low, high = test.confidence_interval(0.95)
    assert (difference.mean - difference.half, difference.mean + difference.half) == pytest.approx(
        (low, high)
    )
    assert difference.beyond_zero == (test.pvalue < 0.05)


def test_no_common_seed_no_difference():
    assert paired({0: 1.0}, {1: 1.0}) is None
    assert paired({}, {}) is None
    assert paired({0: 1.0, 1: 5.0}, {1: 2.0}) == Estimate(3.0, None, 1)


@pytest.mark.parametrize(
    ("mean", "half", "beyond"), [(0.3, 0.2, True), (-0.3, 0.2, True), (0.3, 0.4, False)]
)
def test_whether_zero_is_left_out(mean, half, beyond):
    assert Estimate(mean, half, 3).beyond_zero is beyond
    assert Estimate(mean, half, 3).shows is beyond
    assert Estimate(mean, half, 2).beyond_zero is beyond
    assert not Estimate(mean, half, 2).shows


def test_as_text():
    assert Estimate(0.87654, 0.0123, 5).text() == "87.65 ± 1.23"
    assert Estimate(12.345, 1.0, 5).text(percent=False) == "12.35 ± 1.00"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_refused(value):
    for values in ([value], [0.5, value]):
        with pytest.raises(ValueError, match=r"needs finite values, got .*(nan|inf)"):
            estimate(values)
