"""Attention: the expectation of values under the distribution that solves the problem."""

from fenchel._attention.front import attention, explain

__all__ = ["attention", "explain"]
