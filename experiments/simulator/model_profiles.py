"""Models, by their shapes: bytes of weights and of the cache, operations of a token."""

from typing import NamedTuple

import jax.numpy as jnp

from experiments.smollm2_shape import SMOLLM2
from paged_jax.models.config import ModelConfig


class ModelProfile(NamedTuple):
    """What a simulation needs to know of a model.

    Attributes:
      name: of the model.
      hidden_size: width of the residual stream.
      num_layers: L.
      num_heads: H.
      num_kv_heads: K.
      head_dim: D.
      intermediate_size: width of the MLP.
      gated: whether the MLP has a gate, and so three matrices instead of two.
      vocab_size: V.
      tied: whether the head is the embedding.
      positions: rows of a learned table of positions, 0 without one.
      itemsize: bytes of a weight, and of a number in the cache.
    """

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    gated: bool
    vocab_size: int
    tied: bool
    positions: int = 0
    itemsize: int = 2

    @property
    def layer_weights(self) -> int:
        """Weights of one layer's matrices."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        mlp = (3 if self.gated else 2) * self.intermediate_size
        return self.hidden_size * (2 * q + 2 * kv + mlp)

    @property
    def head_weights(self) -> int:
        """Weights of the head."""
        return self.hidden_size * self.vocab_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights; norms and biases, below a thousandth, left out."""
        embeddings = self.head_weights * (1 if self.tied else 2)
        embeddings += self.positions * self.hidden_size
        return (self.layer_weights * self.num_layers + embeddings) * self.itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values, all layers."""
        width = self.num_kv_heads * self.head_dim
        return 2 * self.num_layers * width * self.itemsize

    def activation_bytes_per_token(self, num_devices: int) -> float:
        """Returns the most bytes of activations that a token of a step has at once.

        On each of the devices that share the model: a layer's widest product beside the
        residual stream, or the logits, twice; as the paper's artifact counts, which
        divides neither the residual stream nor the logits.

        Args:
          num_devices: how many.
        """
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        widest = max(q + 2 * kv, self.intermediate_size)
        layer = 2 * (widest / num_devices + self.hidden_size)
        return max(layer, 2 * self.vocab_size) * self.itemsize


def profile_of(name: str, config: ModelConfig) -> ModelProfile:
    """Returns the profile of a model that the engine can run."""
    return ModelProfile(
        name,
        config.hidden_size,
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.intermediate_size,
        gated=True,
        vocab_size=config.vocab_size,
        tied=config.tie_embeddings,
        itemsize=jnp.dtype(config.dtype).itemsize,
    )


def _opt(name: str, hidden_size: int, num_layers: int, num_heads: int) -> ModelProfile:
    return ModelProfile(
        name,
        hidden_size,
        num_layers,
        num_heads,
        num_heads,
        128,
        4 * hidden_size,
        gated=False,
        vocab_size=50272,
        tied=True,
        positions=2050,
    )


# Shapes: the models' published configurations.
MODELS = {
    "opt-13b": _opt("OPT-13B", 5120, 40, 40),
    "opt-66b": _opt("OPT-66B", 9216, 64, 72),
    "opt-175b": _opt("OPT-175B", 12288, 96, 96),
    "llama-13b": ModelProfile(
        "LLaMA-13B", 5120, 40, 40, 40, 128, 13824, True, 32000, False
    ),
    "llama-3-8b": ModelProfile(
        "Llama-3-8B", 4096, 32, 32, 8, 128, 14336, True, 128256, False
    ),
    "llama-3-70b": ModelProfile(
        "Llama-3-70B", 8192, 80, 64, 8, 128, 28672, True, 128256, False
    ),
    "smollm2-135m": profile_of("SmolLM2-135M", SMOLLM2),
}
