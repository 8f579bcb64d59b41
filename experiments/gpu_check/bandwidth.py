"""How much of the memory's speed decode attention gets, ours and others'."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from experiments.gpu_check.jobs import (
    CHECKED,
    CONTIGUOUS,
    CUDNN,
    OURS,
    TRITON,
    XLA,
    Job,
)
from experiments.gpu_check.problems import Problem, make_problem
from experiments.gpu_check.timing import REPEATS, repeated, seconds_of
from pallas_kernels import paged_attention
from pallas_kernels.mosaic_decode import paged_attention_mosaic

# (batch, tokens in each context). At 4 KiB a token, more than the L2 cache holds.
POINTS = ((1, 65536), (16, 4096), (64, 1024), (256, 1024))
BLOCK_SIZES = (16, 64)


def jobs(small: bool) -> Iterator[Job]:
    """Yields a copy, and each contender at each point.

    Args:
        small: whether to time one tiny point, for an interpreter.
    """
    num_bytes = 2**20 if small else 2**30
    copy = functools.partial(_copy, num_bytes)
    yield Job("copy", "copy of memory", CHECKED, dict(name="copy"), copy)
    points, sizes = (POINTS, BLOCK_SIZES) if not small else (((2, 40),), (16,))
    for name in CONTENDERS:
        if small and name in ("cudnn", "triton", "e4m3"):
            continue
        for batch, length in points:
            for block_size in sizes:
                yield Job(
                    "bandwidth",
                    f"{name} {batch} x {length}, blocks of {block_size}",
                    RANKS.get(name, OURS),
                    dict(batch=batch, length=length, block_size=block_size, name=name),
                    functools.partial(_time, name, batch, length, block_size, small),
                    ours=name not in OTHERS,
                )


def _copy(num_bytes: int) -> dict[str, Any]:
    """Returns bytes per second, read and written, of a copy on the device."""
    source = jnp.zeros(num_bytes // 4, jnp.float32)
    # Not a plain copy, which a compiler may leave out.
    seconds = seconds_of(jax.jit(lambda x: x + 1), source)
    return dict(seconds=seconds, speed=2 * source.nbytes / seconds)


def _time(
    name: str, batch: int, length: int, block_size: int, small: bool
) -> dict[str, Any]:
    """Returns what a contender does at a point."""
    shape: dict[str, Any] = dict(heads=2, kv_heads=1, head_dim=64) if small else {}
    problem = make_problem(
        [length] * batch,
        block_size,
        shuffled=name != "contiguous",
        dtype=QUANTISED.get(name, "bfloat16"),
        **shape,
    )
    attend, arrays = CONTENDERS[name](problem)
    turns, repeats = (1, 1) if small else (XLA_TURNS if name == "xla" else 20, REPEATS)
    run = repeated(attend, turns)
    seconds = seconds_of(run, problem.q, arrays, repeats=repeats) / turns
    return dict(seconds=seconds, speed=problem.kv_bytes / seconds)


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
OTHERS = ("cudnn", "triton")
RANKS = {"contiguous": CONTIGUOUS, "cudnn": CUDNN, "triton": TRITON, "xla": XLA}
# Of a backend that is so much slower, enough.
XLA_TURNS = 4
