"""Settings for the whole suite."""

import os

import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers already fill the cores; threads on top of them would only wait for each other.
    torch.set_num_threads(1)
