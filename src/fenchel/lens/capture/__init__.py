"""What a model computes as it runs: the one place where the lens looks into a model."""
