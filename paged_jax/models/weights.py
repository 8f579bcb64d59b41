"""From a checkpoint's tensors to the model's parameters."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.models.config import ModelConfig
from paged_jax.models.decoder import Params

# read(name, shape) -> the tensor of that Hugging Face name, checked to have that shape.
ReadTensor = Callable[[str, tuple[int, ...]], np.ndarray]


def assemble_params(config: ModelConfig, read: ReadTensor) -> Params:
    """Builds the parameters of `Llama`, fusing and transposing as it expects.

    A few tensors at a time are read and converted, so that little more than the result
    is ever in memory.

    Args:
        config: the model's shape and dtype.
        read: returns a tensor by its Hugging Face name, in any float dtype. Linear
            weights are [out, in].

    Returns:
        The tree that `param_shapes(config)` describes.

    Raises:
        CheckpointError: from `read`.
    """
    dtype = jnp.dtype(config.dtype)
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim

    def vector(name: str, size: int) -> jax.Array:
        return jnp.asarray(read(name, (size,)), dtype)

    def matrix(name: str, rows: int, columns: int) -> jax.Array:
        return jnp.asarray(read(name, (rows, columns)), dtype)

    def kernel(columns: int, *parts: tuple[str, int]) -> jax.Array:
        # All parts are read before the result is made: sizes that come from a damaged
        # file are checked against real tensors, not allocated.
        arrays = [read(name, (rows, columns)) for name, rows in parts]
        fused = np.empty((columns, sum(rows for _, rows in parts)), dtype)
        start = 0
        for array in arrays:
            fused[:, start : start + len(array)] = array.T
            start += len(array)
        # Not jnp.asarray, which copies once more.
        return jax.device_put(fused)

    def layer(index: int) -> Params:
        prefix = f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        projections = (("q", q_size), ("k", kv_size), ("v", kv_size))
        qkv = {
            "kernel": kernel(
                hidden, *((f"{attention}{n}_proj.weight", s) for n, s in projections)
            )
        }
        if config.qkv_bias:
            qkv["bias"] = jnp.concatenate(
                [vector(f"{attention}{n}_proj.bias", size) for n, size in projections]
            )
        result = {
            "attention_norm": {
                "scale": vector(prefix + "input_layernorm.weight", hidden)
            },
            "qkv": qkv,
            "out": {"kernel": kernel(q_size, (attention + "o_proj.weight", hidden))},
            "mlp_norm": {
                "scale": vector(prefix + "post_attention_layernorm.weight", hidden)
            },
            "gate_up": {
                "kernel": kernel(
                    hidden,
                    (mlp + "gate_proj.weight", inner),
                    (mlp + "up_proj.weight", inner),
                )
            },
            "down": {"kernel": kernel(inner, (mlp + "down_proj.weight", hidden))},
        }
        if config.qk_norm:
            for name in ("q_norm", "k_norm"):
                scale = vector(f"{attention}{name}.weight", config.head_dim)
                result[name] = {"scale": scale}
        return result

    params: Params = {
        "embedding": matrix("model.embed_tokens.weight", config.vocab_size, hidden),
        "norm": {"scale": vector("model.norm.weight", hidden)},
    }
    for index in range(config.num_layers):
        params[f"layer_{index}"] = layer(index)
    if not config.tie_embeddings:
        params["head"] = matrix("lm_head.weight", config.vocab_size, hidden)
    return params
