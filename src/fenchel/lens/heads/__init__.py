"""The audit of every head of a model: capture, sums, store, table."""
