"""What measures fenchel against torch and its peers. Writes results/*.json; not installed."""
