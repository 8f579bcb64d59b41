"""Steps for the attention tests: a paged cache full of NaN, and a float64 oracle."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels import QUERY_TILE, AttentionMetadata
from pallas_kernels.quantised_kv import is_quantised, number_dtype, quantise


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
    k_scales: jnp.ndarray | None = None
    v_scales: jnp.ndarray | None = None

    def args(self):
        return self.q, self.k_cache, self.v_cache, self.layer, self.metadata

    def options(self):
        options = dict(scale=self.scale, soft_cap=self.soft_cap, window=self.window)
        if self.k_scales is not None:
            options |= dict(k_scales=self.k_scales, v_scales=self.v_scales)
        return options


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
    before all windows, the free blocks, and all other layers. In a cache of 8 bits
    their scales are NaN, and their values garbage. Queries have values of the cache's
    dtype, or of bfloat16.
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
    kept = dtype
    if is_quantised(dtype):
        kept = jnp.bfloat16
        k_cache, k_scales = _quantised(k_cache, dtype)
        v_cache, v_scales = _quantised(v_cache, dtype)
    else:
        k_cache, v_cache = (jnp.asarray(x, dtype) for x in (k_cache, v_cache))
        k_scales = v_scales = None
    return Case(
        q=jnp.asarray(q, kept).astype(kept if q_dtype is None else q_dtype),
        k_cache=k_cache,
        v_cache=v_cache,
        k_scales=k_scales,
        v_scales=v_scales,
        layer=layer,
        metadata=metadata,
        scale=head_dim**-0.5,
        soft_cap=soft_cap,
        window=window,
    )


def _quantised(cache: np.ndarray, dtype) -> tuple[jnp.ndarray, jnp.ndarray]:
    """Returns values and scales; of what is NaN, values that may be NaN, or large."""
    values, scales = quantise(jnp.asarray(cache), dtype)
    garbage = jnp.asarray(0x7F if dtype == jnp.float8_e4m3fn else -128, values.dtype)
    values = jnp.where(jnp.isnan(scales)[..., None], garbage, values)
    return values, scales.swapaxes(2, 3)


def numbers_of(cache: jnp.ndarray, scales: jnp.ndarray | None) -> np.ndarray:
    """Returns what a cache [L, P, B, K, D] holds, in float64."""
    numbers = np.asarray(cache.view(number_dtype(cache.dtype))).astype(np.float64)
    if scales is not None:
        numbers *= np.asarray(scales, np.float64).swapaxes(2, 3)[..., None]
    return numbers


def share(case: Case, rows: Sequence[int], tokens: int) -> Case:
    """Returns the case with the first blocks of some rows' tables the same.

    Args:
        case: of any rows; those that have whole blocks of so many tokens.
        rows: the first is the one whose blocks all of them get. What the others had
            there is NaN.
        tokens: a multiple of the block size.
    """
    blocks = tokens // case.k_cache.shape[2]
    tables = np.array(case.metadata.block_tables)
    kept = tables[rows[0], :blocks]
    lost = np.setdiff1d(tables[list(rows), :blocks], kept)
    tables[list(rows), :blocks] = kept
    poisoned = {
        name: getattr(case, name).at[:, lost].set(jnp.nan)
        for name in (
            ("k_cache", "v_cache")
            if case.k_scales is None
            else ("k_scales", "v_scales")
        )
    }
    return case._replace(
        **poisoned,
        metadata=case.metadata._replace(block_tables=jnp.asarray(tables)),
    )


def oracle(case: Case) -> np.ndarray:
    """Attention of each token by itself, in numpy float64."""
    q = np.asarray(case.q).astype(np.float64)
    k_cache = numbers_of(case.k_cache, case.k_scales)[case.layer]
    v_cache = numbers_of(case.v_cache, case.v_scales)[case.layer]
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
