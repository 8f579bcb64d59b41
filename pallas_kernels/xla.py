"""Paged attention in XLA operations whose cost follows the live tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.metadata import QUERY_TILE, AttentionMetadata

# Decode tokens that run together, to the length of the longest of them.
DECODE_GROUP = 8
# Cached tokens per step of the online softmax.
KV_TILE = 64
# Score of a masked slot. Finite: a row with no token yet must not give inf - inf.
MASKED = -1e30


class _Cache(NamedTuple):
    """One layer's view of the cache, cut in units of `min(B, KV_TILE)` tokens.

    A view, not a copy: the reshape is free, and the layer goes into the unit's number.
    """

    k: jax.Array  # dtype[U, tokens per unit, K, D], U units in all layers
    v: jax.Array
    layer_start: jax.Array | int  # first unit of the layer
    per_block: int  # units in a block


class _Softmax(NamedTuple):
    """Running softmax of queries `[X, K, M]`: X caches, M queries on each KV head."""

    top: jax.Array  # f32[X, K, M], largest score so far
    total: jax.Array  # f32[X, K, M], sum of the weights
    out: jax.Array  # f32[X, K, M, D], sum of the weighted values


def paged_attention_xla(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    layer: int | jax.Array,
    metadata: AttentionMetadata,
    *,
    scale: float,
) -> jax.Array:
    """Runs decode tokens in groups and prefill chunks in tiles, over tiles of the cache.

    Every loop's trip count is a traced value: padding, the table's width and the size
    of the pool cost nothing.

    Args:
        q: dtype[N, H, D], one query per token.
        k_cache: dtype[L, P, B, K, D].
        v_cache: dtype[L, P, B, K, D].
        layer: which layer of the cache.
        metadata: where each token finds its context.
        scale: factor on the scores, before the softmax.

    Returns:
        dtype[N, H, D], in the dtype of `q`; zeros where `lengths` is 0.
    """
    num_tokens, num_heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[2:4]
    unit = min(block_size, KV_TILE)
    flat = (-1, unit, kv_heads, head_dim)
    per_block = block_size // unit
    cache = _Cache(
        k=k_cache.reshape(flat),
        v=v_cache.reshape(flat),
        layer_start=layer * (k_cache.shape[1] * per_block),
        per_block=per_block,
    )
    # Room for the last group or tile to reach past the end.
    pad = max(DECODE_GROUP, QUERY_TILE)
    queries = jnp.pad(q.astype(jnp.float32) * scale, ((0, pad), (0, 0), (0, 0)))
    queries = queries.reshape(num_tokens + pad, kv_heads, -1, head_dim)
    metadata = metadata._replace(
        rows=jnp.pad(metadata.rows, (0, pad)),
        lengths=jnp.pad(metadata.lengths, (0, pad)),
    )
    out = jnp.zeros(queries.shape, jnp.float32)
    out = _decode(out, queries, cache, metadata, min(DECODE_GROUP, num_tokens))
    out = _prefill(out, queries, cache, metadata)
    return out[:num_tokens].reshape(q.shape).astype(q.dtype)


def _decode(out, queries, cache: _Cache, metadata: AttentionMetadata, group: int):
    """Writes the decode tokens' results, `group` at a time."""

    def one_group(i, out):
        start = i * group
        live = start + jnp.arange(group) < metadata.num_decode
        rows = lax.dynamic_slice_in_dim(metadata.rows, start, group)
        lengths = lax.dynamic_slice_in_dim(metadata.lengths, start, group)
        lengths = jnp.where(live, lengths, 0)
        tables = metadata.block_tables[rows]
        q = lax.dynamic_slice_in_dim(queries, start, group)
        result = _attend(q, cache, tables, lengths, lengths[:, None])
        return lax.dynamic_update_slice_in_dim(out, result, start, 0)

    return lax.fori_loop(0, (metadata.num_decode + group - 1) // group, one_group, out)


def _prefill(out, queries, cache: _Cache, metadata: AttentionMetadata):
    """Writes the prefill tokens' results, one query tile at a time."""
    _, kv_heads, group, head_dim = queries.shape

    def one_tile(i, out):
        start = metadata.tile_start[i]
        live = jnp.arange(QUERY_TILE) < metadata.tile_len[i]
        lengths = lax.dynamic_slice_in_dim(metadata.lengths, start, QUERY_TILE)
        lengths = jnp.where(live, lengths, 0)
        tables = metadata.block_tables[metadata.rows[start]][None]
        q = lax.dynamic_slice_in_dim(queries, start, QUERY_TILE)
        q = q.transpose(1, 0, 2, 3).reshape(1, kv_heads, QUERY_TILE * group, head_dim)
        result = _attend(
            q, cache, tables, lengths.max()[None], jnp.repeat(lengths, group)[None]
        )
        result = result.reshape(kv_heads, QUERY_TILE, group, head_dim)
        # Rows past the tile's end are written as zeros; the next tile overwrites them.
        return lax.dynamic_update_slice_in_dim(
            out, result.transpose(1, 0, 2, 3), start, 0
        )

    return lax.fori_loop(0, metadata.num_tiles, one_tile, out)


def _attend(q, cache: _Cache, tables, lengths, visible):
    """Online softmax of `q` over the tiles of each row's context.

    Args:
        q: f32[X, K, M, D], scaled queries.
        cache: the layer.
        tables: i32[X, T], block tables.
        lengths: i32[X], tokens to read of each row.
        visible: i32[X, M or 1], tokens that each query may see.

    Returns:
        f32[X, K, M, D]; zeros where `visible` is 0.
    """
    unit = cache.k.shape[1]
    units = KV_TILE // unit

    def one_tile(i, state: _Softmax) -> _Softmax:
        index = i * units + jnp.arange(units)
        blocks = jnp.take(tables, index // cache.per_block, axis=1, mode="clip")
        ids = cache.layer_start + blocks * cache.per_block + index % cache.per_block
        # Past the end: one and the same block, which stays in the processor's cache.
        ids = jnp.where(index * unit < lengths[:, None], ids, 0)
        kv_shape = (q.shape[0], KV_TILE, *cache.k.shape[2:])
        keys = cache.k[ids].reshape(kv_shape).astype(jnp.float32)
        values = cache.v[ids].reshape(kv_shape).astype(jnp.float32)
        position = i * KV_TILE + jnp.arange(KV_TILE)
        # Masked values too, not only their weights: 0 * NaN is NaN.
        values = jnp.where((position < lengths[:, None])[..., None, None], values, 0.0)

        scores = jnp.einsum("xkmd,xtkd->xkmt", q, keys, precision="highest")
        keep = position < visible[:, None, :, None]
        scores = jnp.where(keep, scores, MASKED)
        top = jnp.maximum(state.top, scores.max(axis=-1))
        weights = jnp.where(keep, jnp.exp(scores - top[..., None]), 0.0)
        fade = jnp.exp(state.top - top)
        added = jnp.einsum("xkmt,xtkd->xkmd", weights, values, precision="highest")
        return _Softmax(
            top=top,
            total=state.total * fade + weights.sum(axis=-1),
            out=state.out * fade[..., None] + added,
        )

    init = _Softmax(
        top=jnp.full(q.shape[:-1], MASKED, jnp.float32),
        total=jnp.zeros(q.shape[:-1], jnp.float32),
        out=jnp.zeros(q.shape, jnp.float32),
    )
    tiles = (lengths.max() + KV_TILE - 1) // KV_TILE
    state = lax.fori_loop(0, tiles, one_tile, init)
    return state.out / jnp.where(state.total > 0, state.total, 1.0)[..., None]
