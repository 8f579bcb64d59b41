"""Which of the Hopper kernels run a step."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cascade import Cascade
from pallas_kernels.metadata import AttentionMetadata
from pallas_kernels.mosaic_decode import paged_attention_mosaic
from pallas_kernels.mosaic_mixed import paged_attention_mixed


def paged_attention_step(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    layer: int | jax.Array,
    metadata: AttentionMetadata,
    *,
    cascade: Cascade | None = None,
    **options: Any,
) -> jax.Array:
    """Runs a step: where it has room for prefill, with the mixed kernel.

    With a cascade the decode tokens run with the decode kernel, and the mixed one has
    the prefill tokens only.

    Args:
        q: dtype[N, H, D]; see `api.paged_attention` for this and the rest.
        k_cache: [L, P, B, K, D].
        v_cache: like `k_cache`.
        layer: which layer of the cache.
        metadata: where each token finds its context.
        cascade: of these tokens, or None.
        **options: what both kernels take.

    Returns:
        dtype[N, H, D], in the dtype of `q`; zeros where `lengths` is 0.
    """
    caches = k_cache, v_cache, layer
    if not metadata.tile_start.shape[0]:
        return paged_attention_mosaic(q, *caches, metadata, cascade=cascade, **options)
    if cascade is None:
        return paged_attention_mixed(q, *caches, metadata, **options)
    places = cascade.starts.shape[0]
    decodes = jnp.arange(q.shape[0]) < metadata.num_decode
    some = metadata._replace(
        rows=metadata.rows[:places],
        lengths=jnp.where(decodes, metadata.lengths, 0)[:places],
    )
    decoded = paged_attention_mosaic(
        q[:places], *caches, some, cascade=cascade, **options
    )
    rest = metadata._replace(lengths=jnp.where(decodes, 0, metadata.lengths))
    out = paged_attention_mixed(q, *caches, rest, **options)
    decoded = jnp.pad(decoded, ((0, q.shape[0] - places), (0, 0), (0, 0)))
    return jnp.where(decodes[:, None, None], decoded, out)
