"""The KV cache: physical blocks of keys and values, for all layers."""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of every physical block of every layer.

    A slot is a token's place: `block * block_size + offset`. Block 0 is the null block:
    masked writes land in it, and nothing reads it as data.

    Attributes:
      k: dtype[L, P, B, K, D]. Keys, after the rotary embedding.
      v: dtype[L, P, B, K, D]. Values.
    """

    k: jax.Array
    v: jax.Array

    @property
    def block_size(self) -> int:
        return self.k.shape[2]

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes


def init_kv_cache(
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: jnp.dtype,
) -> KVCache:
    """Returns a cache of `num_blocks` usable blocks and the null block, all zero."""
    shape = (num_layers, num_blocks + 1, block_size, num_kv_heads, head_dim)
    return KVCache(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))


def write_kv(
    cache: KVCache, layer: int, k: jax.Array, v: jax.Array, slots: jax.Array
) -> KVCache:
    """Writes one layer's keys and values of a step's tokens.

    Args:
      cache: the cache; donate it, so that the write happens in place.
      layer: which layer.
      k: dtype[N, K, D], keys.
      v: dtype[N, K, D], values.
      slots: i32[N], where each token goes. Padding names slot 0, in the null block.

    Returns:
      The cache with the slots written. All leading axes are indexed (see
      docs/design.md): XLA then scatters in place and makes no copy of a layer.
    """
    block, offset = slots // cache.block_size, slots % cache.block_size
    return KVCache(
        k=cache.k.at[layer, block, offset].set(k.astype(cache.k.dtype)),
        v=cache.v.at[layer, block, offset].set(v.astype(cache.v.dtype)),
    )


def copy_blocks(cache: KVCache, source: jax.Array, target: jax.Array) -> KVCache:
    """Copies whole blocks in every layer: the copies of a step's copy-on-write.

    Args:
      cache: the cache; donate it.
      source: i32[C], blocks to copy from.
      target: i32[C], blocks to copy to, distinct but for padding: (0, 0), null block to
        null block.

    Returns:
      The cache with `target` blocks equal to `source` blocks.
    """
    return KVCache(
        k=cache.k.at[:, target].set(cache.k[:, source]),
        v=cache.v.at[:, target].set(cache.v[:, source]),
    )
