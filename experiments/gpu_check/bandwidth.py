"""How much of the memory's speed decode attention gets, ours and others'."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from experiments.gpu_check.problems import Problem, make_problem
from experiments.gpu_check.timing import REPEATS, repeated, seconds_of
from pallas_kernels import paged_attention
from pallas_kernels.mosaic_decode import paged_attention_mosaic

# (batch, tokens in each context). At 4 KiB a token, more than the L2 cache holds.
POINTS = ((1, 65536), (16, 4096), (64, 1024), (256, 1024))
BLOCK_SIZES = (16, 64)


def copy_speed(num_bytes: int) -> float:
    """Returns bytes per second, read and written, of a copy on the device."""
    source = jnp.zeros(num_bytes // 4, jnp.float32)
    # Not a plain copy, which a compiler may leave out.
    seconds = seconds_of(jax.jit(lambda x: x + 1), source)
    return 2 * source.nbytes / seconds


def compare(small: bool) -> Iterator[dict[str, Any]]:
    """Yields what each contender does at each point.

    Args:
        small: whether to time one tiny point, for an interpreter.
    """
    points, sizes = (POINTS, BLOCK_SIZES) if not small else (((2, 40),), (16,))
    turns, repeats = (1, 1) if small else (20, REPEATS)
    shape: dict[str, Any] = {}
    if small:
        shape = dict(heads=2, kv_heads=1, head_dim=64)
    for batch, length in points:
        for block_size in sizes:
            for name, make in CONTENDERS.items():
                if small and name in ("cudnn", "triton", "e4m3"):
                    continue
                problem = make_problem(
                    [length] * batch,
                    block_size,
                    shuffled=name != "contiguous",
                    dtype=QUANTISED.get(name, "bfloat16"),
                    **shape,
                )
                row = dict(batch=batch, length=length, block_size=block_size, name=name)
                try:
                    attend, arrays = make(problem)
                    run = repeated(attend, turns)
                    seconds = seconds_of(run, problem.q, arrays, repeats=repeats)
                    seconds /= turns
                except Exception as error:
                    # Others' kernels are private, or refuse a shape; ours must run.
                    if name in OURS:
                        raise
                    text = str(error).strip().splitlines() or [type(error).__name__]
                    yield row | dict(seconds=None, why_not=text[0][:120])
                    continue
                yield row | dict(seconds=seconds, speed=problem.kv_bytes / seconds)


# What a contender attends with: a function of queries and of arrays, and these arrays.
Attention = tuple[Callable[[jax.Array, Any], jax.Array], Any]


def _ours(problem: Problem, contiguous: bool = False) -> Attention:
    def attend(q, problem: Problem):
        return paged_attention_mosaic(
            q,
            problem.k_cache,
            problem.v_cache,
            0,
            problem.metadata,
            scale=problem.scale,
            contiguous=contiguous,
            **problem.scales,
        )

    return attend, problem


def _xla(problem: Problem) -> Attention:
    def attend(q, problem: Problem):
        return paged_attention(
            q,
            problem.k_cache,
            problem.v_cache,
            0,
            problem.metadata,
            scale=problem.scale,
            backend="xla",
        )

    return attend, problem


def _cudnn(problem: Problem) -> Attention:
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    # As cuDNN wants the cache: no layers, and as many blocks as the tables name.
    keys, values = problem.k_cache[0, 1:], problem.v_cache[0, 1:]
    tables = (problem.metadata.block_tables - 1)[:, None, :, None]

    def attend(q, arrays):
        keys, values, lengths, tables = arrays
        out = cudnn.paged_attention(
            q[:, None],
            keys,
            values,
            jnp.ones_like(lengths),
            lengths,
            tables,
            tables,
            scale=problem.scale,
            mask_type=cudnn.MaskType.PADDING,
        )
        return out[:, 0]

    return attend, (keys, values, problem.metadata.lengths, tables)


def _triton(problem: Problem) -> Attention:
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention as other

    keys, values = (
        x[0].transpose(2, 0, 1, 3) for x in (problem.k_cache, problem.v_cache)
    )
    metadata = problem.metadata

    def attend(q, arrays):
        # It leaves the scaling to its caller.
        return other(q * problem.scale, *arrays)

    return attend, (keys, values, metadata.block_tables, metadata.lengths)


CONTENDERS: dict[str, Callable[[Problem], Attention]] = {
    "pallas": _ours,
    "contiguous": functools.partial(_ours, contiguous=True),
    "int8": _ours,
    "e4m3": _ours,
    "cudnn": _cudnn,
    "triton": _triton,
    "xla": _xla,
}
# What the cache of these holds; that of the others, bfloat16.
QUANTISED = {"int8": "int8", "e4m3": "float8_e4m3fn"}
OURS = ("pallas", "contiguous", *QUANTISED, "xla")
