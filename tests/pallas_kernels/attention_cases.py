"""Steps for the attention tests: a paged cache full of NaN, and a float64 oracle."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels import QUERY_TILE, AttentionMetadata


class Chunk(NamedTuple):
    """A prefill chunk: `tokens` new tokens after the `cached` ones of a sequence."""

    cached: int
    tokens: int


class Case(NamedTuple):
    """Arguments of `paged_attention`."""

    q: jnp.ndarray
    k_cache: jnp.ndarray
    v_cache: jnp.ndarray
    layer: int
    metadata: AttentionMetadata
    scale: float
    soft_cap: float | None = None
    window: int | None = None

    def args(self):
        return self.q, self.k_cache, self.v_cache, self.layer, self.metadata

    def options(self):
        return dict(scale=self.scale, soft_cap=self.soft_cap, window=self.window)


def make_metadata(
    tables: np.ndarray,
    decode: Sequence[int],
    chunks: Sequence[Chunk],
    padding: int = 0,
    tile_padding: int = 0,
) -> AttentionMetadata:
    """Packs decode tokens with contexts `decode`, then `chunks`, then padding."""
    rows, lengths = list(range(len(decode))), list(decode)
    tile_start, tile_len = [], []
    for row, chunk in enumerate(chunks, start=len(decode)):
        for first in range(0, chunk.tokens, QUERY_TILE):
            tile_start.append(len(rows) + first)
            tile_len.append(min(QUERY_TILE, chunk.tokens - first))
        rows += [row] * chunk.tokens
        lengths += range(chunk.cached + 1, chunk.cached + chunk.tokens + 1)
    num_tokens, num_tiles = len(rows), len(tile_start)

    def i32(values, extra=0):
        return jnp.asarray(np.array(list(values) + [0] * extra, np.int32))

    return AttentionMetadata(
        block_tables=jnp.asarray(tables, jnp.int32),
        rows=i32(rows, padding),
        lengths=i32(lengths, padding),
        num_decode=jnp.int32(len(decode)),
        num_tokens=jnp.int32(num_tokens),
        tile_start=i32(tile_start, tile_padding),
        tile_len=i32(tile_len, tile_padding),
        num_tiles=jnp.int32(num_tiles),
    )


def make_case(
    decode: Sequence[int],
    chunks: Sequence[Chunk] = (),
    *,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    num_layers: int = 2,
    layer: int = 1,
    dtype=jnp.float32,
    q_dtype=None,
    table_width: int | None = None,
    padding: int = 3,
    tile_padding: int = 2,
    spare_blocks: int = 3,
    spare_rows: int = 1,
    soft_cap: float | None = None,
    window: int | None = None,
    seed: int = 0,
) -> Case:
    """Returns a step over shuffled blocks, with NaN in every slot that no token sees.

    NaN fills the null block, which table tails name, the slots past each length, those
    before all windows, the free blocks, and all other layers. Queries have values of
    the cache's dtype.
    """
    rng = np.random.default_rng(seed)
    totals = list(decode) + [chunk.cached + chunk.tokens for chunk in chunks]
    needed = [-(-total // block_size) for total in totals]
    width = max(needed + [1]) if table_width is None else table_width
    num_blocks = sum(needed) + spare_blocks
    free = list(1 + rng.permutation(num_blocks))
    tables = np.zeros((len(totals) + spare_rows, width), np.int32)
    shape = (num_layers, num_blocks + 1, block_size, kv_heads, head_dim)
    k_cache = np.full(shape, np.nan, np.float32)
    v_cache = np.full(shape, np.nan, np.float32)
    # The shortest context of each row: that of its first query.
    shortest = [*decode, *(chunk.cached + 1 for chunk in chunks)]
    for row, total in enumerate(totals):
        hidden = 0 if window is None else max(0, shortest[row] - window)
        for position in range(total):
            block, offset = divmod(position, block_size)
            if offset == 0:
                tables[row, block] = free.pop()
            if position < hidden:
                continue
            slot = (layer, tables[row, block], offset)
            k_cache[slot] = rng.standard_normal((kv_heads, head_dim))
            v_cache[slot] = rng.standard_normal((kv_heads, head_dim))

    metadata = make_metadata(tables, decode, chunks, padding, tile_padding)
    q = rng.standard_normal((metadata.rows.shape[0], heads, head_dim))
    return Case(
        q=jnp.asarray(q, dtype).astype(dtype if q_dtype is None else q_dtype),
        k_cache=jnp.asarray(k_cache, dtype),
        v_cache=jnp.asarray(v_cache, dtype),
        layer=layer,
        metadata=metadata,
        scale=head_dim**-0.5,
        soft_cap=soft_cap,
        window=window,
    )


def oracle(case: Case) -> np.ndarray:
    """Attention of each token by itself, in numpy float64."""
    q = np.asarray(case.q).astype(np.float64)
    k_cache = np.asarray(case.k_cache[case.layer]).astype(np.float64)
    v_cache = np.asarray(case.v_cache[case.layer]).astype(np.float64)
    block_size, kv_heads, head_dim = k_cache.shape[1:]
    group = q.shape[1] // kv_heads
    out = np.zeros(q.shape)
    tables = np.asarray(case.metadata.block_tables)
    rows, lengths = np.asarray(case.metadata.rows), np.asarray(case.metadata.lengths)
    for token, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if length == 0:
            continue
        blocks = tables[row, : -(-length // block_size)]
        seen = slice(max(0, length - (case.window or length)), length)
        keys = k_cache[blocks].reshape(-1, kv_heads, head_dim)[seen]
        values = v_cache[blocks].reshape(-1, kv_heads, head_dim)[seen]
        for head in range(q.shape[1]):
            scores = case.scale * keys[:, head // group] @ q[token, head]
            if case.soft_cap is not None:
                scores = case.soft_cap * np.tanh(scores / case.soft_cap)
            weights = np.exp(scores - scores.max())
            out[token, head] = weights @ values[:, head // group] / weights.sum()
    return out
