"""Decode with shared prefixes: whether it is right, and what it saves."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu_check.jobs import OURS, Job
from experiments.gpu_check.problems import Problem, exact, make_problem
from experiments.gpu_check.timing import repeated, seconds_of
from pallas_kernels import find_cascade
from pallas_kernels.mosaic_decode import paged_attention_mosaic

# (sequences, tokens of the prefix that all share, tokens of each one's own).
POINTS = ((64, 4096, 256), (8, 1024, 64), (64, 0, 1024))
SMALL = (5, 64, 3)


def attention(cascade: bool) -> Callable:
    """Returns a function of queries and a problem, with or without shared prefixes."""

    def attend(q, problem: Problem):
        block_size, kv_heads = problem.k_cache.shape[2:4]
        group = q.shape[1] // kv_heads
        found = None
        if cascade:
            found = find_cascade(problem.metadata, block_size=block_size, group=group)
        return paged_attention_mosaic(
            q,
            problem.k_cache,
            problem.v_cache,
            0,
            problem.metadata,
            scale=problem.scale,
            cascade=found,
            **problem.scales,
        )

    return attend


def error_of(
    heads: int, kv_heads: int, head_dim: int, dtype: str, small: bool
) -> float:
    """Returns the largest error of a cascade over ragged contexts with a prefix."""
    own = [1, 3, 17, 64, 130]
    sequences, shared, _ = SMALL if small else (40, 320, 0)
    problem = make_problem(
        [shared + own[i % len(own)] for i in range(sequences)],
        16,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        poisoned=True,
        shared=shared,
    )
    out = jax.jit(attention(True))(problem.q.astype(jnp.float32), problem)
    return float(np.abs(np.asarray(out) - exact(problem)).max())


def jobs(small: bool) -> Iterator[Job]:
    """Yields plain decode beside a cascade, at each point.

    Args:
        small: whether to time one tiny point, for an interpreter.
    """
    for sequences, shared, own in (SMALL,) if small else POINTS:
        yield Job(
            "cascade",
            f"cascade, {sequences} sequences that share {shared} tokens and have "
            f"{own} of their own",
            OURS,
            dict(sequences=sequences, shared=shared, own=own),
            functools.partial(_time, sequences, shared, own, small),
        )


def _time(sequences: int, shared: int, own: int, small: bool) -> dict[str, Any]:
    """Returns the times of plain decode and of a cascade."""
    turns, repeats = (1, 1) if small else (20, 5)
    shape: dict[str, Any] = dict(heads=2, kv_heads=1, head_dim=64) if small else {}
    problem = make_problem([shared + own] * sequences, 16, shared=shared, **shape)
    seconds = {}
    for name, with_cascade in (("plain", False), ("cascade", True)):
        run = repeated(attention(with_cascade), turns)
        found = seconds_of(run, problem.q, problem, repeats=repeats)
        seconds[f"{name}_seconds"] = found / turns
    return seconds
