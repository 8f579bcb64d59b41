"""Weights packed for the CPU's own products, all layers of a kernel in one array.

A kernel [in, out] becomes panels [J, words, w, p] of w outputs each, in words of the p
inputs that the processor multiplies at a time: a panel lies in memory in the order in
which it is used. The embedding is packed as the head's kernel
[hidden, V], and a token's embedding is read from there.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.batch import TokenBatch
from paged_jax.models.checkpoint import LoadedModel
from paged_jax.models.config import ModelConfig
from paged_jax.models.decoder import Params
from pallas_kernels.cpu.product import Int8Weights, product
from pallas_kernels.cpu.target import GROUP, Target, host_target

_KERNELS = ("qkv", "out", "gate_up", "down")


def can_pack() -> bool:
    """Returns whether this machine has products for packed weights."""
    return jax.default_backend() == "cpu" and host_target() is not None


def _target() -> Target:
    target = host_target()
    if target is None:
        raise ValueError("there are no products for packed weights on this machine")
    return target


def pack_model(
    model: LoadedModel, products: str = "auto", weights_dtype: str | None = None
) -> LoadedModel:
    """Returns a model in the form that an engine with such settings runs.

    Args:
        model: the model; packed already, it is returned as it is.
        products: of `EngineConfig`.
        weights_dtype: likewise.
    """
    if products == "xla" or not can_pack():
        return model
    params = pack_params(model.config, model.params, weights_dtype)
    return model._replace(params=params)


def is_packed(params: Params) -> bool:
    """Returns whether parameters are what `pack_params` returns."""
    return "kernels" in params


def packed_dtype(params: Params) -> str:
    """Returns the dtype of the weights of packed parameters."""
    embedding = params["embedding"]
    return "int8" if isinstance(embedding, Int8Weights) else str(embedding.dtype)


def pack_params(
    config: ModelConfig, params: Params, dtype: str | None = None
) -> Params:
    """Packs a model's parameters.

    Args:
        config: the model's shape.
        params: the tree that `llama.param_shapes(config)` describes; packed parameters
            are returned as they are.
        dtype: "int8" to round the weights to that; None: as they are.

    Returns:
        A tree of `kernels` as `pack_kernels` makes them, `vectors` dtype[L, size],
        `embedding` and, unless tied, `head` as kernels of one layer, and `norm`
        dtype[hidden].

    Raises:
        ValueError: this machine has no products for packed weights.
    """
    if is_packed(params):
        return params
    pack = functools.partial(pack_kernels, target=_target(), dtype=dtype)
    layers = [params[f"layer_{i}"] for i in range(config.num_layers)]
    vectors = {}
    for name, leaf in layers[0].items():
        for kind in leaf:
            if kind != "kernel":
                key = f"{name}_bias" if kind == "bias" else name
                vectors[key] = jnp.stack([layer[name][kind] for layer in layers])
    packed = {
        "kernels": {
            name: pack([layer[name]["kernel"] for layer in layers]) for name in _KERNELS
        },
        "vectors": vectors,
        "embedding": pack([np.asarray(params["embedding"]).T]),
        "norm": params["norm"]["scale"],
    }
    if not config.tie_embeddings:
        packed["head"] = pack([np.asarray(params["head"]).T])
    return packed


def pack_kernels(
    kernels: Sequence[jax.Array | np.ndarray], target: Target, dtype: str | None = None
) -> jax.Array | Int8Weights:
    """Packs the kernels of all layers.

    Args:
        kernels: dtype[in, out] each.
        target: the processor whose product they are for.
        dtype: "int8" to round the weights to that; None: as they are.

    Returns:
        dtype[L, J, words, w, p], or weights in int8, for `product`; filled with zeros.
    """
    quantized = dtype == "int8"
    stored = np.dtype(np.uint8) if quantized else np.asarray(kernels[0]).dtype
    width, word = target.panel, target.word(dtype or stored.name)
    inputs, outputs = kernels[0].shape
    step = GROUP if quantized else word
    words, panels = -(-inputs // step) * step // word, -(-outputs // width)
    packed = np.zeros((len(kernels), panels, words, width, word), stored)
    scales = np.zeros((len(kernels), panels, words * word // step, width), np.float32)
    for index, kernel in enumerate(kernels):
        fill = (0, words * word - inputs), (0, panels * width - outputs)
        kernel = np.pad(np.asarray(kernel), fill)
        if quantized:
            kernel, of_groups = quantize(kernel)
            in_panels = of_groups.reshape(-1, panels, width)
            scales[index] = in_panels.transpose(1, 0, 2)
        in_panels = kernel.reshape(words, word, panels, width)
        packed[index] = in_panels.transpose(2, 0, 3, 1)
    if quantized:
        return Int8Weights(jax.device_put(packed), jax.device_put(scales))
    return jax.device_put(packed)


def quantize(kernel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rounds a kernel to int8, with a scale for each group of inputs of an output.

    Args:
        kernel: dtype[in, out], `in` a multiple of `GROUP`.

    Returns:
        u8[in, out], 128 for 0, and scales f32[in / GROUP, out].
    """
    groups = kernel.astype(np.float32).reshape(-1, GROUP, kernel.shape[1])
    scales = np.abs(groups).max(1, keepdims=True) / 127
    scales[scales == 0] = 1
    values = np.rint(groups / scales) + 128
    return values.astype(np.uint8).reshape(kernel.shape), scales[:, 0]


class PackedWeights:
    """Packed parameters as `decoder.Weights`; only a step's real tokens are multiplied.

    The rest of the step's rows are zero after a product. Activations are float32
    whatever the weights are, and rounded only where a product takes nothing else.
    """

    def __init__(self, config: ModelConfig, params: Params, batch: TokenBatch):
        self._target = _target()
        self._config = config
        self._params = params
        self._num_tokens = batch.attention.num_tokens
        self._num_samples = batch.num_samples

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Returns f32[N, hidden]; see `decoder.Weights`."""
        width = self._target.panel
        embedding = self._params["embedding"]
        place = 0, tokens // width, slice(None), tokens % width
        if isinstance(embedding, Int8Weights):
            values = embedding.values[place].reshape(len(tokens), -1, GROUP)
            scales = embedding.scales[place]
            rows = (values.astype(jnp.float32) - 128) * scales[..., None]
        else:
            rows = embedding[place].astype(jnp.float32)
        return rows.reshape(len(tokens), -1)[:, : self._config.hidden_size]

    def product(self, name: str, layer: int | jax.Array, x: jax.Array) -> jax.Array:
        """Returns f32[N, out], zero past the step's tokens."""
        c = self._config
        sizes = {"qkv": c.qkv_size, "gate_up": 2 * c.intermediate_size}
        kernel = self._params["kernels"][name]
        result = product(x, kernel, layer, self._num_tokens, target=self._target)
        return result[:, : sizes.get(name, c.hidden_size)]

    def vector(self, name: str, layer: int | jax.Array) -> jax.Array:
        """Returns a layer's vector of that name."""
        return self._params["vectors"][name][layer]

    def final_norm(self) -> jax.Array:
        """Returns dtype[hidden]."""
        return self._params["norm"]

    def logits(self, x: jax.Array) -> jax.Array:
        """Returns f32[M, V], zero past the sampled tokens."""
        head = self._params.get("head", self._params["embedding"])
        result = product(x, head, 0, self._num_samples, target=self._target)
        return result[:, : self._config.vocab_size]
