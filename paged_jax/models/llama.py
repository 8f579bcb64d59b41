"""A decoder of the Llama family whose keys and values live in the paged cache."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from paged_jax.batch import TokenBatch
from paged_jax.kv_cache import KVCache, init_kv_cache, write_kv
from paged_jax.models.config import ModelConfig
from paged_jax.models.rope import inverse_frequencies, rotate, rotation
from pallas_kernels.api import paged_attention
from pallas_kernels.metadata import AttentionMetadata

Params = dict[str, Any]

# Dense kernels are [in, out], the embedding [V, hidden]; see docs/design.md for what
# other layouts cost on CPU.
_dense_init = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
_bias_init = nn.initializers.normal(0.5)
# [V, hidden]: rows of length one, small beside what the layers add, so that a random
# model with a tied head does not just repeat its input.
_embedding_init = nn.initializers.variance_scaling(
    1.0, "fan_in", "normal", in_axis=-1, out_axis=-2
)
# Standard deviation of a random model's logits: wide, so that near-ties are rare.
_LOGIT_SPREAD = 4.0


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last axis, in float32."""

    eps: float
    initial_scale: float = 1.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises dtype[..., features]."""
        init = nn.initializers.constant(self.initial_scale)
        scale = self.param("scale", init, x.shape[-1:], x.dtype)
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return y.astype(x.dtype) * scale


class Dense(nn.Module):
    """A linear map of the last axis; the kernel is [in, out]."""

    features: int
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps dtype[N, in] to dtype[N, features]."""
        shape = (x.shape[-1], self.features)
        y = x @ self.param("kernel", _dense_init, shape, x.dtype)
        if self.use_bias:
            y = y + self.param("bias", _bias_init, (self.features,), x.dtype)
        return y


class Layer(nn.Module):
    """One decoder layer: attention through the paged cache, then the gated MLP."""

    config: ModelConfig
    backend: str

    @nn.compact
    def __call__(
        self,
        index: jax.Array,
        x: jax.Array,
        batch: TokenBatch,
        cache: KVCache,
        turns: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, KVCache]:
        """Adds the layer's two branches to the residual stream dtype[N, hidden]."""
        attended, cache = self._attention(index, x, batch, cache, turns)
        x = x + attended
        return x + self._mlp(x), cache

    def _attention(
        self,
        index: jax.Array,
        x: jax.Array,
        batch: TokenBatch,
        cache: KVCache,
        turns: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, KVCache]:
        c = self.config
        y = RMSNorm(c.rms_norm_eps, name="attention_norm")(x)
        qkv = Dense(c.qkv_size, c.qkv_bias, name="qkv")(y)
        heads = qkv.reshape(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        q, k, v = jnp.split(heads, [c.num_heads, c.num_heads + c.num_kv_heads], axis=1)
        if c.qk_norm:
            q = RMSNorm(c.rms_norm_eps, name="q_norm")(q)
            k = RMSNorm(c.rms_norm_eps, name="k_norm")(k)
        q, k = rotate(q, turns), rotate(k, turns)
        cache = write_kv(cache, index, k, v, batch.slots)
        attended = paged_attention(
            q,
            cache.k,
            cache.v,
            index,
            batch.attention,
            scale=c.head_dim**-0.5,
            backend=self.backend,
        )
        attended = attended.reshape(x.shape[0], c.num_heads * c.head_dim)
        return Dense(c.hidden_size, name="out")(attended), cache

    def _mlp(self, x: jax.Array) -> jax.Array:
        c = self.config
        y = RMSNorm(c.rms_norm_eps, name="mlp_norm")(x)
        gate_up = Dense(2 * c.intermediate_size, name="gate_up")(y)
        gate, up = jnp.split(gate_up, 2, axis=-1)
        return Dense(c.hidden_size, name="down")(jax.nn.silu(gate) * up)


class Llama(nn.Module):
    """Llama, Qwen2 and Qwen3 on the tokens of one step.

    The layers are unrolled, each with its own parameter leaves: `lax.scan` over
    stacked weights copies every layer's weights on CPU (docs/design.md).

    Attributes:
        config: the model's shape.
        attention_backend: of `pallas_kernels.api.paged_attention`.
    """

    config: ModelConfig
    attention_backend: str = "xla"

    @nn.compact
    def __call__(self, batch: TokenBatch, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Runs the step's tokens, writing their keys and values into the cache.

        Args:
            batch: the N tokens of the step.
            cache: keys and values of the tokens before; donate it.

        Returns:
            f32[M, V], the logits that follow the tokens `batch.sample_index`, and the
            cache with the slots `batch.slots` written.
        """
        c = self.config
        dtype = jnp.dtype(c.dtype)
        shape = (c.vocab_size, c.hidden_size)
        embedding = self.param("embedding", _embedding_init, shape, dtype)
        frequencies = inverse_frequencies(c.head_dim, c.rope_theta, c.rope_divisors)
        turns = rotation(batch.positions, frequencies)
        x = embedding[batch.tokens]
        # Under jit the layer is traced once, not once per index.
        layer_type = nn.jit(Layer)
        for index in range(c.num_layers):
            layer = layer_type(c, self.attention_backend, name=f"layer_{index}")
            x, cache = layer(jnp.int32(index), x, batch, cache, turns)
        x = x[batch.sample_index]
        x = RMSNorm(c.rms_norm_eps, _LOGIT_SPREAD, name="norm")(x)
        head = embedding
        if not c.tie_embeddings:
            head = self.param("head", _embedding_init, shape, dtype)
        logits = jax.lax.dot_general(
            x, head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        return logits, cache


def forward(
    config: ModelConfig,
    params: Params,
    batch: TokenBatch,
    cache: KVCache,
    backend: str = "xla",
) -> tuple[jax.Array, KVCache]:
    """Runs one step of the model as a pure function; see `Llama`."""
    model: Any = Llama(config, backend)
    return model.apply({"params": params}, batch, cache)


def param_shapes(config: ModelConfig) -> Params:
    """Returns the tree of `jax.ShapeDtypeStruct` of the model's parameters."""
    return jax.eval_shape(functools.partial(_init, config), jax.random.key(0))


def init_params(config: ModelConfig, key: jax.Array) -> Params:
    """Returns random weights whose logits spread like a trained model's.

    Args:
        config: the model's shape.
        key: a jax PRNG key.
    """
    return jax.jit(_init, static_argnums=0)(config, key)


def _init(config: ModelConfig, key: jax.Array) -> Params:
    one = jnp.zeros(1, jnp.int32)
    none = jnp.int32(0)
    attention = AttentionMetadata(one[None], one, one, none, none, one, one, none)
    batch = TokenBatch(one, one, one, attention, one)
    cache = init_kv_cache(
        config.num_layers,
        1,
        1,
        config.num_kv_heads,
        config.head_dim,
        jnp.dtype(config.dtype),
    )
    model: Any = Llama(config, "reference")
    return model.init(key, batch, cache)["params"]
