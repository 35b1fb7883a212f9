"""Attention: the expectation of values under the distribution that solves the problem."""

from fenchel._attention.front import attention, explain
from fenchel._attention.solution import AttentionSolution, attention_solution

__all__ = ["AttentionSolution", "attention", "attention_solution", "explain"]
