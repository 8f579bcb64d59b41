"""Attention kernels over a paged KV cache, and writes to it, behind one API."""

from typing import TYPE_CHECKING, Any

from pallas_kernels.api import BACKENDS, paged_attention
from pallas_kernels.cascade import Cascade, find_cascade
from pallas_kernels.metadata import QUERY_TILE, AttentionMetadata

if TYPE_CHECKING:
    from pallas_kernels.mosaic_blocks import (
        copy_blocks_mosaic,
        gather_blocks_mosaic,
        scatter_blocks_mosaic,
        write_kv_mosaic,
    )

__all__ = [
    "BACKENDS",
    "QUERY_TILE",
    "AttentionMetadata",
    "Cascade",
    "copy_blocks_mosaic",
    "find_cascade",
    "gather_blocks_mosaic",
    "paged_attention",
    "scatter_blocks_mosaic",
    "write_kv_mosaic",
]


def __getattr__(name: str) -> Any:
    """Imports what writes to the cache when it is first asked for.

    Its module needs a jax whose Pallas has the Mosaic GPU names.
    """
    if name.endswith("_mosaic") and name in __all__:
        from pallas_kernels import mosaic_blocks

        return getattr(mosaic_blocks, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
