"""The forward passes that a step can run: a real model, or none."""

import dataclasses

import jax
import jax.numpy as jnp

from paged_jax.batch import TokenBatch
from paged_jax.kv_cache import KVCache
from paged_jax.models import llama
from paged_jax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class ModelForward:
    """A decoder of the Llama family; equal ones share their compiled programs.

    Attributes:
      config: the model's shape.
      backend: attention backend.
      cascade: whether decode tokens read shared prefixes together.
      unroll: whether the layers are unrolled; by default everywhere but on CPU, see
        `llama.Llama`.
    """

    config: ModelConfig
    backend: str
    cascade: bool = False
    unroll: bool = dataclasses.field(
        default_factory=lambda: jax.default_backend() != "cpu"
    )

    def __call__(
        self, params: llama.Params, batch: TokenBatch, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        """Returns logits f32[M, V] and the cache; see `llama.Llama`."""
        options = self.backend, self.unroll, self.cascade
        return llama.forward(self.config, params, batch, cache, *options)


@dataclasses.dataclass(frozen=True)
class NoModel:
    """Computes nothing: what is left of a step is its scheduling."""

    def __call__(
        self, params: None, batch: TokenBatch, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        """Returns logits f32[M, 1] of 0 and the cache as it is."""
        del params
        return jnp.zeros((batch.sample_index.shape[0], 1)), cache
