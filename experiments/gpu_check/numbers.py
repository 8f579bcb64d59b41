"""Every kernel on the device against what it must compute; jax and numpy only."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu_check import sharing
from experiments.gpu_check.problems import exact, make_problem
from pallas_kernels import mosaic_blocks
from pallas_kernels.mosaic_decode import paged_attention_mosaic
from pallas_kernels.mosaic_mixed import paged_attention_mixed
from pallas_kernels.quantised_kv import scale_shape

# Largest errors at unit scale.
ERRORS = {"bfloat16": 4e-3, "float16": 1e-3}
HEADS = {64: (9, 3), 80: (4, 4), 96: (4, 4), 128: (32, 8), 256: (8, 4)}
LENGTHS = [0, 1, 15, 16, 17, 63, 64, 65, 300, 1111]
CHUNKS = [(0, 1), (0, 129), (63, 2), (64, 31), (1000, 90)]


def check(small: bool) -> Iterator[dict[str, Any]]:
    """Yields name, error, limit and whether it holds, for each kernel and shape.

    Args:
        small: whether to check few and small cases, for an interpreter.
    """
    shapes = [(d, 16, "bfloat16") for d in HEADS]
    shapes += [(128, b, "float16") for b in (1, 2, 4, 8, 64, 256)]
    narrow = [(d, 16, "int8") for d in HEADS]
    narrow += [(128, b, "float8_e4m3fn") for b in (8, 64, 256)]
    shapes = [shapes[0], narrow[0]] if small else [*shapes, *narrow]
    lengths = [3, 17] if small else LENGTHS
    chunks = [(7, 9)] if small else CHUNKS
    for name, function, more in (
        ("decode", paged_attention_mosaic, []),
        ("mixed", paged_attention_mixed, chunks),
    ):
        for head_dim, block_size, dtype in shapes:
            heads, kv_heads = HEADS[head_dim]
            problem = make_problem(
                lengths,
                block_size,
                chunks=more,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                dtype=dtype,
                poisoned=True,
            )

            # In float32, so that rounding the result does not count.
            @jax.jit
            def attend(problem, function=function, scale=problem.scale):
                q, k, v, metadata = problem[:4]
                q = q.astype(jnp.float32)
                return function(q, k, v, 0, metadata, scale=scale, **problem.scales)

            error = float(np.abs(np.asarray(attend(problem)) - exact(problem)).max())
            config = f"{name} D={head_dim} B={block_size} {dtype}"
            # What has 8 bits is multiplied as bfloat16.
            yield _row(config, error, ERRORS.get(dtype, ERRORS["bfloat16"]))
    shared = [(d, "bfloat16") for d in (64, 128, 256)]
    shared += [(64, "int8"), (128, "float8_e4m3fn")]
    for head_dim, dtype in shared[:1] if small else shared:
        error = sharing.error_of(*HEADS[head_dim], head_dim, dtype, small)
        yield _row(f"cascade D={head_dim} B=16 {dtype}", error, ERRORS["bfloat16"])
    yield from _check_writes()


def _row(name: str, error: float, limit: float) -> dict[str, Any]:
    return dict(name=name, error=error, limit=limit, holds=bool(error <= limit))


def _check_writes() -> Iterator[dict[str, Any]]:
    """Yields the kernels that move bytes: they may not differ at all."""
    shape = (2, 6, 16, 3, 64)

    def counted(shape: tuple[int, ...], most: int) -> np.ndarray:
        return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) % most

    k = counted(shape, 251)
    yield from _check_writes_of("", [k, -k], ["bfloat16"] * 2)
    k, scales = counted(shape, 101), counted(scale_shape(shape), 251)
    arrays = [k, -k, scales, -scales]
    yield from _check_writes_of(" int8", arrays, ["int8"] * 2 + ["float32"] * 2)


def _check_writes_of(
    what: str, arrays: list[np.ndarray], dtypes: list[str]
) -> Iterator[dict[str, Any]]:
    """Yields them for a cache of some arrays."""
    cache = [jnp.asarray(x, dtype) for x, dtype in zip(arrays, dtypes)]

    def row(name: str, got: Any, expected: list[np.ndarray]) -> dict:
        errors = [np.abs(np.asarray(g, np.float32) - e) for g, e in zip(got, expected)]
        return _row(name + what, float(max(e.max() for e in errors)), 0.0)

    slots = np.array([33, 0, 95], np.int32)
    new = [np.full((3, *x.shape[3:]), i + 1.0) for i, x in enumerate(arrays[:2])]
    new += [np.full((3, x.shape[2]), i + 3.0) for i, x in enumerate(arrays[2:])]
    out = jax.jit(mosaic_blocks.write_kv_mosaic)(
        cache, [jnp.asarray(x, jnp.float32) for x in new], jnp.int32(1), slots
    )
    written = [x.copy() for x in arrays]
    for i, array in enumerate(written):
        for block, offset in ((2, 1), (5, 15)):
            array[(1, block, offset) if i < 2 else (1, block, slice(None), offset)] = (
                i + 1
            )
    yield row("write", out, written)

    source, target, count = jnp.array([1, 5]), jnp.array([4, 2]), jnp.int32(2)
    out = jax.jit(mosaic_blocks.copy_blocks_mosaic)(cache, source, target, count)
    copied = [x.copy() for x in arrays]
    for array in copied:
        array[:, [4, 2]] = array[:, [1, 5]]
    yield row("copy", out, copied)

    staged = jax.jit(mosaic_blocks.gather_blocks_mosaic)(cache, source, count)
    yield row("gather", staged, [x[:, [1, 5]] for x in arrays])
    out = jax.jit(mosaic_blocks.scatter_blocks_mosaic)(cache, staged, target, count)
    yield row("scatter", out, copied)
