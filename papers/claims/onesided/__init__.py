"""Scaled-Dot-Product Attention as One-Sided Entropic Optimal Transport, and a note on it (L)."""
