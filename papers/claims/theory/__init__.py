"""Vuckovic, Baratin and Tachet des Combes, A Mathematical Theory of Attention (M)."""
