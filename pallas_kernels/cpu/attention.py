"""Paged attention on x86 CPUs, as an operation of a jitted program."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cpu.target import Target, host_target
from pallas_kernels.metadata import AttentionMetadata
from pallas_kernels.quantised_kv import number_dtype

_LEAST_LANES = 4
DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")


def obstacle(head_dim: int, kv_dtype: str, target: Target | None = None) -> str | None:
    """Returns why there is no attention for such a cache here; None if there is.

    Args:
        head_dim: D.
        kv_dtype: dtype of the cache.
        target: the processor; by default this machine's.
    """
    target = target or host_target()
    if jax.default_backend() != "cpu" or target is None:
        return (
            "needs an x86 CPU with AVX2 and the package llvmlite, and jax on that CPU"
        )
    if head_dim % _LEAST_LANES:
        return f"takes head dims that {_LEAST_LANES} divides, not {head_dim}"
    if kv_dtype not in DTYPES:
        return f"takes a KV cache of {', '.join(DTYPES)}, not {kv_dtype}"
    return None


def paged_attention_cpu(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    layer: int | jax.Array,
    metadata: AttentionMetadata,
    *,
    scale: float,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    target: Target | None = None,
) -> jax.Array:
    """Runs each token's heads over its sequence's blocks, in code made by LLVM.

    A token's result is the same to the bit whatever the other tokens are.

    Args:
        q: dtype[N, H, D], one query per token.
        k_cache: dtype[L, P, B, K, D].
        v_cache: dtype[L, P, B, K, D].
        layer: which layer of the cache.
        metadata: where each token finds its context.
        scale: factor on the scores, before the softmax.
        k_scales: f32[L, P, K, B], of keys in 8 bits, or None.
        v_scales: f32[L, P, K, B], of values in 8 bits, or None.
        target: the processor; by default this machine's.

    Returns:
        dtype[N, H, D], in the dtype of `q`; zeros where `lengths` is 0.

    Raises:
        ValueError: there is no code for such a cache on this machine.
    """
    head_dim, kv_dtype = q.shape[-1], number_dtype(k_cache.dtype).name
    why_not = obstacle(head_dim, kv_dtype, target)
    if why_not is not None:
        raise ValueError(f"The cpu attention backend {why_not}.")
    target = target or host_target()
    assert target is not None
    while head_dim % target.lanes:
        target = target._replace(lanes=target.lanes // 2)
    together = _heads_together(target, head_dim, q.shape[1] // k_cache.shape[3])
    _register(target, head_dim, kv_dtype, together)
    call = jax.ffi.ffi_call(
        _name(target, head_dim, kv_dtype, together),
        jax.ShapeDtypeStruct(q.shape, jnp.float32),
    )
    out = call(
        q.astype(jnp.float32) * scale,
        k_cache,
        v_cache,
        jnp.int32(layer),
        metadata.block_tables,
        metadata.rows,
        metadata.lengths,
        metadata.num_tokens,
        *(scales for scales in (k_scales, v_scales) if scales is not None),
    )
    return out.astype(q.dtype)


def _heads_together(target: Target, head_dim: int, group: int) -> int:
    """Returns how many query heads of a KV head are computed side by side.

    Side by side they wait less on each other's results; their sums must fit in half of
    the registers.
    """
    most = max(1, target.registers // 2 // (head_dim // target.lanes))
    return max(size for size in range(1, most + 1) if group % size == 0)


def _name(target: Target, head_dim: int, dtype: str, together: int) -> str:
    kind = f"{head_dim}_{dtype}_{together}"
    return f"paged_jax_attention_{target.cpu}_{target.lanes}_{kind}"


@functools.cache
def _register(target: Target, head_dim: int, dtype: str, together: int) -> Any:
    # llvmlite is only needed where its code runs.
    from llvmlite import ir

    from pallas_kernels.cpu import attention_ir, custom_call

    module = ir.Module()
    attention_ir.build(module, target, head_dim, dtype, together, "attention")
    names = {"attention": _name(target, head_dim, dtype, together)}
    return custom_call.register(module, target, names)
