"""Kernels in Triton. A file that imports triton is itself imported when a call needs it.

Fused attention is computed in chunks of row blocks, each in a few launches (`launch.py`):

    bound     one pass over all keys; a lower bound of each row's threshold, largest score per tile
    listing   the tiles that hold a score above the bound
    pack      candidates: keys above the bound, as lists of fixed capacity
    attend    the threshold and the output, from the lists
    attend_tiles   the same from the tiles, for the row blocks with a list that overflows

Rules for every kernel: it reads nothing that it writes, every element has one writer, no atomics,
no assembly, no device library, no decision of the host by a value on the device. So the same
numbers come out whatever runs first, in Triton's interpreter as on a device.
"""
