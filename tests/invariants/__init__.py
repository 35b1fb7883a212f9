"""Properties that hold for every input, searched for counter-examples by Hypothesis."""
