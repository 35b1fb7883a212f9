"""Settings for the whole suite."""

import torch

# Small tensors, and workers that already fill the cores: threads would wait for each other.
torch.set_num_threads(1)
