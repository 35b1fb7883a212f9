"""The page of results, its maps and its curves, from the runs that are stored."""
