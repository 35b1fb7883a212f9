"""Kernels in Triton. A file that imports triton is itself imported when a call needs it."""
