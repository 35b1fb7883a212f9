"""The papers fenchel stands on: their claims checked, their experiments trained. Not installed."""
