"""Attention kernels over a paged KV cache, behind one API."""

from pallas_kernels.api import BACKENDS, paged_attention
from pallas_kernels.cascade import Cascade, find_cascade
from pallas_kernels.metadata import QUERY_TILE, AttentionMetadata

__all__ = [
    "BACKENDS",
    "QUERY_TILE",
    "AttentionMetadata",
    "Cascade",
    "find_cascade",
    "paged_attention",
]
