"""Sound upper bounds of how much attention's output can change, and the search that tries to exceed
them."""

from fenchel.bounds import contraction, perturbation
from fenchel.bounds.attack import Attack, attack
from fenchel.bounds.bound import Bound, Check
from fenchel.bounds.contraction import PotentialBounds, Setting
from fenchel.bounds.domain import Ball, Box, Everywhere
from fenchel.bounds.layers import (
    encoder_layer_lipschitz,
    feed_forward_lipschitz,
    heads_of,
    layer_norm_lipschitz,
    residual,
    stack_lipschitz,
    token_map_lipschitz,
)
from fenchel.bounds.local import LocalConstant, local_lipschitz
from fenchel.bounds.maps import VectorMap, compose
from fenchel.bounds.norms import LongestToken, Wasserstein1
from fenchel.bounds.query import query_bound, query_lipschitz
from fenchel.bounds.self_attention import (
    Head,
    gaussian_attention_lipschitz,
    gaussian_constant,
    self_attention_lipschitz,
)

__all__ = [
    "Attack",
    "Ball",
    "Bound",
    "Box",
    "Check",
    "Everywhere",
    "Head",
    "LocalConstant",
    "LongestToken",
    "PotentialBounds",
    "Setting",
    "VectorMap",
    "Wasserstein1",
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
    "token_map_lipschitz",
]
