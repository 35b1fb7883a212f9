"""Measurements: times as ratios, derivatives as largest differences, and what the machine has."""
