"""Farinhas, Visual Attention with Sparse and Continuous Transformations (F)."""
