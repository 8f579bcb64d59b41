"""The KV cache: physical blocks of keys and values, for all layers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.compat import to_memory_of
from pallas_kernels.compat import makes_for_gpu, require_mosaic
from pallas_kernels.quantised_kv import (
    is_quantised,
    quantise,
    scale_shape,
    stored_dtype,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of every physical block of every layer.

    A slot is a token's place: `block * block_size + offset`. Block 0 is the null block:
    masked writes land in it, and nothing reads it as data.

    Attributes:
      k: dtype[L, P, B, K, D]. Keys, after the rotary embedding.
      v: dtype[L, P, B, K, D]. Values.
      k_scales: f32[L, P, K, B]. Scales of keys in 8 bits (see
        `pallas_kernels.quantised_kv`); None of others.
      v_scales: f32[L, P, K, B]. Scales of values likewise.
    """

    k: jax.Array
    v: jax.Array
    k_scales: jax.Array | None = None
    v_scales: jax.Array | None = None

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.k.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and their scales, the null block included."""
        return sum(x.nbytes for x in jax.tree.leaves(self))

    @property
    def block_nbytes(self) -> int:
        """Bytes of keys, values and scales of one block, in all layers."""
        return self.nbytes // self.k.shape[1]


def init_kv_cache(
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: jnp.dtype,
    *,
    sharding: jax.sharding.Sharding | None = None,
) -> KVCache:
    """Returns a cache of `num_blocks` usable blocks and the null block, all zero.

    With a sharding, the cache is where that says (see `compat.host_memory`). Numbers of
    8 bits, int8 or float8_e4m3fn, come with scales.
    """
    shape = (num_layers, num_blocks + 1, block_size, num_kv_heads, head_dim)

    def zeros(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        if sharding is None:
            return jnp.zeros(shape, dtype)
        return jax.device_put(np.zeros(shape, dtype), sharding)

    arrays = [zeros(shape, stored_dtype(dtype)) for _ in "kv"]
    if is_quantised(dtype):
        arrays += [zeros(scale_shape(shape), jnp.dtype("float32")) for _ in "kv"]
    return KVCache(*arrays)


def write_kv(
    cache: KVCache,
    layer: int | jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    *,
    backend: str = "xla",
) -> KVCache:
    """Writes one layer's keys and values of a step's tokens; rounds them if need be.

    Args:
      cache: the cache; donate it, so that the write happens in place.
      layer: which layer.
      k: dtype[N, K, D], keys.
      v: dtype[N, K, D], values.
      slots: i32[N], where each token goes. Padding names slot 0, in the null block.
      backend: "pallas" (NVIDIA Hopper, jax >= 0.11) or "xla".

    Returns:
      The cache with the slots written. All leading axes are indexed (see
      docs/design.md): XLA then scatters in place and makes no copy of a layer.
    """
    k_scales = v_scales = None
    if cache.k_scales is not None:
        k, k_scales = quantise(k, cache.k.dtype)
        v, v_scales = quantise(v, cache.v.dtype)
    new = KVCache(k, v, k_scales, v_scales)
    if _on_pallas(backend):
        from pallas_kernels import write_kv_mosaic

        arrays = jax.tree.leaves(cache), jax.tree.leaves(new)
        return KVCache(*write_kv_mosaic(*arrays, layer, slots))
    block, offset = slots // cache.block_size, slots % cache.block_size

    def write(old: jax.Array, value: jax.Array) -> jax.Array:
        if old.ndim == 4:  # scales
            return old.at[layer, block, :, offset].set(value)
        return old.at[layer, block, offset].set(value.astype(old.dtype))

    return jax.tree.map(write, cache, new)


def write_backend(attention_backend: str) -> str:
    """Returns the backend of the writes to the cache beside an attention backend.

    "pallas" beside that, where there is a GPU or a program is made for one.
    Interpreted, each token would be a thread block of its own, and XLA writes the same.
    """
    if attention_backend == "pallas" and makes_for_gpu():
        return "pallas"
    return "xla"


def _on_pallas(backend: str) -> bool:
    """Checks a backend; its module needs a jax that has the names it uses."""
    if backend not in ("xla", "pallas"):
        raise ValueError(f"Unknown cache backend {backend!r}; use 'xla' or 'pallas'.")
    if backend == "pallas":
        require_mosaic()
    return backend == "pallas"


def copy_blocks(
    cache: KVCache,
    source: jax.Array,
    target: jax.Array,
    count: jax.Array,
    *,
    backend: str = "xla",
) -> KVCache:
    """Copies whole blocks in every layer: the copies of a step's copy-on-write.

    Args:
      cache: the cache; donate it, so that the copies happen in place.
      source: i32[C], blocks to copy from.
      target: i32[C], blocks to copy to: distinct, and none of them a source.
      count: i32[], how many of the pairs are copied: the first ones. The work follows
        it, and is none when it is 0.
      backend: "pallas" (NVIDIA Hopper, jax >= 0.11; one launch for all layers) or
        "xla".

    Returns:
      The cache with the first `count` target blocks equal to their source blocks.
    """
    if _on_pallas(backend):
        from pallas_kernels import copy_blocks_mosaic

        arrays = jax.tree.leaves(cache)
        return KVCache(*copy_blocks_mosaic(arrays, source, target, count))

    def copy(i: jax.Array, values: jax.Array) -> jax.Array:
        block = jax.lax.dynamic_index_in_dim(values, source[i], axis=1)
        return jax.lax.dynamic_update_index_in_dim(values, block, target[i], axis=1)

    def body(i: jax.Array, cache: KVCache) -> KVCache:
        return jax.tree.map(functools.partial(copy, i), cache)

    return jax.lax.fori_loop(0, count, body, cache)


def move_blocks(
    origin: KVCache,
    goal: KVCache,
    source: jax.Array,
    target: jax.Array,
    count: jax.Array,
) -> tuple[KVCache, jax.Array]:
    """Copies whole blocks of one cache to another, in every layer: a swap.

    Args:
      origin: the cache to copy from; it may be in another kind of memory.
      goal: the cache to copy to, with blocks of the same shape; donate it.
      source: i32[C], blocks of `origin`.
      target: i32[C], blocks of `goal` to copy them to.
      count: i32[], how many of the pairs are copied, in order: the first ones. The work
        follows it, and is none when it is 0.

    Returns:
      `goal` with the first `count` target blocks equal to their source blocks, and
      i32[], how many moves are left to make. That is 0, known when all are made: what
      depends on it may change `origin` in place. Else XLA cannot tell that all has been
      read by then, and keeps a copy of it.
    """

    def move(i: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
        block = jax.lax.dynamic_index_in_dim(old, source[i], axis=1)
        block = to_memory_of(new, block)
        return jax.lax.dynamic_update_index_in_dim(new, block, target[i], axis=1)

    def body(carry: tuple[jax.Array, KVCache]) -> tuple[jax.Array, KVCache]:
        i, goal = carry
        return i + 1, jax.tree.map(functools.partial(move, i), origin, goal)

    made, goal = jax.lax.while_loop(
        lambda carry: carry[0] < count, body, (jnp.int32(0), goal)
    )
    return goal, count - made
