"""The page of `python -m papers claims`: every entry, its checks, its pictures."""
