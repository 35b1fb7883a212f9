"""What the tests of this room assert; test_reference.py feeds each of them a wrong answer."""

import numpy as np
import torch


def array(x):
    return (
        x.detach().double().numpy() if isinstance(x, torch.Tensor) else np.asarray(x, dtype=float)
    )


def assert_near(actual, expected, bar):
    """Every number within bar (1 + |expected|); shapes equal, NaN never."""
    actual, expected = array(actual), array(expected)
    assert actual.shape == expected.shape, f"{actual.shape} is not {expected.shape}"
    error = np.abs(actual - expected) / (1 + np.abs(expected))
    assert np.all(error <= bar), f"error {np.max(error, initial=0):.3g}, at most {bar:g}"


def assert_rows_near(actual, expected, bar):
    """As `assert_near`, each row (first axis) measured by its largest number."""
    actual, expected = array(actual), array(expected)
    assert actual.shape == expected.shape, f"{actual.shape} is not {expected.shape}"
    rest = tuple(range(1, actual.ndim))
    error = np.abs(actual - expected).max(rest) / (1 + np.abs(expected).max(rest))
    assert np.all(error <= bar), (
        f"error {np.max(error, initial=0):.3g} in row {error.argmax()}, {bar:g}"
    )


def assert_relative(actual, expected, bar):
    """Every number within bar |expected|: for numbers close to zero."""
    actual, expected = array(actual), array(expected)
    assert actual.shape == expected.shape, f"{actual.shape} is not {expected.shape}"
    error = np.abs(actual - expected) / np.abs(expected)
    assert np.all(error <= bar), f"relative error {np.max(error, initial=0):.3g}, at most {bar:g}"


def assert_mean(samples, expected, deviations=5.0):
    """The mean over the first axis is the expected one up to so many standard errors."""
    samples, expected = array(samples), array(expected)
    assert samples.shape[1:] == expected.shape, f"{samples.shape[1:]} is not {expected.shape}"
    error = samples.std(0, ddof=1) / np.sqrt(len(samples))
    far = np.abs(samples.mean(0) - expected)
    assert np.all(far <= deviations * error), f"{np.max(far / error):.3g} standard errors away"


def assert_says(caught, *words):
    """The message holds every word."""
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
