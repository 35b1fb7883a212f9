"""Decoding from a cache: one token after another, reading a part of the keys, and proving the rest.

Each new token asks all tokens before it. Under entmax most keys have weight zero. The cache keeps
one byte per key component, which is enough to prove that for all but a few keys. Only those are
read. The outputs are bit for bit those of attention over all keys.

    python examples/14_decode_from_a_cache.py --tokens 20000
"""

from __future__ import annotations

import torch
from _data import parser, track
from torch import Tensor

import fenchel as fl

HEADS, KV_HEADS, D = 8, 2, 64


def new_token() -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value; scores have a standard deviation of 2."""
    query = 2 * torch.randn(1, HEADS, 1, D)
    return query, torch.randn(1, KV_HEADS, 1, D), torch.randn(1, KV_HEADS, 1, D)


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__, "examples/14_decode_from_a_cache.py --tokens 20000")
    options.add_argument("--tokens", type=int, metavar="N", help="of the prompt (8000)")
    options.add_argument("--alpha", type=float, default=1.5, help="of the regulariser (1.5)")
    args = options.parse_args(argv)
    torch.manual_seed(args.seed)
    prompt = args.tokens or (1000 if args.quick else 8000)
    regularizer = fl.Tsallis(args.alpha)

    cache = fl.KeyValueCache(batch=1, kv_heads=KV_HEADS, d=D)
    cache.append(*torch.randn(2, 1, KV_HEADS, prompt, D))
    same = True
    for _ in track(range(16), "decoding"):
        query, key, value = new_token()
        cache.append(key, value)  # first the token itself, then it asks
        output = fl.decode(query, cache, regularizer)
        whole = fl.attention(query, cache.key, cache.value, regularizer, enable_gqa=True)
        same = same and torch.equal(output, whole)

    read = cache.read
    print(f"the bits of attention over all keys: {'yes' if same else 'no'}")
    print(f"keys per query           {int(read.seen.max()):>8}")
    print(f"scored, on average       {read.scored.double().mean():>8.1f}")
    print(f"values read, on average  {read.support.double().mean():>8.1f}")
    print(f"bytes read / all bytes   {read.bytes / read.bytes_of_all:>8.3f}")

    proof = fl.decode(query, cache, regularizer, proof=True)
    proof.check(cache.key)  # raises if a skipped key could have had weight
    margin = (proof.cut - proof.largest_skipped).min()
    print(f"proved: no skipped key comes nearer to the cut than {margin:.1e}")


if __name__ == "__main__":
    main()
