"""."""

MUTATIONS = {}
WITHOUT = {}
