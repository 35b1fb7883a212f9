"""The page of `fenchel claims`: every entry, its checks, its pictures."""
