"""The decoder of the Llama family, whatever form its weights have.

Its keys and values live in the paged cache.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from paged_jax.batch import TokenBatch
from paged_jax.kv_cache import KVCache, write_backend, write_kv
from paged_jax.models.config import ModelConfig
from paged_jax.models.rope import inverse_frequencies, rotate, rotation
from pallas_kernels.api import paged_attention
from pallas_kernels.cascade import Cascade, find_cascade

Params = dict[str, Any]


class Weights(Protocol):
    """A model's weights, by what is done with them.

    The dense kernels of a layer are `qkv`, `out`, `gate_up` and `down`; its vectors
    `attention_norm`, `mlp_norm` and, if the model has them, `q_norm`, `k_norm` and
    `qkv_bias`. A layer's index is static or traced.
    """

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Returns dtype[N, hidden] for tokens i32[N]."""
        ...

    def product(self, name: str, layer: int | jax.Array, x: jax.Array) -> jax.Array:
        """Returns `x` dtype[N, in] times the named kernel of a layer, dtype[N, out]."""
        ...

    def vector(self, name: str, layer: int | jax.Array) -> jax.Array:
        """Returns a layer's vector of that name."""
        ...

    def final_norm(self) -> jax.Array:
        """Returns the scale dtype[hidden] of the norm before the head."""
        ...

    def logits(self, x: jax.Array) -> jax.Array:
        """Returns f32[M, V] for hidden states dtype[M, hidden]."""
        ...


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Normalises the last axis by its root mean square, in float32."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return y.astype(x.dtype) * scale


def decode(
    config: ModelConfig,
    weights: Weights,
    batch: TokenBatch,
    cache: KVCache,
    *,
    backend: str,
    unroll: bool,
    cascade: bool = False,
) -> tuple[jax.Array, KVCache]:
    """Runs the step's tokens, writing their keys and values into the cache.

    Args:
        config: the model's shape.
        weights: its weights.
        batch: the N tokens of the step.
        cache: keys and values of the tokens before; donate it.
        backend: of `pallas_kernels.api.paged_attention`.
        unroll: whether the layers are unrolled in the program, or looped over.
        cascade: whether decode tokens read shared prefixes together.

    Returns:
        f32[M, V], the logits that follow the tokens `batch.sample_index`, and the
        cache with the slots `batch.slots` written.
    """
    frequencies = inverse_frequencies(
        config.head_dim, config.rope_theta, config.rope_divisors
    )
    turns = rotation(batch.positions, frequencies)
    prefixes = None
    if cascade:  # the same in all layers
        group = config.num_heads // config.num_kv_heads
        prefixes = find_cascade(
            batch.attention, block_size=cache.block_size, group=group
        )

    def layer(index, carry):
        x, cache = carry
        attended, cache = _attention(
            config, weights, index, x, batch, cache, turns, prefixes, backend
        )
        x = x + attended
        return x + _mlp(config, weights, index, x), cache

    carry = weights.embed(batch.tokens), cache
    if unroll:
        for index in range(config.num_layers):
            carry = layer(index, carry)
    else:
        carry = jax.lax.fori_loop(0, config.num_layers, layer, carry)
    x, cache = carry
    x = rms_norm(x[batch.sample_index], weights.final_norm(), config.rms_norm_eps)
    return weights.logits(x), cache


def _attention(
    config: ModelConfig,
    weights: Weights,
    layer: int | jax.Array,
    x: jax.Array,
    batch: TokenBatch,
    cache: KVCache,
    turns: tuple[jax.Array, jax.Array],
    prefixes: Cascade | None,
    backend: str,
) -> tuple[jax.Array, KVCache]:
    """Returns the attention branch, dtype[N, hidden], and the cache written."""
    c = config
    y = rms_norm(x, weights.vector("attention_norm", layer), c.rms_norm_eps)
    qkv = weights.product("qkv", layer, y)
    if c.qkv_bias:
        qkv = qkv + weights.vector("qkv_bias", layer)
    heads = qkv.reshape(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
    q, k, v = jnp.split(heads, [c.num_heads, c.num_heads + c.num_kv_heads], axis=1)
    if c.qk_norm:
        q = rms_norm(q, weights.vector("q_norm", layer), c.rms_norm_eps)
        k = rms_norm(k, weights.vector("k_norm", layer), c.rms_norm_eps)
    q, k = rotate(q, turns), rotate(k, turns)
    writes = write_backend(backend)
    cache = write_kv(cache, layer, k, v, batch.slots, backend=writes)
    attended = paged_attention(
        q,
        cache.k,
        cache.v,
        layer,
        batch.attention,
        scale=c.head_dim**-0.5,
        cascade=prefixes,
        backend=backend,
        k_scales=cache.k_scales,
        v_scales=cache.v_scales,
    )
    attended = attended.reshape(x.shape[0], c.num_heads * c.head_dim)
    return weights.product("out", layer, attended), cache


def _mlp(
    config: ModelConfig, weights: Weights, layer: int | jax.Array, x: jax.Array
) -> jax.Array:
    """Returns the gated MLP's branch, dtype[N, hidden]."""
    y = rms_norm(x, weights.vector("mlp_norm", layer), config.rms_norm_eps)
    gate, up = jnp.split(weights.product("gate_up", layer, y), 2, axis=-1)
    return weights.product("down", layer, jax.nn.silu(gate) * up)
