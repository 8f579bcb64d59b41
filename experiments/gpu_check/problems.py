"""Steps to check and to time, made on the device; needs jax and numpy only."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import QUERY_TILE, AttentionMetadata
from pallas_kernels.quantised_kv import (
    bytes_per_vector,
    is_quantised,
    multiplied_dtype,
    quantise,
    widen,
)


class Problem(NamedTuple):
    """A step over a cache of one layer, its blocks shuffled.

    Attributes:
        q: dtype[N, H, D].
        k_cache: dtype[1, P, B, K, D].
        v_cache: dtype[1, P, B, K, D].
        metadata: where each token finds its context.
        k_scales: f32[1, P, K, B], of keys in 8 bits; else None.
        v_scales: f32[1, P, K, B], of values likewise.
    """

    q: jax.Array
    k_cache: jax.Array
    v_cache: jax.Array
    metadata: AttentionMetadata
    k_scales: jax.Array | None = None
    v_scales: jax.Array | None = None

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return self.q.shape[-1] ** -0.5

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys, values and scales that a step of decodes must read."""
        kv_heads, head_dim = self.k_cache.shape[-2:]
        tokens = int(np.asarray(self.metadata.lengths).sum())
        return 2 * tokens * kv_heads * bytes_per_vector(head_dim, self.k_cache.dtype)

    @property
    def scales(self) -> dict[str, Any]:
        """The keyword arguments of a kernel that only keys in 8 bits need."""
        return dict(k_scales=self.k_scales, v_scales=self.v_scales)

    @property
    def flops(self) -> int:
        """Floating point operations of the products, those that are masked left out."""
        tokens = int(np.asarray(self.metadata.lengths, np.int64).sum())
        return 4 * tokens * self.q.shape[1] * self.q.shape[2]


def make_problem(
    lengths: list[int],
    block_size: int,
    *,
    chunks: Sequence[tuple[int, int]] = (),
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    dtype: str = "bfloat16",
    poisoned: bool = False,
    shuffled: bool = True,
    shared: int = 0,
) -> Problem:
    """Returns a step of one token for each of some contexts, and of prefill chunks.

    Args:
        lengths: of the contexts.
        block_size: B.
        chunks: for each, how many tokens come before it, and how many it has.
        heads: H.
        kv_heads: K.
        head_dim: D.
        dtype: of queries, keys and values, all at unit scale. Beside keys of 8 bits,
            queries are bfloat16.
        poisoned: whether all slots that hold no token are NaN, by their scales if they
            have some.
        shuffled: whether blocks lie in random places; else each row's lie side by side,
            from its number times the table's width on.
        shared: tokens at the start of all contexts that are in the same blocks; whole
            blocks.
    """
    rng = np.random.default_rng(0)
    totals = [*lengths, *(before + tokens for before, tokens in chunks)]
    width = max(1, *(-(-total // block_size) for total in totals))
    num_blocks = len(totals) * width + 1
    order = np.arange(len(totals) * width)
    if shuffled:
        order = 1 + rng.permutation(order)
    tables = order.reshape(len(totals), width).astype(np.int32)
    tables[:, : shared // block_size] = tables[0, : shared // block_size]
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (1, num_blocks, block_size, kv_heads, head_dim)
    narrow, kept = is_quantised(dtype), multiplied_dtype(dtype)
    k_cache, v_cache = (jax.random.normal(key, shape, kept) for key in keys[:2])
    k_scales = v_scales = None
    if narrow:
        make = jax.jit(quantise, static_argnums=1)
        k_cache, k_scales = make(k_cache, dtype)
        v_cache, v_scales = make(v_cache, dtype)
        k_scales, v_scales = (x.swapaxes(2, 3) for x in (k_scales, v_scales))
    if poisoned:
        live = np.zeros((num_blocks, block_size), bool)
        for table, total in zip(tables, totals):
            at = np.arange(total)
            live[table[at // block_size], at % block_size] = True
        mask = jnp.asarray(live)[None]
        if k_scales is not None and v_scales is not None:
            mask = mask[:, :, None]
            k_scales, v_scales = (
                jnp.where(mask, x, jnp.nan) for x in (k_scales, v_scales)
            )
        else:
            mask = mask[..., None, None]
            k_cache, v_cache = (jnp.where(mask, x, jnp.nan) for x in (k_cache, v_cache))

    def i32(values) -> jax.Array:
        return jnp.asarray(np.asarray(values, np.int32))

    rows, visible = list(range(len(lengths))), list(lengths)
    starts, sizes = [], []
    for row, (before, tokens) in enumerate(chunks, start=len(lengths)):
        firsts = range(0, tokens, QUERY_TILE)
        starts += [len(rows) + first for first in firsts]
        sizes += [min(QUERY_TILE, tokens - first) for first in firsts]
        rows += [row] * tokens
        visible += range(before + 1, before + tokens + 1)
    metadata = AttentionMetadata(
        block_tables=i32(tables),
        rows=i32(rows),
        lengths=i32(visible),
        num_decode=i32(len(lengths)),
        num_tokens=i32(len(rows)),
        tile_start=i32(starts),
        tile_len=i32(sizes),
        num_tiles=i32(len(starts)),
    )
    q = jax.random.normal(keys[2], (len(rows), heads, head_dim), kept)
    return Problem(q, k_cache, v_cache, metadata, k_scales, v_scales)


def exact(
    problem: Problem, window: int | None = None, soft_cap: float | None = None
) -> np.ndarray:
    """Returns the step's attention, computed in numpy's float64, f64[N, H, D].

    Args:
        problem: the step.
        window: see `pallas_kernels.paged_attention`.
        soft_cap: see `pallas_kernels.paged_attention`.
    """
    q, k_cache, v_cache = (np.asarray(widen(x)).astype(np.float64) for x in problem[:3])
    for cache, scales in ((k_cache, problem.k_scales), (v_cache, problem.v_scales)):
        if scales is not None:
            cache *= np.asarray(scales, np.float64).swapaxes(2, 3)[..., None]
    block_size, kv_heads, head_dim = k_cache.shape[2:]
    tables = np.asarray(problem.metadata.block_tables)
    rows = np.asarray(problem.metadata.rows)
    out = np.zeros(q.shape)
    for token, length in enumerate(np.asarray(problem.metadata.lengths)):
        if not length:
            continue
        blocks = tables[rows[token], : -(-length // block_size)]
        seen = slice(max(0, length - (window or length)), length)
        keys = k_cache[0, blocks].reshape(-1, kv_heads, head_dim)[seen]
        values = v_cache[0, blocks].reshape(-1, kv_heads, head_dim)[seen]
        queries = q[token].reshape(kv_heads, -1, head_dim)
        scores = problem.scale * np.einsum("kgd,tkd->kgt", queries, keys)
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[token] = np.einsum("kgt,tkd->kgd", weights, values).reshape(q.shape[1:])
    return out
