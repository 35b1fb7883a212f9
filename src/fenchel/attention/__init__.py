"""Attention: the expectation of values under the distribution that solves the problem."""

from fenchel.attention.front import attention
from fenchel.attention.replace import replace_sdpa
from fenchel.attention.solution import AttentionSolution, attention_solution

__all__ = ["AttentionSolution", "attention", "attention_solution", "replace_sdpa"]
