"""The one entry to paged attention: checks the arguments, picks the backend."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cascade import Cascade
from pallas_kernels.metadata import AttentionMetadata
from pallas_kernels.quantised_kv import STORED, check_scales
from pallas_kernels.reference import paged_attention_reference
from pallas_kernels.xla import paged_attention_xla

BACKENDS = ("reference", "xla", "cpu", "pallas")
MAX_BLOCK_SIZE = 256


def paged_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    layer: int | jax.Array,
    metadata: AttentionMetadata,
    *,
    scale: float,
    backend: str,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
    cascade: Cascade | None = None,
    interpret: bool | None = None,
) -> jax.Array:
    """Attends from each token of a step to its sequence's tokens in the paged cache.

    The cache comes whole, all layers, so that no backend copies a layer out of it.
    The softmax and the sums are in float32. Nothing past `lengths[i]` has any
    influence on token `i`, whatever the slots hold.

    Args:
        q: dtype[N, H, D], one query per token.
        k_cache: dtype[L, P, B, K, D], keys of all layers. B is a power of two, 1 to
            256, and K divides H: query head `h` reads KV head `h // (H // K)`. Floats,
            or 8 bits with scales: int8, or uint8 that holds the bits of e4m3.
        v_cache: dtype[L, P, B, K, D], values.
        layer: which layer of the cache; an int, or an i32 scalar under a trace.
        metadata: where each token finds its context.
        scale: factor on the scores, before the softmax; often `D ** -0.5`.
        backend: "reference" (plain jnp, the oracle), "xla" (works anywhere), "cpu"
            (x86) or "pallas" (NVIDIA Hopper).
        k_scales: f32[L, P, K, B], of keys in 8 bits (see `quantised_kv`); else None. No
            backend makes a dequantised copy of the cache.
        v_scales: f32[L, P, K, B], of values likewise.
        soft_cap: each score `s` becomes `soft_cap * tanh(s / soft_cap)`, above 0; None
            leaves them as they are.
        window: each token sees the last `window` tokens of its context only, its own
            included, 1 or more; None lets it see all. What lies before may hold
            anything, and is not read but for the rest of a tile.
        cascade: what `find_cascade` found for these tokens: prefixes that "xla" and
            "pallas" read once for all decode tokens that share them. The result is the
            same but for the order of the sums. Not with a window; "cpu" takes none.
        interpret: "pallas" only. Whether to interpret the kernel on the CPU; None
            interprets where jax has no GPU.

    Returns:
        dtype[N, H, D] in the dtype of `q`; zeros for padding (`lengths` 0).

    Raises:
        ValueError: an unknown backend, shapes or dtypes that do not fit together, or
            something that the chosen backend does not handle.
    """
    if backend not in BACKENDS:
        raise ValueError(
            f"Unknown attention backend {backend!r}; use one of {BACKENDS}."
        )
    _check(q, k_cache, v_cache, layer, metadata)
    check_scales(k_cache, k_scales, v_scales)
    _check_scores(soft_cap, window, backend)
    _check_cascade(cascade, metadata, window, backend)
    args = (q, k_cache, v_cache, layer, metadata)
    if backend == "cpu":
        # Imported late: on a machine with a GPU its LLVM need not be installed.
        from pallas_kernels.cpu.attention import paged_attention_cpu

        return paged_attention_cpu(
            *args, scale=scale, k_scales=k_scales, v_scales=v_scales
        )
    options: dict[str, Any] = dict(
        scale=scale,
        k_scales=k_scales,
        v_scales=v_scales,
        soft_cap=soft_cap,
        window=window,
    )
    if backend == "reference":
        return paged_attention_reference(*args, **options)
    options["cascade"] = cascade
    if backend == "xla":
        return paged_attention_xla(*args, **options)
    # Imported late: the module needs a jax whose Pallas has the Mosaic GPU names.
    from pallas_kernels.compat import require_mosaic

    require_mosaic()
    from pallas_kernels.mosaic_step import paged_attention_step

    return paged_attention_step(*args, **options, interpret=interpret)


def _check_scores(soft_cap: float | None, window: int | None, backend: str) -> None:
    if soft_cap is not None and not 0 < soft_cap < float("inf"):
        raise ValueError(f"soft_cap must be above 0 and finite, got {soft_cap}.")
    if window is not None and window < 1:
        raise ValueError(f"window must be 1 or more tokens, got {window}.")
    if backend == "cpu" and (soft_cap, window) != (None, None):
        raise ValueError(
            "The cpu attention backend takes neither soft_cap nor window, got "
            f'{soft_cap} and {window}; use backend="xla".'
        )


def _check_cascade(
    cascade: Cascade | None,
    metadata: AttentionMetadata,
    window: int | None,
    backend: str,
) -> None:
    if cascade is None:
        return
    if backend == "cpu":
        raise ValueError(
            'The cpu attention backend takes no cascade; use backend="xla", or None.'
        )
    if window is not None:
        raise ValueError(
            f"cascade takes no window, got {window}: what a token sees of a prefix "
            "would be its own; use cascade=None."
        )
    places = min(metadata.rows.shape[0], metadata.block_tables.shape[0])
    if cascade.starts.shape != (places,):
        raise ValueError(
            f"cascade must be of these tokens, with {places} places, got "
            f"{cascade.starts.shape[0]}; find it from the same metadata."
        )


def _check(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    layer: int | jax.Array,
    metadata: AttentionMetadata,
) -> None:
    if q.ndim != 3:
        raise ValueError(f"q must be [N, H, D], got the shape {q.shape}.")
    if k_cache.ndim != 5:
        raise ValueError(
            "k_cache must be [L, P, B, K, D], all layers, got the shape "
            f"{k_cache.shape}."
        )
    if v_cache.shape != k_cache.shape or v_cache.dtype != k_cache.dtype:
        raise ValueError(
            f"k_cache and v_cache must agree, got {k_cache.dtype}{k_cache.shape} and "
            f"{v_cache.dtype}{v_cache.shape}."
        )
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q must hold floats, got {q.dtype}.")
    # A float of 8 bits would come as its bits.
    floats = jnp.issubdtype(k_cache.dtype, jnp.floating) and k_cache.dtype.itemsize > 1
    if not floats and k_cache.dtype not in STORED.values():
        raise ValueError(
            "k_cache must hold floats of 16 bits or more, int8, or the bits of e4m3 as "
            f"uint8, got {k_cache.dtype}."
        )
    num_tokens, num_heads, head_dim = q.shape
    num_layers, _, block_size, kv_heads, cache_dim = k_cache.shape
    if cache_dim != head_dim:
        raise ValueError(
            f"q has head dim {head_dim} but the cache has {cache_dim}; they must agree."
        )
    if num_heads % kv_heads:
        raise ValueError(
            f"{num_heads} query heads cannot share {kv_heads} KV heads evenly; the "
            "number of query heads must be a multiple of the number of KV heads."
        )
    if block_size & (block_size - 1) or not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise ValueError(
            f"Block size {block_size} is not allowed; use a power of two from 1 to "
            f"{MAX_BLOCK_SIZE}."
        )
    if isinstance(layer, int) and not 0 <= layer < num_layers:
        raise ValueError(
            f"Layer {layer} is not in the cache; it has layers 0 to {num_layers - 1}."
        )
    _check_metadata(metadata, num_tokens)


def _check_metadata(metadata: AttentionMetadata, num_tokens: int) -> None:
    tiles = metadata.tile_start.shape
    expected = {
        "rows": (num_tokens,),
        "lengths": (num_tokens,),
        "num_decode": (),
        "num_tokens": (),
        "tile_len": tiles,
        "num_tiles": (),
    }
    for name, shape in expected.items():
        array = getattr(metadata, name)
        if array.shape != shape:
            raise ValueError(
                f"metadata.{name} must have the shape {shape} for {num_tokens} tokens "
                f"and tile_start {tiles}, got {array.shape}."
            )
    if metadata.block_tables.ndim != 2 or len(tiles) != 1:
        raise ValueError(
            "metadata.block_tables must be [S, T] and metadata.tile_start [C], got "
            f"{metadata.block_tables.shape} and {tiles}."
        )
    for name, array in metadata._asdict().items():
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"metadata.{name} must hold integers, got {array.dtype}.")
