"""Tiles of a paged cache, gathered by XLA."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantised_kv import widen

# Cached tokens in each step of the online softmax.
KV_TILE = 64


class Cache(NamedTuple):
    """One layer of the cache and how to see it: as units of `min(B, KV_TILE)` tokens.

    A view, not a copy: the reshape is free, and the layer goes into the unit's number.

    Attributes:
        k: dtype[U, u, K, D], keys of the U units of all layers, u tokens in each.
        v: dtype[U, u, K, D], values.
        k_scales: f32[U / per_block, K, per_block, u], of keys in 8 bits, or None.
        v_scales: f32[U / per_block, K, per_block, u], of values in 8 bits, or None.
        first: i32[], first unit of the layer.
        per_block: units in a block.
        soft_cap: bound that the scores of its keys approach, or None.
        window: how many of the last tokens a query sees, or None for all.
    """

    k: jax.Array
    v: jax.Array
    k_scales: jax.Array | None
    v_scales: jax.Array | None
    first: jax.Array | int
    per_block: int
    soft_cap: float | None
    window: int | None


class Tile(NamedTuple):
    """A tile of keys and values of each of X sequences.

    Attributes:
        keys: f32[X, KV_TILE, K, D]; what no query sees holds some key, to be masked.
        values: f32[X, KV_TILE, K, D]; what no query sees is 0.
        k_scales: f32[X, K, 1, KV_TILE], what the scores of the keys are to be
            multiplied by, or None; what no query sees has any scale.
        v_scales: f32[X, K, 1, KV_TILE], what the weights of the values are to be
            multiplied by, or None; what no query sees has 0.
    """

    keys: jax.Array
    values: jax.Array
    k_scales: jax.Array | None
    v_scales: jax.Array | None


def read_tile(
    i: jax.Array,
    cache: Cache,
    block_tables: jax.Array,
    rows: jax.Array,
    lengths: jax.Array,
    hidden: jax.Array | None,
) -> Tile:
    """Reads tile `i` of each sequence.

    `hidden` is i32[X], tokens at each sequence's start that no query sees, or None. Of
    what no query sees, a weight of 0 would not do for the values: 0 * NaN is NaN.
    """
    unit = cache.k.shape[1]
    units = i * (KV_TILE // unit) + jnp.arange(KV_TILE // unit)
    blocks = block_tables.at[
        rows[:, None], lax.div(units, jnp.int32(cache.per_block))
    ].get(mode="clip", wrap_negative_indices=False)
    ids = cache.first + blocks * cache.per_block
    ids = ids + lax.rem(units, jnp.int32(cache.per_block))
    # Past the end, one and the same unit: it stays in the processor's cache.
    there = units * unit < lengths[:, None]
    if hidden is not None:
        there &= (units + 1) * unit > hidden[:, None]
    ids = jnp.where(there, ids, 0)
    shape = (rows.shape[0], KV_TILE, *cache.k.shape[2:])

    def gather(array):
        taken = array.at[ids].get(mode="promise_in_bounds", wrap_negative_indices=False)
        return widen(taken.reshape(shape))

    def gather_scales(array):
        if array is None:
            return None
        block, inner = lax.div(ids, cache.per_block), lax.rem(ids, cache.per_block)
        taken = array.at[block, :, inner].get(
            mode="promise_in_bounds", wrap_negative_indices=False
        )  # [X, units, K, u]
        return taken.swapaxes(1, 2).reshape(shape[0], shape[2], 1, KV_TILE)

    position = i * KV_TILE + jnp.arange(KV_TILE)
    live = position < lengths[:, None]
    if hidden is not None:
        live &= position >= hidden[:, None]
    v_scales = gather_scales(cache.v_scales)
    if v_scales is not None:
        v_scales = jnp.where(live[:, None, None], v_scales, 0.0)
    return Tile(
        keys=gather(cache.k),
        values=jnp.where(live[:, :, None, None], gather(cache.v), 0.0),
        k_scales=gather_scales(cache.k_scales),
        v_scales=v_scales,
    )
