"""How the ring is filled: each copy goes to where the TMA unit can put it."""

import jax.numpy as jnp
import pytest

from pallas_kernels import compat, limits
from pallas_kernels.quantised_kv import is_quantised

if not compat.has_mosaic():
    pytest.skip("the pallas backend needs jax >= 0.11", allow_module_level=True)

from pallas_kernels.mosaic_ring import KV_TILE, MAX_COLUMNS, Tiles

CASES = [
    (2**i, head_dim, dtype)
    for i in range(9)
    for head_dim in limits.HEAD_DIMS
    for dtype in (jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn)
    if not is_quantised(dtype) or 2**i >= limits.LEAST_QUANTISED_BLOCK
]


@pytest.mark.parametrize("block_size,head_dim,dtype", CASES)
def test_copies_lie_where_the_tma_unit_can_put_them(block_size, head_dim, dtype):
    quantised = dtype if is_quantised(dtype) else None
    unit = min(block_size, KV_TILE)
    tiles = Tiles(
        unit=unit,
        per_block=block_size // unit,
        stages=2,
        scale=1.0,
        soft_cap=None,
        window=None,
        dtype=jnp.bfloat16,
        contiguous=False,
        hints=False,
        quantised=quantised,
    )
    for columns in (head_dim, min(head_dim, MAX_COLUMNS)):
        tokens = tiles.per_copy(columns)
        row = columns * jnp.dtype(dtype).itemsize
        assert unit % tokens == 0
        # A single row is without gaps, and may go to any multiple of 16 bytes.
        assert tokens * row % (16 if tokens == 1 else 128) == 0
