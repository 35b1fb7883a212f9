"""The papers' results as executable claims. Here: constants as printed that are false."""
