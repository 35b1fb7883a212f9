"""What tests of decoding share: caches, and attention over the same keys without one."""

import torch

import fenchel as fl

P = fl.priors
HALF = fl.Tsallis(1.5)


def draw(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def filled(key, value, step=None):
    """A cache with these tokens, appended at once or so many at a time."""
    batch, heads, count, d = key.shape
    cache = fl.KeyValueCache(batch, heads, d, value.shape[3], dtype=key.dtype)
    step = step or max(1, count)
    for start in range(0, count, step):
        cache.append(key[:, :, start : start + step], value[:, :, start : start + step])
    return cache


def operands(length, *, batch=1, heads=4, kv_heads=2, d=32, d_value=16, queries=1, **options):
    """query, key, value; scores have a deviation of about `spread`."""
    spread = options.pop("spread", 1.0)
    query = draw(0, batch, heads, queries, d, **options) * spread
    key = draw(1, batch, kv_heads, length, d, **options)
    return query, key, draw(2, batch, kv_heads, length, d_value, **options)


def reference(query, key, value, regularizer=HALF, base=None, attn_mask=None, **options):
    """`attention` of the last tokens."""
    offset = key.shape[2] - query.shape[2]
    past = P.Causal(offset)

    def placed(term):
        return term.shifted(offset) if isinstance(term, P.Prior) and offset else term

    base, attn_mask = placed(base), placed(attn_mask)
    if query.shape[2] > 1 and isinstance(base, torch.Tensor):
        base = base * torch.ones(query.shape[2], key.shape[2]).tril(offset).to(base.dtype)
    elif query.shape[2] > 1:
        base = past if base is None else base * past
    return fl.attention(
        query, key, value, regularizer, base=base, attn_mask=attn_mask, enable_gqa=True, **options
    )
