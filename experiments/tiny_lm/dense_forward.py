"""The decoder over whole texts at once, for training: no cache."""

import jax
import jax.numpy as jnp

from paged_jax.models.config import ModelConfig
from paged_jax.models.decoder import Params, rms_norm
from paged_jax.models.rope import inverse_frequencies, rotate, rotation


def dense_logits(config: ModelConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """Returns f32[texts, N, V], the logits that follow each token.

    Equals `paged_jax.models.llama.forward`, for a plain Llama: without biases and
    without norms of the heads.

    Args:
      config: the model's shape.
      params: as `llama.init_params` returns.
      tokens: i32[texts, N], texts from their position 0 on.
    """
    texts, length = tokens.shape
    head_sizes = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    frequencies = inverse_frequencies(
        config.head_dim, config.rope_theta, config.rope_divisors
    )
    turns = rotation(jnp.tile(jnp.arange(length), texts), frequencies)

    def norm(x: jax.Array, weights: Params) -> jax.Array:
        return rms_norm(x, weights["scale"], config.rms_norm_eps)

    def attention(x: jax.Array, layer: Params) -> jax.Array:
        qkv = norm(x, layer["attention_norm"]) @ layer["qkv"]["kernel"]
        heads = qkv.reshape(texts * length, sum(head_sizes), config.head_dim)
        q, k, v = jnp.split(heads, [head_sizes[0], sum(head_sizes[:2])], axis=1)
        q, k, v = (
            part.reshape(texts, length, -1, config.head_dim)
            for part in (rotate(q, turns), rotate(k, turns), v)
        )
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return attended.reshape(texts * length, -1) @ layer["out"]["kernel"]

    def mlp(x: jax.Array, layer: Params) -> jax.Array:
        both = norm(x, layer["mlp_norm"]) @ layer["gate_up"]["kernel"]
        gate, up = jnp.split(both, 2, axis=-1)
        return (jax.nn.silu(gate) * up) @ layer["down"]["kernel"]

    x = params["embedding"][tokens.reshape(-1)]
    for index in range(config.num_layers):
        layer = params[f"layer_{index}"]
        x = x + attention(x, layer)
        x = x + mlp(x, layer)
    head = params["embedding"] if config.tie_embeddings else params["head"]
    logits = norm(x, params["norm"]) @ head.T
    return logits.reshape(texts, length, -1).astype(jnp.float32)
