"""What the `pallas` backend takes: known before anything is compiled for it."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.compat import require_mosaic
from pallas_kernels.quantised_kv import is_quantised

HEAD_DIMS = (64, 80, 96, 128, 256)
# Query heads on a KV head: the rows of one product.
MAX_GROUP = 64
KV_DTYPES = (jnp.bfloat16, jnp.float16)
# Of a quantised cache, in tokens: the TMA unit copies no less than 16 bytes, and wants
# the blocks of a tile 128 bytes apart.
LEAST_QUANTISED_BLOCK = 8
# Compute capability of NVIDIA Hopper.
_HOPPER = "9.0"


def check_pallas(
    *, num_heads: int, kv_heads: int, head_dim: int, block_size: int, kv_dtype: Any
) -> None:
    """Raises where the `pallas` backend cannot serve a model and its cache.

    Args:
        num_heads: H, query heads.
        kv_heads: K, KV heads.
        head_dim: D.
        block_size: B, tokens in a block.
        kv_dtype: of the KV cache, or of the numbers in it.

    Raises:
        ValueError: the jax, the GPU, a dtype, a head dim, a block size or a group that
            the kernel does not handle. One line.
    """
    require_mosaic()
    if jax.default_backend() == "gpu":
        found = str(jax.local_devices()[0].compute_capability)
        if found != _HOPPER:
            raise ValueError(
                "The pallas attention backend takes NVIDIA Hopper GPUs, of compute "
                f'capability {_HOPPER}, got {found}; use backend="xla".'
            )
    if jnp.dtype(kv_dtype) not in KV_DTYPES and not is_quantised(kv_dtype):
        raise ValueError(
            "The pallas attention backend takes a 16-bit KV cache, bfloat16 or "
            "float16, or a quantised one, int8 or float8_e4m3fn, got "
            f'{jnp.dtype(kv_dtype)}; convert the cache, or use backend="xla".'
        )
    if is_quantised(kv_dtype) and block_size < LEAST_QUANTISED_BLOCK:
        raise ValueError(
            "The pallas attention backend takes a quantised KV cache with blocks of "
            f"{LEAST_QUANTISED_BLOCK} tokens or more, got {block_size}; use "
            'backend="xla".'
        )
    if head_dim not in HEAD_DIMS:
        raise ValueError(
            f"The pallas attention backend takes head dims {HEAD_DIMS}, got "
            f'{head_dim}; use backend="xla".'
        )
    if num_heads > MAX_GROUP * kv_heads:
        raise ValueError(
            f"The pallas attention backend takes up to {MAX_GROUP} query heads on each "
            f'KV head, got {num_heads // kv_heads}; use backend="xla".'
        )
