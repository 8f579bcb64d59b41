"""The parameters of a decoder of the Llama family, as a Flax module."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from paged_jax.batch import TokenBatch
from paged_jax.kv_cache import KVCache, init_kv_cache
from paged_jax.models.config import ModelConfig
from paged_jax.models.decoder import Params, decode
from paged_jax.models.packed import PackedWeights, is_packed
from pallas_kernels.metadata import AttentionMetadata

# Dense kernels are [in, out], the embedding [V, hidden]; see docs/design.md for what
# other layouts cost on CPU.
_dense_init = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
_bias_init = nn.initializers.normal(0.1)
# [V, hidden]: rows of length one, small beside what the layers add, so that a random
# model with a tied head does not just repeat its input.
_embedding_init = nn.initializers.variance_scaling(
    1.0, "fan_in", "normal", in_axis=-1, out_axis=-2
)
# Standard deviation of a random model's logits: wide, so that near-ties are rare.
_LOGIT_SPREAD = 4.0


class Norm(nn.Module):
    """Declares the scale of an RMSNorm."""

    size: int
    initial: float = 1.0

    @nn.compact
    def __call__(self, dtype: Any) -> jax.Array:
        """Returns dtype[size]."""
        return self.param(
            "scale", nn.initializers.constant(self.initial), (self.size,), dtype
        )


class Dense(nn.Module):
    """Declares a linear map, its kernel [in, out]."""

    inputs: int
    features: int
    use_bias: bool = False

    @nn.compact
    def __call__(self, dtype: Any) -> dict[str, jax.Array]:
        """Returns `kernel` dtype[inputs, features], and `bias` dtype[features]."""
        shape = (self.inputs, self.features)
        weights = {"kernel": self.param("kernel", _dense_init, shape, dtype)}
        if self.use_bias:
            weights["bias"] = self.param("bias", _bias_init, (self.features,), dtype)
        return weights


class LayerWeights(nn.Module):
    """Declares the weights of one decoder layer."""

    config: ModelConfig

    @nn.compact
    def __call__(self) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Returns the kernels of the dense layers, and the vectors, by name."""
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        vectors = {
            "attention_norm": Norm(c.hidden_size, name="attention_norm")(dtype),
            "mlp_norm": Norm(c.hidden_size, name="mlp_norm")(dtype),
        }
        if c.qk_norm:
            vectors["q_norm"] = Norm(c.head_dim, name="q_norm")(dtype)
            vectors["k_norm"] = Norm(c.head_dim, name="k_norm")(dtype)
        dense = {
            "qkv": Dense(c.hidden_size, c.qkv_size, c.qkv_bias, name="qkv"),
            "out": Dense(c.num_heads * c.head_dim, c.hidden_size, name="out"),
            "gate_up": Dense(c.hidden_size, 2 * c.intermediate_size, name="gate_up"),
            "down": Dense(c.intermediate_size, c.hidden_size, name="down"),
        }
        kernels = {}
        for name, layer in dense.items():
            weights = layer(dtype)
            kernels[name] = weights["kernel"]
            if "bias" in weights:
                vectors[f"{name}_bias"] = weights["bias"]
        return kernels, vectors


class _PlainWeights:
    """The weights as `Llama` declares them, for a layer index that is static or traced.

    A traced index picks a kernel with a `lax.switch` around its product alone: nothing
    is copied, where `lax.scan` over stacked kernels copies all of them on CPU, and the
    rest of a layer is compiled once. The vectors are small, and stacked.
    """

    def __init__(
        self,
        layers: list[tuple[dict, dict]],
        embedding: jax.Array,
        norm: jax.Array,
        head: jax.Array,
    ):
        self._kernels = [kernels for kernels, _ in layers]
        self._vectors = {
            name: jnp.stack([vectors[name] for _, vectors in layers])
            for name in layers[0][1]
        }
        self._embedding, self._norm, self._head = embedding, norm, head

    def embed(self, tokens: jax.Array) -> jax.Array:
        return self._embedding[tokens]

    def product(self, name: str, layer: int | jax.Array, x: jax.Array) -> jax.Array:
        multiply = _multiply_halves if name == "down" else jnp.matmul
        if isinstance(layer, int):
            return multiply(x, self._kernels[layer][name])
        branches = [
            lambda x, w=kernels[name]: multiply(x, w) for kernels in self._kernels
        ]
        return jax.lax.switch(layer, branches, x)

    def vector(self, name: str, layer: int | jax.Array) -> jax.Array:
        return self._vectors[name][layer]

    def final_norm(self) -> jax.Array:
        return self._norm

    def logits(self, x: jax.Array) -> jax.Array:
        return jax.lax.dot_general(
            x, self._head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )


def _multiply_halves(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns `x @ kernel`, the two halves of the sum apart.

    The longest sums of a model, over values that now and then are a thousand times the
    usual: in one go, their rounding is most of the error of float32 logits (SmolLM2's
    first token: 2e-4, against 8e-5 in halves). It costs no time.
    """
    rows, inputs = x.shape
    halves = 1 if inputs % 2 else 2
    parts = jnp.einsum(
        "nhi,hio->hno",
        x.reshape(rows, halves, -1),
        kernel.reshape(halves, -1, kernel.shape[-1]),
        preferred_element_type=jnp.float32,
    )
    return parts.sum(0).astype(x.dtype)


class Llama(nn.Module):
    """Llama, Qwen2 and Qwen3 on the tokens of one step.

    Attributes:
        config: the model's shape.
        attention_backend: of `pallas_kernels.api.paged_attention`.
        unroll: whether the layers are unrolled in the program, or looped over. The loop
            compiles several times faster and runs as fast on CPU; on a GPU each branch
            on the layer would wait for the host.
        cascade: whether decode tokens read shared prefixes together.
    """

    config: ModelConfig
    attention_backend: str = "xla"
    unroll: bool = False
    cascade: bool = False

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
        layers = [LayerWeights(c, name=f"layer_{i}")() for i in range(c.num_layers)]
        norm = Norm(c.hidden_size, _LOGIT_SPREAD, name="norm")(dtype)
        head = embedding
        if not c.tie_embeddings:
            head = self.param("head", _embedding_init, shape, dtype)
        weights = _PlainWeights(layers, embedding, norm, head)
        return decode(
            c,
            weights,
            batch,
            cache,
            backend=self.attention_backend,
            unroll=self.unroll,
            cascade=self.cascade,
        )


def forward(
    config: ModelConfig,
    params: Params,
    batch: TokenBatch,
    cache: KVCache,
    backend: str = "xla",
    unroll: bool = False,
    cascade: bool = False,
) -> tuple[jax.Array, KVCache]:
    """Runs one step of the model as a pure function.

    Args:
        config: the model's shape.
        params: what `Llama` declares, or what `packed.pack_params` made of it.
        batch: the N tokens of the step.
        cache: keys and values of the tokens before; donate it.
        backend: of `pallas_kernels.api.paged_attention`.
        unroll: see `Llama`.
        cascade: see `Llama`.

    Returns:
        As `decoder.decode`.
    """
    if is_packed(params):
        weights = PackedWeights(config, params, batch)
        options: Any = dict(backend=backend, unroll=False, cascade=cascade)
        return decode(config, weights, batch, cache, **options)
    model: Any = Llama(config, backend, unroll, cascade)
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
    # Not jitted: leaves of one shape share a compiled program that way, where one
    # program for all leaves of a large model takes a minute to compile.
    return _init(config, key)


def _init(config: ModelConfig, key: jax.Array) -> Params:
    one = jnp.zeros(1, jnp.int32)
    none = jnp.int32(0)
    attention = AttentionMetadata(one[None], one, one, none, none, one, one, none)
    batch = TokenBatch(one, one, one, attention, one, none)
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
