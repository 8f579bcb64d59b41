"""The forward passes that a step can run: a real model, or none."""

import dataclasses

import jax
import jax.numpy as jnp

from paged_jax.batch import TokenBatch
from paged_jax.config import ConfigError
from paged_jax.kv_cache import KVCache
from paged_jax.models import llama
from paged_jax.models.config import ModelConfig
from pallas_kernels.cpu.attention import obstacle


@dataclasses.dataclass(frozen=True)
class ModelForward:
    """A decoder of the Llama family; equal ones share their compiled programs.

    Attributes:
      config: the model's shape.
      backend: attention backend.
      unroll: whether the layers are unrolled; by default everywhere but on CPU, see
        `llama.Llama`.
    """

    config: ModelConfig
    backend: str
    unroll: bool = dataclasses.field(
        default_factory=lambda: jax.default_backend() != "cpu"
    )

    def __call__(
        self, params: llama.Params, batch: TokenBatch, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        """Returns logits f32[M, V] and the cache; see `llama.Llama`."""
        return llama.forward(
            self.config, params, batch, cache, self.backend, self.unroll
        )


def choose_backend(backend: str, head_dim: int, kv_dtype: str) -> str:
    """Returns the attention backend that `auto` stands for; others as they are.

    Args:
      backend: of `EngineConfig`.
      head_dim: D.
      kv_dtype: dtype of the cache.

    Raises:
      ConfigError: `cpu` is asked for, and does not take such a cache here.
    """
    if backend not in ("auto", "cpu"):
        return backend
    why_not = obstacle(head_dim, kv_dtype)
    if why_not is None:
        return "cpu"
    if backend == "cpu":
        raise ConfigError(f"attention_backend is cpu, which {why_not}; use xla")
    return "xla"


@dataclasses.dataclass(frozen=True)
class NoModel:
    """Computes nothing: what is left of a step is its scheduling."""

    def __call__(
        self, params: None, batch: TokenBatch, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        """Returns logits f32[M, 1] of 0 and the cache as it is."""
        del params
        return jnp.zeros((batch.sample_index.shape[0], 1)), cache
