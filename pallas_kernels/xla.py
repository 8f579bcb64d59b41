"""Paged attention in XLA operations whose cost follows the live tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tile_products
from pallas_kernels.cascade import Cascade
from pallas_kernels.metadata import QUERY_TILE, AttentionMetadata
from pallas_kernels.tile_products import TileProducts
from pallas_kernels.xla_tiles import KV_TILE, Cache, read_tile

# Decode tokens that run together, to the length of the longest of them. Groups of 8 are
# 6% faster when full, and cost twice as much for a token alone.
DECODE_GROUP = 4
# Score of a slot that a query may not see. Finite, so that exp(MASKED - MASKED) is 1.
MASKED = -1e30


class _Softmax(NamedTuple):
    """Running softmax of M queries on each of K KV heads, for X sequences.

    Attributes:
        top: f32[X, K, M], the largest score so far.
        total: f32[X, K, M], the sum of the weights `exp(score - top)`.
        out: f32[X, K, M, D], the sum of the weighted values.
    """

    top: jax.Array
    total: jax.Array
    out: jax.Array


def paged_attention_xla(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    layer: int | jax.Array,
    metadata: AttentionMetadata,
    *,
    scale: float,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
    cascade: Cascade | None = None,
) -> jax.Array:
    """Runs decode tokens in groups and chunks in query tiles, over tiles of the cache.

    Each loop's trip count is a traced value: padding, the width of the block tables and
    the size of the pool cost nothing. A token's result does not depend on the tokens
    beside it: those can only add tiles that are masked for it, and a masked tile leaves
    the running softmax as it is, to the bit.

    Args:
        q: dtype[N, H, D], one query per token.
        k_cache: dtype[L, P, B, K, D].
        v_cache: dtype[L, P, B, K, D].
        layer: which layer of the cache.
        metadata: where each token finds its context.
        scale: factor on the scores, before the softmax.
        k_scales: f32[L, P, K, B], of keys in 8 bits, or None.
        v_scales: f32[L, P, K, B], of values in 8 bits, or None.
        soft_cap: bound that the scores approach, or None.
        window: how many of the last tokens a query sees, or None for all.
        cascade: prefixes to read once for all decode tokens that share them, or None.
            Such a token's softmax starts from what the pass over its prefix left.

    Returns:
        dtype[N, H, D], in the dtype of `q`; zeros where `lengths` is 0.
    """
    num_tokens, _, head_dim = q.shape
    num_blocks, block_size, kv_heads = k_cache.shape[1:4]
    unit = min(block_size, KV_TILE)
    per_block = block_size // unit

    def by_unit(scales):
        if scales is None:
            return None
        return scales.reshape(-1, kv_heads, per_block, unit)

    cache = Cache(
        k=k_cache.reshape(-1, unit, kv_heads, head_dim),
        v=v_cache.reshape(-1, unit, kv_heads, head_dim),
        k_scales=by_unit(k_scales),
        v_scales=by_unit(v_scales),
        first=layer * (num_blocks * per_block),
        per_block=per_block,
        soft_cap=soft_cap,
        window=window,
    )
    group = min(DECODE_GROUP, num_tokens)
    has_prefill = metadata.tile_start.shape[0] > 0
    # The last group or tile may reach past the end.
    pad = max(group, QUERY_TILE if has_prefill else 0)
    queries = jnp.pad(q.astype(jnp.float32) * scale, ((0, pad), (0, 0), (0, 0)))
    queries = queries.reshape(num_tokens + pad, kv_heads, -1, head_dim)
    metadata = metadata._replace(
        rows=jnp.pad(metadata.rows, (0, pad)),
        lengths=jnp.pad(metadata.lengths, (0, pad)),
    )
    # Groups and tiles write zeros past their end, and the next one writes over them.
    out = jnp.zeros(queries.shape, jnp.float32)
    out = _decode(out, queries, cache, metadata, group, cascade)
    if has_prefill:
        out = _prefill(out, queries, cache, metadata)
    return out[:num_tokens].reshape(q.shape).astype(q.dtype)


def _decode(
    out: jax.Array,
    queries: jax.Array,
    cache: Cache,
    metadata: AttentionMetadata,
    group: int,
    cascade: Cascade | None,
) -> jax.Array:
    """Writes the results of the decode tokens to `out`, `group` tokens at a time."""
    products = tile_products.for_decode(queries.shape[1], queries.shape[2])
    states, starts = None, None
    if cascade is not None:
        states = _prefixes(queries, cache, metadata, cascade)
        beyond = queries.shape[0] - cascade.starts.shape[0]
        starts = jnp.pad(cascade.starts, (0, beyond))

    def one_group(i, out):
        start = i * group

        def mine(x):
            return lax.dynamic_slice_in_dim(x, start, group)

        live = start + jnp.arange(group) < metadata.num_decode
        lengths = jnp.where(live, mine(metadata.lengths), 0)
        result = _attend(
            mine(queries),
            cache,
            metadata.block_tables,
            mine(metadata.rows),
            lengths,
            lengths[:, None],
            products,
            *jax.tree.map(mine, (states, starts)),
        )
        return lax.dynamic_update_slice_in_dim(out, result, start, 0)

    num_groups = lax.div(metadata.num_decode + (group - 1), group)
    return lax.fori_loop(0, num_groups, one_group, out)


def _prefixes(
    queries: jax.Array, cache: Cache, metadata: AttentionMetadata, cascade: Cascade
) -> _Softmax:
    """Returns each token's softmax after the prefix that it shares, [N, K, group]."""
    num_queries, kv_heads, group, head_dim = queries.shape
    products = tile_products.for_prefill()
    num_places = cascade.starts.shape[0]

    def one_pass(i, states: _Softmax) -> _Softmax:
        tokens = cascade.tokens[i]
        q = queries.at[tokens].get(mode="clip")
        q = q.transpose(1, 0, 2, 3).reshape(1, kv_heads, -1, head_dim)
        length = cascade.lengths[i][None]
        end = _run(
            q,
            cache,
            metadata.block_tables,
            cascade.rows[i][None],
            length,
            length[:, None],
            products,
        )
        at = jnp.where(tokens < num_places, tokens, num_queries)

        def put(states, new):
            new = new.reshape(kv_heads, -1, group, *new.shape[3:])
            return states.at[at].set(new.swapaxes(0, 1), mode="drop")

        return jax.tree.map(put, states, end)

    return lax.fori_loop(0, cascade.num_passes, one_pass, _nothing_seen(queries))


def _prefill(
    out: jax.Array, queries: jax.Array, cache: Cache, metadata: AttentionMetadata
) -> jax.Array:
    """Writes the results of the prefill tokens to `out`, one query tile at a time."""
    kv_heads, group, head_dim = queries.shape[1:]
    products = tile_products.for_prefill()

    def one_tile(i, out):
        start = metadata.tile_start[i]
        lengths = lax.dynamic_slice_in_dim(metadata.lengths, start, QUERY_TILE)
        lengths = jnp.where(jnp.arange(QUERY_TILE) < metadata.tile_len[i], lengths, 0)
        q = lax.dynamic_slice_in_dim(queries, start, QUERY_TILE)
        q = q.transpose(1, 0, 2, 3).reshape(1, kv_heads, -1, head_dim)
        result = _attend(
            q,
            cache,
            metadata.block_tables,
            metadata.rows[start][None],
            lengths.max()[None],
            jnp.repeat(lengths, group)[None],
            products,
        )
        result = result.reshape(kv_heads, QUERY_TILE, group, head_dim)
        return lax.dynamic_update_slice_in_dim(
            out, result.transpose(1, 0, 2, 3), start, 0
        )

    return lax.fori_loop(0, metadata.num_tiles, one_tile, out)


def _attend(
    q: jax.Array,
    cache: Cache,
    block_tables: jax.Array,
    rows: jax.Array,
    lengths: jax.Array,
    visible: jax.Array,
    products: TileProducts,
    state: _Softmax | None = None,
    starts: jax.Array | None = None,
) -> jax.Array:
    """Softmax of `q` over each sequence's context; see `_run` for the arguments.

    Returns:
        f32[X, K, M, D]; zeros where `visible` is 0.
    """
    end = _run(q, cache, block_tables, rows, lengths, visible, products, state, starts)
    seen = visible[:, None, :] > 0
    share = jnp.where(seen, 1 / jnp.where(seen, end.total, 1.0), 0.0)
    return end.out * share[..., None]


def _run(
    q: jax.Array,
    cache: Cache,
    block_tables: jax.Array,
    rows: jax.Array,
    lengths: jax.Array,
    visible: jax.Array,
    products: TileProducts,
    state: _Softmax | None = None,
    starts: jax.Array | None = None,
) -> _Softmax:
    """Online softmax of `q` over the tiles of each sequence's context.

    Args:
        q: f32[X, K, M, D], scaled queries.
        cache: the layer.
        block_tables: i32[S, T].
        rows: i32[X], the sequence row of each of the X sequences.
        lengths: i32[X], tokens to read of each.
        visible: i32[X, M or 1], tokens that each query may see, at most `lengths`.
        products: how to multiply.
        state: the softmax so far; None where nothing has been seen.
        starts: i32[X], tokens of each sequence that `state` has seen; not with a
            window.

    Returns:
        The softmax after all of them, not normalised.
    """
    prepared = products.prepare(q)
    hidden = _hidden(cache.window, visible) if starts is None else starts
    some_hidden = cache.window is not None or starts is not None

    def one_tile(i, state: _Softmax) -> _Softmax:
        tile = read_tile(
            i, cache, block_tables, rows, lengths, hidden if some_hidden else None
        )
        position = i * KV_TILE + jnp.arange(KV_TILE)
        keep = position < visible[:, None, :, None]
        if cache.window is not None:
            keep &= position >= visible[:, None, :, None] - cache.window
        if starts is not None:
            keep &= position >= starts[:, None, None, None]
        scores = products.scores(prepared, tile.keys)
        if tile.k_scales is not None:
            scores = scores * tile.k_scales
        if cache.soft_cap is not None:
            scores = cache.soft_cap * jnp.tanh(scores / cache.soft_cap)
        scores = jnp.where(keep, scores, MASKED)
        top = jnp.maximum(state.top, scores.max(axis=-1))
        # Once a query has seen anything, `top` is a real score, and the weight of a
        # masked slot is exactly 0. Without a window that is from the first tile on;
        # what was added up before a window is wiped out by a `fade` of exactly 0.
        weights = jnp.exp(scores - top[..., None])
        fade = jnp.exp(state.top - top)
        scaled = weights if tile.v_scales is None else weights * tile.v_scales
        return _Softmax(
            top=top,
            total=state.total * fade + weights.sum(axis=-1),
            out=state.out * fade[..., None] + products.mix(scaled, tile.values),
        )

    num_tiles = lax.div(lengths.max() + (KV_TILE - 1), KV_TILE)
    first_tile = 0
    if some_hidden:
        # Of sequences that are there: padding has a window that starts at 0.
        first = jnp.where(lengths > 0, hidden, lengths.max())
        first_tile = lax.div(first.min(), KV_TILE)
    state = _nothing_seen(q) if state is None else state
    return lax.fori_loop(first_tile, num_tiles, one_tile, state)


def _nothing_seen(q: jax.Array) -> _Softmax:
    """Returns the softmax of queries f32[..., D] before the first tile."""
    return _Softmax(
        top=jnp.full(q.shape[:-1], MASKED, jnp.float32),
        total=jnp.zeros(q.shape[:-1], jnp.float32),
        out=jnp.zeros(q.shape, jnp.float32),
    )


def _hidden(window: int | None, visible: jax.Array) -> jax.Array:
    """Returns i32[X], how many tokens of each sequence none of its queries sees.

    Those are the ones before the window of the first query, the shortest context.
    """
    if window is None:
        return jnp.zeros(visible.shape[0], jnp.int32)
    shortest = jnp.where(visible > 0, visible, jnp.iinfo(jnp.int32).max).min(axis=1)
    return jnp.where(visible.max(axis=1) > 0, jnp.maximum(shortest - window, 0), 0)
