"""Deciphering Attention Mechanisms: Optimization and Fenchel Dual Solutions (D)."""
