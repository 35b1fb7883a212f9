"""Settings for the whole suite."""

import torch

# Small tensors, and workers that already fill the cores: threads would wait for each other.
torch.set_num_threads(1)

# Warnings are errors here. Torch gives some only the first time in a process, so which test
# met one depended on how the tests were shared out; now every test meets its own.
torch.set_warn_always(True)
