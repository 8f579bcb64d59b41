"""Paged attention of a whole step for NVIDIA Hopper: decodes and prompts in one launch.

As many thread blocks as there are multiprocessors take pieces of a list that
`mosaic_plan` makes on the device. Each has a producer and two consumer warpgroups. The
queries of a prompt's tokens fill the rows of both and share the reads of their context.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.limits import check_pallas
from pallas_kernels.metadata import AttentionMetadata
from pallas_kernels.mosaic_mixed_kernel import Buffers, Config, Results, thread_block
from pallas_kernels.mosaic_plan import ROW_UNIT, Pieces, Plan, Shape, make_plan
from pallas_kernels.mosaic_ring import (
    KV_TILE,
    MAX_COLUMNS,
    Tiles,
    as_units,
    make_ring,
    swizzled,
)
from pallas_kernels.mosaic_softmax import MASKED, ROWS, make_operands
from pallas_kernels.mosaic_tuning import choose_consumers, choose_mixed_stages
from pallas_kernels.quantised_kv import multiplied_dtype, quantised_dtype

# Thread blocks in the interpreter, which runs them one by one.
INTERPRETED_WORKERS = 2


def paged_attention_mixed(
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
    workers: int | None = None,
    consumers: int | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Runs decode tokens, and runs of prefill tokens, each over its context once.

    Args:
        q: dtype[N, H, D], one query per token; taken in the dtype of the cache, or in
            bfloat16. D is one of `limits.HEAD_DIMS`, and H is at most 64 * K.
        k_cache: bfloat16 or float16 [L, P, B, K, D], or 8 bits: int8, or uint8 that
            holds the bits of e4m3.
        v_cache: like `k_cache`.
        layer: which layer of the cache.
        metadata: where each token finds its context. Tiles are not read: the runs are
            cut anew, to fill the rows of a thread block.
        scale: factor on the scores, before the softmax.
        k_scales: f32[L, P, K, B], of keys in 8 bits, or None.
        v_scales: f32[L, P, K, B], of values in 8 bits, or None.
        soft_cap: see `api.paged_attention`.
        window: see `api.paged_attention`.
        workers: thread blocks; None takes one for each multiprocessor.
        consumers: 1 or 2 warpgroups of 64 rows each; None chooses: what has room, and 1
            where the interpreter has too few threads for 2.
        interpret: whether to interpret the kernel on the CPU; None interprets where
            jax has no GPU. Or a `plgpu.InterpretGPUParams`.

    Returns:
        dtype[N, H, D], in the dtype of `q`; zeros where `lengths` is 0.

    Raises:
        ValueError: a dtype, head dim, block size or group that the kernel does not
            handle.
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
    if interpret is None or isinstance(interpret, bool):
        interpret = compat.interpret_params(interpret)
    if workers is None:
        workers = INTERPRETED_WORKERS if interpret else compat.multiprocessors()
    kv_dtype, dtype = k_cache.dtype, multiplied_dtype(k_cache.dtype)
    if consumers is None:
        consumers = choose_consumers(head_dim, block_size, kv_dtype)
        if interpret and compat.interpreter_threads() < consumers + 2:
            consumers = 1
    heads = num_heads // kv_heads
    unit = min(block_size, KV_TILE)
    per_block = block_size // unit
    shape = plan_shape(
        metadata,
        heads,
        consumers,
        workers // (kv_heads * -(-head_dim // MAX_COLUMNS)),
    )
    config = Config(
        tiles=Tiles(
            unit=unit,
            per_block=per_block,
            stages=choose_mixed_stages(head_dim, block_size, consumers, kv_dtype),
            scale=scale,
            soft_cap=soft_cap,
            window=window,
            dtype=dtype,
            contiguous=False,
            hints=not interpret,
            quantised=quantised_dtype(kv_dtype),
        ),
        workers=workers,
        consumers=consumers,
        heads=heads,
    )
    plan = make_plan(metadata, window, shape)
    queries = q.astype(dtype).reshape(num_tokens, kv_heads, heads, head_dim)
    first = jnp.asarray(layer * (num_blocks * per_block), jnp.int32).reshape(1)
    results = _run(
        (
            _in_rows(queries, plan, shape, consumers * ROWS),
            as_units(k_cache, v_cache, k_scales, v_scales, unit),
            metadata.block_tables,
            first,
        ),
        plan.pieces,
        _part_shape(num_tokens, shape, consumers),
        q.dtype,
        config,
        interpret,
    )
    out = _gather(results, plan, shape).reshape(q.shape)
    return jnp.where(metadata.lengths[:, None, None] > 0, out, 0.0).astype(q.dtype)


def plan_shape(
    metadata: AttentionMetadata, heads: int, consumers: int, workers: int
) -> Shape:
    """Returns the static sizes of a step's plan.

    Args:
        metadata: of the step.
        heads: query heads on each KV head.
        consumers: warpgroups that compute.
        workers: thread blocks for each KV head.
    """
    num_tokens, num_rows = metadata.rows.shape[0], metadata.block_tables.shape[0]
    chunks = min(metadata.tile_start.shape[0], num_rows)
    run_tokens = consumers * ROWS // heads
    full_runs = num_tokens // run_tokens
    return Shape(
        heads=heads,
        run_tokens=run_tokens,
        decodes=min(num_tokens, num_rows),
        runs=min(num_tokens, full_runs + chunks),
        shares=max(1, workers),
        # Where prompts alone can fill the device, there is little to gain from cuts.
        whole_runs=full_runs >= workers,
    )


def _part_shape(num_tokens: int, shape: Shape, consumers: int) -> tuple[int, int]:
    """Returns how many parts there may be, and the rows of each."""
    tokens = 1 if shape.whole_runs else min(num_tokens, shape.run_tokens)
    return shape.parts, -(-tokens * shape.heads // ROW_UNIT) * ROW_UNIT


def _in_rows(q: jax.Array, plan: Plan, shape: Shape, spare: int) -> jax.Array:
    """Returns queries [N, K, heads, D] in the rows of their items, [K, rows, D].

    Args:
        q: the queries.
        plan: says where each token's queries go.
        shape: of the plan.
        spare: rows that a copy may reach past the last item's.
    """
    num_tokens, kv_heads, heads, head_dim = q.shape
    padding = min(num_tokens, shape.items) * ROW_UNIT  # less than a unit for each item
    num_rows = -(-num_tokens * heads // ROW_UNIT) * ROW_UNIT + padding + spare
    rows = plan.rows[:, None] + jnp.arange(heads)
    source = jnp.arange(num_tokens * heads, dtype=jnp.int32)
    of = jnp.zeros(num_rows, jnp.int32).at[rows.reshape(-1)].set(source, mode="drop")
    q = q.transpose(1, 0, 2, 3).reshape(kv_heads, -1, head_dim)
    return q[:, of]


def _run(
    operands: tuple[Any, ...],
    pieces: Pieces,
    part_shape: tuple[int, int],
    dtype: Any,
    config: Config,
    interpret: Any,
) -> Results:
    """Runs the kernel.

    Args:
        operands: queries dtype[K, rows, D]; the cache, from `mosaic_ring.as_units`;
            tables i32[S, T]; the layer's first unit i32[1].
        pieces: of the plan.
        part_shape: how many parts there may be, and the rows of each.
        dtype: of the result, where the kernel can give it.
        config: static choices.
        interpret: see `paged_attention_mixed`.
    """
    kv_heads, num_rows, head_dim = operands[0].shape
    columns, f32 = min(head_dim, MAX_COLUMNS), jnp.float32
    if dtype != operands[0].dtype or columns < head_dim:
        dtype = f32  # no room for it in place of the queries
    consumers = (config.consumers,)

    def entry(*refs):
        inputs, refs = refs[: len(operands)], refs[len(operands) :]
        count = len(Pieces._fields)
        buffers = Buffers(
            ring=make_ring(config.tiles, head_dim, config.consumers),
            operands=make_operands(config.tiles, head_dim, consumers),
            q_ready=plgpu.Barrier(num_barriers=config.consumers),
            out=swizzled((*consumers, ROWS, columns), f32),
            top=plgpu.SMEM((*consumers, ROWS), f32),
            total=plgpu.SMEM((*consumers, ROWS), f32),
        )
        pl.run_scoped(
            functools.partial(
                thread_block,
                *inputs,
                Pieces(*refs[:count]),
                Results(*refs[count:]),
                config=config,
            ),
            buffers,
            collective_axes="warpgroup",
        )

    kernel = plgpu.kernel(
        entry,
        out_type=(
            jax.ShapeDtypeStruct((kv_heads, num_rows, head_dim), dtype),
            jax.ShapeDtypeStruct((kv_heads, *part_shape, head_dim), f32),
            jax.ShapeDtypeStruct((kv_heads, *part_shape), f32),
            jax.ShapeDtypeStruct((kv_heads, *part_shape), f32),
        ),
        grid=(config.workers,),
        grid_names=("worker",),
        num_threads=config.consumers + 1,
        thread_name="warpgroup",
        compiler_params=compat.compiler_params(approx_math=True),
        interpret=interpret,
    )
    return Results(*kernel(*operands, *pieces))


def _gather(results: Results, plan: Plan, shape: Shape) -> jax.Array:
    """Returns each token's result, [N, K, heads, D]; anything at all for padding."""
    head = jnp.arange(shape.heads)
    whole = results.whole.at[:, plan.rows[:, None] + head].get(mode="clip")
    merged = _merge(results, plan, shape)
    where = plan.cut[:, None], plan.inner[:, None] + head
    cut = merged.at[:, *where].get(mode="clip")
    out = jnp.where(plan.cut[:, None, None] >= 0, cut, whole)
    return out.transpose(1, 0, 2, 3)


def _merge(results: Results, plan: Plan, shape: Shape) -> jax.Array:
    """Merges the parts of the items that are cut, f32[K, shares, rows, D]."""
    cuts, owner = shape.shares, plan.owner
    seen = jnp.arange(results.top.shape[-1]) < plan.live[:, None]  # [parts, rows]
    # What was not written may be NaN.
    top = jnp.where(seen, results.top, MASKED)
    highest = jnp.full((top.shape[0], cuts, top.shape[-1]), MASKED)
    highest = highest.at[:, owner].max(top, mode="drop")
    weight = jnp.exp2(top - highest[:, jnp.minimum(owner, cuts - 1)])
    total = jnp.where(seen, results.total, 0.0) * weight
    out = jnp.where(seen[..., None], results.out, 0.0) * weight[..., None]
    # A product, and not a scatter: that would add in any order.
    place = (jnp.arange(cuts)[:, None] == owner).astype(jnp.float32)
    total = jnp.einsum("cp,kpr->kcr", place, total, precision="highest")
    out = jnp.einsum("cp,kprd->kcrd", place, out, precision="highest")
    return out / jnp.where(total > 0, total, 1.0)[..., None]
