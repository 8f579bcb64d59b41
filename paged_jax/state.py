"""The state of an engine: one pytree that a step maps to the next one."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from paged_jax.kv_cache import KVCache
from paged_jax.requests import Requests, WaitingQueue
from paged_jax.sequences import Sequences, SequenceStatus
from paged_jax.swap import SwapSpace


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SchedulerState:
    """All that scheduling reads and writes: everything but the keys and values.

    Attributes:
      pool: free blocks and reference counts (`BlockPool`), or the chunks of a
        contiguous memory manager (`BuddyPool`).
      sequences: the sequences that have blocks.
      requests: all requests on the device.
      queue: the requests that wait.
      iteration: i32[]. Steps taken so far.
      static_batching: bool[]. Whether a batch runs until its longest member ends.
      log: f32[G, F]. One row of `step_log.Field` for each step since the host looked.
      log_count: i32[]. Rows written.
      swap: blocks of the host, and the moves between it and the device that the step
        is to make; () if nothing is ever swapped.
      beams: the beam searches (`BeamState`); () if there are never any.
    """

    pool: Any
    sequences: Sequences
    requests: Requests
    queue: WaitingQueue
    iteration: jax.Array
    static_batching: jax.Array
    log: jax.Array
    log_count: jax.Array
    swap: SwapSpace | tuple[()] = ()
    beams: Any = ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EngineState:
    """The scheduler's state, and keys and values.

    Attributes:
      scheduler: all else.
      cache: blocks of the device.
      host: blocks of the host, for sequences that are swapped out; () if none ever is.
    """

    scheduler: SchedulerState
    cache: KVCache
    host: KVCache | tuple[()] = ()


def active_rows(sequences: Sequences) -> jax.Array:
    """Returns bool[S]: rows in use, but for held prefixes.

    Ended ones that are not retired are among them, and those that are swapped out.
    """
    status = sequences.status
    return (status != SequenceStatus.EMPTY) & (status != SequenceStatus.HELD)


def has_work(state: SchedulerState) -> jax.Array:
    """Returns whether a step would do anything, bool[]."""
    return (state.queue.count > 0) | jnp.any(active_rows(state.sequences))
