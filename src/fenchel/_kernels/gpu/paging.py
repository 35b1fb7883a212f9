"""Where tokens stand: in one tensor, or in pages of a cache. Shared by the kernels of decoding.

`pages` is None, or a `Pages` (`split.py`); an operand of a cache is (page, head, token, component).
A run of keys that a program reads never crosses a page.
"""

import triton
import triton.language as tl

from fenchel._kernels.pages import PAGE as _PAGE

PAGE = tl.constexpr(_PAGE)


@triton.jit
def page_of(pages, b, token):
    """The pages that hold these tokens, counted in sequence b."""
    return tl.load(pages.numbers + b.to(tl.int64) * pages.chunks + token // PAGE)


@triton.jit
def run_base(operand, pages, bh, heads, first):
    """Where the run of tokens begins whose first one is `first`."""
    b, h = bh // heads, bh % heads
    base = operand.data + h.to(tl.int64) * operand.strides[1]
    if pages is None:
        return base + b.to(tl.int64) * operand.strides[0] + first.to(tl.int64) * operand.strides[2]
    else:
        page = page_of(pages, b, first).to(tl.int64)
        return base + page * operand.strides[0] + (first % PAGE) * operand.strides[2]


@triton.jit
def token_bases(operand, pages, bh, heads, token, there):
    """Where each of these tokens stands."""
    b, h = bh // heads, bh % heads
    base = operand.data + h.to(tl.int64) * operand.strides[1]
    if pages is None:
        base += b.to(tl.int64) * operand.strides[0]
        return base + token.to(tl.int64) * operand.strides[2]
    else:
        number = pages.numbers + b.to(tl.int64) * pages.chunks + token // PAGE
        page = tl.load(number, mask=there, other=0).to(tl.int64)
        return base + page * operand.strides[0] + (token % PAGE) * operand.strides[2]
