"""Sound upper bounds of how much attention's output can change, and the search that tries to exceed
them."""

from fenchel.certificates import contraction, perturbation
from fenchel.certificates.attack import Attack, attack
from fenchel.certificates.certificate import Certificate, Check, compose
from fenchel.certificates.contraction import PotentialBounds, Setting
from fenchel.certificates.domain import Ball, Box, Everywhere
from fenchel.certificates.layers import (
    encoder_layer_lipschitz,
    feed_forward_lipschitz,
    heads_of,
    layer_norm_lipschitz,
    residual,
    stack_lipschitz,
    token_map,
)
from fenchel.certificates.local import Local, local_lipschitz
from fenchel.certificates.query import query_bound, query_lipschitz
from fenchel.certificates.self_attention import (
    Head,
    gaussian_attention_lipschitz,
    gaussian_constant,
    self_attention_lipschitz,
)

__all__ = [
    "Attack",
    "Ball",
    "Box",
    "Certificate",
    "Check",
    "Everywhere",
    "Head",
    "Local",
    "PotentialBounds",
    "Setting",
    "attack",
    "compose",
    "contraction",
    "encoder_layer_lipschitz",
    "feed_forward_lipschitz",
    "gaussian_attention_lipschitz",
    "gaussian_constant",
    "heads_of",
    "layer_norm_lipschitz",
    "local_lipschitz",
    "perturbation",
    "query_bound",
    "query_lipschitz",
    "residual",
    "self_attention_lipschitz",
    "stack_lipschitz",
    "token_map",
]
