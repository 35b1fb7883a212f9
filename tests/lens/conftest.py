"""Models come from configurations and folders, never from the network."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported, which reads it once
