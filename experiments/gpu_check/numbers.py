"""Every kernel on the device against what it must compute; jax and numpy only."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu_check import sharing
from experiments.gpu_check.jobs import CHECKED, Job
from experiments.gpu_check.problems import exact, make_problem
from pallas_kernels import (
    copy_blocks_mosaic,
    gather_blocks_mosaic,
    scatter_blocks_mosaic,
    write_kv_mosaic,
)
from pallas_kernels.mosaic_decode import paged_attention_mosaic
from pallas_kernels.mosaic_mixed import paged_attention_mixed
from pallas_kernels.quantised_kv import scale_shape

# Largest errors at unit scale.
ERRORS = {"bfloat16": 4e-3, "float16": 1e-3}
HEADS = {64: (9, 3), 80: (4, 4), 96: (4, 4), 128: (32, 8), 256: (8, 4)}
LENGTHS = [0, 1, 15, 16, 17, 63, 64, 65, 300, 1111]
CHUNKS = [(0, 1), (0, 129), (63, 2), (64, 31), (1000, 90)]


class _Case(NamedTuple):
    """An attention kernel in one shape, and what else it takes."""

    name: str
    head_dim: int
    block_size: int
    dtype: str
    window: int | None = None
    soft_cap: float | None = None
    contiguous: bool = False

    @property
    def title(self) -> str:
        text = f"{self.name} D={self.head_dim} B={self.block_size} {self.dtype}"
        if self.window:
            text += " window cap"
        return text + " contiguous" * self.contiguous


def jobs(small: bool) -> Iterator[Job]:
    """Yields each kernel in each shape: its error, the limit, and whether it holds.

    Args:
        small: whether to check few and small cases, for an interpreter.
    """
    shapes = [(d, 16, "bfloat16") for d in HEADS]
    shapes += [(128, b, "float16") for b in (1, 2, 4, 8, 64, 256)]
    narrow = [(d, 16, "int8") for d in HEADS]
    narrow += [(128, b, "float8_e4m3fn") for b in (8, 64, 256)]
    shapes = [shapes[0], narrow[0]] if small else [*shapes, *narrow]
    cases = [_Case(name, *shape) for name in ("decode", "mixed") for shape in shapes]
    plain = shapes[0] if small else (128, 16, "bfloat16")
    masked: dict[str, Any] = dict(window=10 if small else 100, soft_cap=2.0)
    cases.append(_Case("decode", *plain, contiguous=True))
    cases += [_Case(name, *plain, **masked) for name in ("decode", "mixed")]
    for case in cases:
        # What has 8 bits is multiplied as bfloat16.
        limit = ERRORS.get(case.dtype, ERRORS["bfloat16"])
        yield _job(case.title, limit, functools.partial(_error, case, small))
    shared = [(d, "bfloat16") for d in (64, 128, 256)]
    shared += [(64, "int8"), (128, "float8_e4m3fn")]
    for head_dim, dtype in shared[:1] if small else shared:
        shape = *HEADS[head_dim], head_dim, dtype, small
        error = functools.partial(sharing.error_of, *shape)
        yield _job(f"cascade D={head_dim} B=16 {dtype}", ERRORS["bfloat16"], error)
    for name, check in WRITES.items():
        for what, dtype in (("", "bfloat16"), (" int8", "int8")):
            yield _job(name + what, 0.0, functools.partial(check, dtype))


def _job(title: str, limit: float, error_of: Callable[[], float]) -> Job:
    def run() -> dict[str, Any]:
        error = error_of()
        return dict(error=error, holds=bool(error <= limit))

    return Job("numbers", title, CHECKED, dict(name=title, limit=limit), run)


def _error(case: _Case, small: bool) -> float:
    """Returns the largest error of an attention kernel, with NaN in unused slots."""
    mixed = case.name == "mixed"
    chunks = [(7, 9)] if small else CHUNKS
    heads, kv_heads = HEADS[case.head_dim]
    problem = make_problem(
        [3, 17] if small else LENGTHS,
        case.block_size,
        chunks=chunks if mixed else [],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=case.head_dim,
        dtype=case.dtype,
        poisoned=True,
        shuffled=not case.contiguous,
    )
    masks: dict[str, Any] = dict(window=case.window, soft_cap=case.soft_cap)
    kernel = paged_attention_mixed if mixed else paged_attention_mosaic
    if case.contiguous:
        kernel = functools.partial(kernel, contiguous=True)

    @jax.jit
    def attend(problem):
        q, k, v, metadata = problem[:4]
        # In float32, so that rounding the result does not count.
        q = q.astype(jnp.float32)
        options = problem.scales | masks
        return kernel(q, k, v, 0, metadata, scale=problem.scale, **options)

    return float(np.abs(np.asarray(attend(problem)) - exact(problem, **masks)).max())


# Of the kernels that move bytes: the cache, and what comes from where.
SHAPE = (2, 6, 16, 3, 64)
SOURCE, TARGET = (1, 5), (4, 2)


def _cache(dtype: str) -> tuple[list[np.ndarray], list[jax.Array]]:
    """Returns the arrays of a small cache in float32, and as they are kept."""

    def counted(shape: tuple[int, ...], most: int) -> np.ndarray:
        return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) % most

    k = counted(SHAPE, 101)
    arrays, dtypes = [k, -k], [dtype] * 2
    if dtype == "int8":
        scales = counted(scale_shape(SHAPE), 251)
        arrays, dtypes = [*arrays, scales, -scales], [*dtypes, "float32", "float32"]
    return arrays, [jnp.asarray(x, kept) for x, kept in zip(arrays, dtypes)]


def _difference(got: Any, expected: list[np.ndarray]) -> float:
    errors = [np.abs(np.asarray(g, np.float32) - e) for g, e in zip(got, expected)]
    return float(max(e.max() for e in errors))


def _write(dtype: str) -> float:
    arrays, cache = _cache(dtype)
    slots = jnp.array([33, 0, 95])
    new = [np.full((3, *x.shape[3:]), i + 1.0) for i, x in enumerate(arrays[:2])]
    new += [np.full((3, x.shape[2]), i + 3.0) for i, x in enumerate(arrays[2:])]
    out = jax.jit(write_kv_mosaic)(
        cache, [jnp.asarray(x, jnp.float32) for x in new], jnp.int32(1), slots
    )
    for i, array in enumerate(arrays):
        for block, offset in ((2, 1), (5, 15)):
            array[(1, block, offset) if i < 2 else (1, block, slice(None), offset)] = (
                i + 1
            )
    return _difference(out, arrays)


def _copied(arrays: list[np.ndarray]) -> list[np.ndarray]:
    for array in arrays:
        array[:, list(TARGET)] = array[:, list(SOURCE)]
    return arrays


def _copy(dtype: str) -> float:
    arrays, cache = _cache(dtype)
    source, target = jnp.array(SOURCE), jnp.array(TARGET)
    out = jax.jit(copy_blocks_mosaic)(cache, source, target, jnp.int32(2))
    return _difference(out, _copied(arrays))


def _gather(dtype: str) -> float:
    arrays, cache = _cache(dtype)
    staged = jax.jit(gather_blocks_mosaic)(cache, jnp.array(SOURCE), jnp.int32(2))
    return _difference(staged, [x[:, list(SOURCE)] for x in arrays])


def _scatter(dtype: str) -> float:
    arrays, cache = _cache(dtype)
    staged = [x[:, jnp.array(SOURCE)] for x in cache]
    out = jax.jit(scatter_blocks_mosaic)(cache, staged, jnp.array(TARGET), jnp.int32(2))
    return _difference(out, _copied(arrays))


WRITES = {"write": _write, "copy": _copy, "gather": _gather, "scatter": _scatter}
