"""Ways to multiply queries with a tile of keys and values, one per kind of step.

All compute the same: scores f32[X, K, M, t] from queries f32[X, K, M, D] and keys
f32[X, t, K, D], and f32[X, K, M, D] from weights f32[X, K, M, t] and values
f32[X, t, K, D], for X tiles of t tokens and M queries on each of K KV heads. None
repeats keys or values for the query heads that share them. They differ in which one
XLA's CPU compiler turns into fast code (see docs/kernels.md for figures).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Up to this many KV heads the block-diagonal form pays for its extra arithmetic.
MAX_BLOCK_DIAGONAL_HEADS = 4


class TileProducts(NamedTuple):
    """A pair of products over a tile.

    Attributes:
        prepare: queries [X, K, M, D] to the form that `scores` takes; runs once.
        scores: (prepared queries, keys) to scores.
        mix: (weights, values) to weighted sums of values.
    """

    prepare: Callable[[jax.Array], jax.Array]
    scores: Callable[[jax.Array, jax.Array], jax.Array]
    mix: Callable[[jax.Array, jax.Array], jax.Array]


def for_decode(kv_heads: int, group: int) -> TileProducts:
    """Returns the products for one token: `group` queries on each KV head."""
    if group == 1:
        return ONE_QUERY
    if kv_heads <= MAX_BLOCK_DIAGONAL_HEADS:
        return BLOCK_DIAGONAL
    return MULTIPLY_REDUCE


def for_prefill() -> TileProducts:
    """Returns the products for many queries on each KV head."""
    return BATCHED


def _spread(q: jax.Array) -> jax.Array:
    x, kv_heads, group, dim = q.shape
    eye = jnp.eye(kv_heads, dtype=q.dtype)
    spread = q[:, :, :, None, :] * eye[:, None, :, None]
    return spread.reshape(x, kv_heads * group, kv_heads * dim)


def _block_diagonal_scores(spread: jax.Array, keys: jax.Array) -> jax.Array:
    x, tokens, kv_heads, dim = keys.shape
    flat = keys.reshape(x, tokens, kv_heads * dim)
    scores = jnp.einsum("xhc,xtc->xht", spread, flat, precision="highest")
    return scores.reshape(x, kv_heads, -1, tokens)


def _block_diagonal_mix(weights: jax.Array, values: jax.Array) -> jax.Array:
    x, tokens, kv_heads, dim = values.shape
    mixed = jnp.einsum(
        "xht,xtc->xhc",
        weights.reshape(x, -1, tokens),
        values.reshape(x, tokens, kv_heads * dim),
        precision="highest",
    )
    own = jnp.diagonal(
        mixed.reshape(x, kv_heads, -1, kv_heads, dim), axis1=1, axis2=3
    )  # [X, M, D, K]
    return own.transpose(0, 3, 1, 2)


# Keys stay as they lie in the cache, [t, K * D]: one matrix product for all heads, in
# which each query is zero in the columns of the KV heads that are not its own.
BLOCK_DIAGONAL = TileProducts(_spread, _block_diagonal_scores, _block_diagonal_mix)

# The gather of the keys fuses into the sum over D: they are read straight from the
# cache, and nothing grows with K.
MULTIPLY_REDUCE = TileProducts(
    prepare=lambda q: q,
    scores=lambda q, keys: jnp.sum(
        keys[:, :, :, None, :] * q[:, None], axis=-1
    ).transpose(0, 2, 3, 1),
    mix=lambda weights, values: jnp.sum(
        values[:, :, :, None, :] * weights.transpose(0, 3, 1, 2)[..., None], axis=1
    ),
)

# The same without the axis of length 1, which jax 0.10 compiles to code 5 times slower.
ONE_QUERY = TileProducts(
    prepare=lambda q: q[:, :, 0],
    scores=lambda q, keys: jnp.sum(keys * q[:, None], axis=-1).transpose(0, 2, 1)[
        :, :, None
    ],
    mix=lambda weights, values: jnp.sum(
        values * weights[:, :, 0].transpose(0, 2, 1)[..., None], axis=1
    )[:, :, None],
)

# Enough queries that a matrix product on each KV head outweighs the transposed copies.
BATCHED = TileProducts(
    prepare=lambda q: q,
    scores=lambda q, keys: jnp.einsum("xkmd,xtkd->xkmt", q, keys, precision="highest"),
    mix=lambda weights, values: jnp.einsum(
        "xkmt,xtkd->xkmd", weights, values, precision="highest"
    ),
)
