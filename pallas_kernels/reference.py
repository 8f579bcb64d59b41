"""Paged attention in plain jnp: what every other backend must compute."""

import jax
import jax.numpy as jnp

from pallas_kernels.metadata import AttentionMetadata
from pallas_kernels.quantised_kv import widen


def paged_attention_reference(
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
) -> jax.Array:
    """Gathers each token's whole context, masks it, and takes a softmax in float32.

    Memory and time grow with `N * T * B`; use it to understand and to check, not to
    serve.

    Args:
        q: dtype[N, H, D], one query per token.
        k_cache: dtype[L, P, B, K, D]. Query head `h` reads KV head `h // (H // K)`.
        v_cache: dtype[L, P, B, K, D].
        layer: which layer of the cache.
        metadata: where each token finds its context. Only `block_tables`, `rows` and
            `lengths` are read.
        scale: factor on the scores, before the softmax.
        k_scales: f32[L, P, K, B], of keys in 8 bits, or None.
        v_scales: f32[L, P, K, B], of values in 8 bits, or None.
        soft_cap: bound that the scores approach, or None.
        window: how many of the last tokens a query sees, or None for all.

    Returns:
        dtype[N, H, D], in the dtype of `q`; zeros where `lengths` is 0.
    """
    num_tokens, _, head_dim = q.shape
    kv_heads = k_cache.shape[3]

    tables = metadata.block_tables[metadata.rows]  # [N, T]

    def gather(cache: jax.Array, scales: jax.Array | None) -> jax.Array:
        taken = widen(cache[layer, tables])  # [N, T, B, K, D]
        if scales is not None:
            taken *= scales[layer, tables].swapaxes(2, 3)[..., None]
        return taken.reshape(num_tokens, -1, kv_heads, head_dim)

    keys, values = gather(k_cache, k_scales), gather(v_cache, v_scales)
    position, lengths = jnp.arange(keys.shape[1]), metadata.lengths[:, None]
    visible = position < lengths  # [N, T * B]
    if window is not None:
        visible &= position >= lengths - window

    # Slots past the length hold anything, NaN included, and 0 * NaN is NaN: the values
    # are cleared, not only their weights.
    values = jnp.where(visible[:, :, None, None], values, 0.0)

    queries = q.astype(jnp.float32).reshape(num_tokens, kv_heads, -1, head_dim)
    scores = scale * jnp.einsum("nkgd,ntkd->nkgt", queries, keys, precision="highest")
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(visible[:, None, None, :], scores, -jnp.inf)
    # The maximum of an empty context is -inf; 0 keeps the weights 0 and not NaN.
    top = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0))
    total = weights.sum(axis=-1)
    out = jnp.einsum("nkgt,ntkd->nkgd", weights, values, precision="highest")
    out = out / jnp.where(total > 0, total, 1.0)[..., None]
    return out.reshape(q.shape).astype(q.dtype)
