"""Shapes-VQA: drawn pictures of coloured shapes, and balanced questions about them."""

from papers.experiments.data.shapes.features import load_seen
from papers.experiments.data.shapes.loading import load_shapes
from papers.experiments.data.shapes.scene import VERSION

__all__ = ["VERSION", "load_seen", "load_shapes"]
