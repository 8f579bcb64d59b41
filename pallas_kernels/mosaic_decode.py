"""Paged attention for NVIDIA Hopper, on Pallas's Mosaic GPU backend.

One thread block for each (token, KV head, split of the context), of two warpgroups.
The producer walks the block table and has the TMA unit copy blocks of keys and values
into a ring of shared-memory stages; the consumer multiplies with wgmma and keeps an
online softmax. Splits leave unnormalised float32 partials, which are merged once. With
a cascade, so do the passes over shared prefixes (see `mosaic_cascade`).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat, mosaic_cascade
from pallas_kernels.cascade import Cascade
from pallas_kernels.limits import check_pallas
from pallas_kernels.metadata import AttentionMetadata
from pallas_kernels.mosaic_decode_kernel import Buffers, Config, thread_block
from pallas_kernels.mosaic_ring import (
    KV_TILE,
    MAX_COLUMNS,
    Tiles,
    as_units,
    make_ring,
    swizzled,
)
from pallas_kernels.mosaic_softmax import ROWS, make_operands
from pallas_kernels.mosaic_tuning import choose_decode_stages, choose_splits
from pallas_kernels.quantised_kv import multiplied_dtype, quantised_dtype


def paged_attention_mosaic(
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
    splits: int | None = None,
    stages: int | None = None,
    contiguous: bool = False,
    interpret: Any = None,
) -> jax.Array:
    """Runs every token as a row of its own, with its own length.

    Right for decode tokens. Prefill tokens are correct but slow, since each reads its
    whole context again.

    Args:
        q: dtype[N, H, D], one query per token; taken in the dtype of the cache, or in
            bfloat16. D is one of `limits.HEAD_DIMS`, and H is at most 64 * K.
        k_cache: bfloat16 or float16 [L, P, B, K, D], or 8 bits: int8, or uint8 that
            holds the bits of e4m3.
        v_cache: like `k_cache`.
        layer: which layer of the cache.
        metadata: where each token finds its context. Only `block_tables`, `rows` and
            `lengths` are read.
        scale: factor on the scores, before the softmax.
        k_scales: f32[L, P, K, B], of keys in 8 bits, or None.
        v_scales: f32[L, P, K, B], of values in 8 bits, or None.
        soft_cap: see `api.paged_attention`.
        window: see `api.paged_attention`.
        cascade: see `api.paged_attention`. The kernel runs twice: on the passes over
            shared prefixes, and on the tokens, each from where its pass ends.
        splits: thread blocks that share a long context; None chooses.
        stages: depth of the ring of keys and values, 1 or more; None chooses.
        contiguous: whether row `r` has the blocks from `r * T` on, whatever its table
            says: the same kernel without paging, to see what paging costs.
        interpret: whether to interpret the kernel on the CPU; None interprets where
            jax has no GPU. Or a `plgpu.InterpretGPUParams`.

    Returns:
        dtype[N, H, D], in the dtype of `q`; zeros where `lengths` is 0.

    Raises:
        ValueError: a dtype, head dim, block size or group that the kernel does not
            handle, or a cascade of contiguous rows.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, block_size, kv_heads = k_cache.shape[1:4]
    check_pallas(
        num_heads=num_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        kv_dtype=k_cache.dtype,
    )
    if cascade is not None and contiguous:
        raise ValueError("contiguous rows share no blocks; give no cascade with them.")
    if interpret is None or isinstance(interpret, bool):
        interpret = compat.interpret_params(interpret)
    heads = num_heads // kv_heads
    group = -(-heads // 8) * 8
    unit = min(block_size, KV_TILE)
    per_block = block_size // unit
    context = metadata.block_tables.shape[1] * block_size
    context = min(context, window or context)
    dtype = multiplied_dtype(k_cache.dtype)
    tiles = Tiles(
        unit=unit,
        per_block=per_block,
        stages=stages or choose_decode_stages(head_dim, block_size, k_cache.dtype),
        scale=scale,
        soft_cap=soft_cap,
        window=window,
        dtype=dtype,
        contiguous=contiguous,
        hints=not interpret,
        quantised=quantised_dtype(k_cache.dtype),
    )
    queries = q.astype(dtype).reshape(num_tokens, kv_heads, heads, head_dim)
    cache = as_units(k_cache, v_cache, k_scales, v_scales, unit)
    first = jnp.asarray(layer * (num_blocks * per_block), jnp.int32).reshape(1)

    def run(queries, rows, lengths, starts, at_once: int):
        """Runs the kernel; `at_once` of the contexts are there, if many are."""
        thread_blocks = at_once * kv_heads * -(-head_dim // MAX_COLUMNS)
        config = Config(
            tiles=tiles,
            splits=splits
            or choose_splits(thread_blocks, context, compat.multiprocessors()),
            group=queries.shape[2],
        )
        return _partials(
            queries,
            cache,
            metadata.block_tables,
            rows,
            lengths,
            starts,
            first,
            config=config,
            interpret=interpret,
        )

    padded = jnp.pad(queries, ((0, 0), (0, 0), (0, group - heads), (0, 0)))
    own = functools.partial(run, padded, metadata.rows, metadata.lengths)
    starts = jnp.zeros(num_tokens, jnp.int32)
    if cascade is None:
        partials = own(starts, num_tokens)
    else:
        num_places = cascade.starts.shape[0]
        num_passes, members = cascade.tokens.shape
        shared = run(
            mosaic_cascade.pack_queries(queries, cascade),
            cascade.rows,
            cascade.lengths,
            jnp.zeros(num_passes, jnp.int32),
            # As if all tokens shared one prefix: most of the passes are not used.
            -(-num_places // members),
        )
        starts = starts.at[:num_places].set(cascade.starts)
        partials = mosaic_cascade.join(own(starts, num_tokens), shared, cascade, heads)
    out = _merge(*partials)
    return out[:, :, :heads].reshape(q.shape).astype(q.dtype)


def _partials(
    q: jax.Array,
    cache: tuple[jax.Array, ...],
    tables: jax.Array,
    rows: jax.Array,
    lengths: jax.Array,
    starts: jax.Array,
    first: jax.Array,
    *,
    config: Config,
    interpret: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the kernel.

    Args:
        q: dtype[N, K, group, D].
        cache: from `mosaic_ring.as_units`.
        tables: i32[S, T].
        rows: i32[N].
        lengths: i32[N].
        starts: i32[N], tokens of each context that are left out; whole tiles.
        first: i32[1], first unit of the layer.
        config: static choices.
        interpret: see `paged_attention_mosaic`.

    Returns:
        out f32[N, K, splits, group, D], not normalised, and anything at all where a
        split is empty; top f32[N, K, splits, group], largest score in units of log2;
        total f32[N, K, splits, group], sum of the weights, 0 where a split is empty.
    """
    num_tokens, kv_heads, group, head_dim = q.shape
    f32 = jnp.float32
    columns = min(head_dim, MAX_COLUMNS)

    def entry(*refs):
        buffers = Buffers(
            ring=make_ring(config.tiles, head_dim),
            operands=make_operands(config.tiles, head_dim),
            q_ready=plgpu.Barrier(),
            out=swizzled((ROWS, columns), f32),
            top=plgpu.SMEM((ROWS,), f32),
            total=plgpu.SMEM((ROWS,), f32),
        )
        pl.run_scoped(
            functools.partial(thread_block, *refs, config=config),
            buffers,
            collective_axes="warpgroup",
        )

    shape = (num_tokens, kv_heads, config.splits, group)
    kernel = plgpu.kernel(
        entry,
        out_type=(
            jax.ShapeDtypeStruct((*shape, head_dim), f32),
            jax.ShapeDtypeStruct(shape, f32),
            jax.ShapeDtypeStruct(shape, f32),
        ),
        grid=(num_tokens, kv_heads, config.splits, head_dim // columns),
        grid_names=("token", "head", "split", "part"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=compat.compiler_params(approx_math=True),
        interpret=interpret,
    )
    return kernel(q, cache, tables, rows, lengths, starts, first)


def _merge(out: jax.Array, top: jax.Array, total: jax.Array) -> jax.Array:
    """Merges the splits' partials (see `_partials`) to f32[N, K, group, D]."""
    used = total > 0
    weight = jnp.where(used, jnp.exp2(top - top.max(axis=2, keepdims=True)), 0.0)
    out = jnp.where(used[..., None], out, 0.0)
    total = jnp.sum(weight * total, axis=2)
    out = jnp.sum(weight[..., None] * out, axis=2)
    seen = total > 0
    return jnp.where(seen[..., None], out / jnp.where(seen, total, 1.0)[..., None], 0.0)
