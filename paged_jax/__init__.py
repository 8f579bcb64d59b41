"""LLM serving in JAX: paged attention, copy-on-write sharing, continuous batching."""

from paged_jax.block_pool import BlockPool, init_block_pool
from paged_jax.block_tables import (
    BlockCopies,
    Status,
    allocate,
    append,
    copy_on_write,
    fork,
    release,
    share_prefix,
)
from paged_jax.budget import fit_memory
from paged_jax.config import ConfigError, EngineConfig
from paged_jax.engine import Engine
from paged_jax.kv_cache import KVCache, copy_blocks, init_kv_cache
from paged_jax.memory_managers import MANAGERS, MemoryManager
from paged_jax.memory_plan import MemoryPlan, blocks_that_fit
from paged_jax.models.checkpoint import CheckpointError, LoadedModel
from paged_jax.models.load import load_model
from paged_jax.outputs import CompletionOutput, RequestMetrics, RequestOutput
from paged_jax.sampling_params import RequestError, SamplingParams
from paged_jax.sequences import Sequences, SequenceStatus, init_sequences
from paged_jax.step_log import Field

__all__ = [
    "MANAGERS",
    "BlockCopies",
    "BlockPool",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "Field",
    "KVCache",
    "LoadedModel",
    "MemoryManager",
    "MemoryPlan",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SequenceStatus",
    "Sequences",
    "Status",
    "allocate",
    "append",
    "blocks_that_fit",
    "copy_blocks",
    "copy_on_write",
    "fit_memory",
    "fork",
    "init_block_pool",
    "init_kv_cache",
    "init_sequences",
    "load_model",
    "release",
    "share_prefix",
]
