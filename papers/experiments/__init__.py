"""Training runs that repeat the papers' tables, on one loop."""
