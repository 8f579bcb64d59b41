"""What the `pallas` backend takes: known before anything is compiled for it."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.compat import require_mosaic

HEAD_DIMS = (64, 80, 96, 128, 256)
# Query heads on a KV head: the rows of one product.
MAX_GROUP = 64
KV_DTYPES = (jnp.bfloat16, jnp.float16)
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
        kv_dtype: of the KV cache.

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
    if jnp.dtype(kv_dtype) not in KV_DTYPES:
        raise ValueError(
            "The pallas attention backend takes a 16-bit KV cache, bfloat16 or "
            f"float16, got {jnp.dtype(kv_dtype)}; convert the cache, or use "
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
