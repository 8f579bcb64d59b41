"""The scheduler: what the next step computes, and the blocks it needs for that."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from paged_jax.admit import admit
from paged_jax.block_tables import BlockCopies, grant_writes, no_copies
from paged_jax.bring_back import bring_back
from paged_jax.chunks import plan_chunks
from paged_jax.compat import read_first
from paged_jax.config import StepConfig
from paged_jax.memory_managers import MemoryManager
from paged_jax.preempt import VictimRule, latest_arrival, preempt
from paged_jax.prompt_forks import due
from paged_jax.retire import retire
from paged_jax.state import SchedulerState


class Plan(NamedTuple):
    """One step's work, decided.

    Attributes:
      chunk: i32[S]. Tokens to compute in each row, from its length on; the blocks they
        are written to are granted.
      samples: bool[S]. Rows whose last known token is computed, so that they sample the
        next one.
      forks: bool[S]. Rows that share another row's prompt from the end of this step on.
        They sample too, unless they have generated before.
      source: i32[S]. The row that computes the token whose logits each row samples
        from: the carrier's for rows that are forked, else the row itself.
      copies: blocks to copy before anything is written.
      retired: i32[]. Rows whose blocks were given back before this step.
      admitted: i32[]. Requests that joined.
      preempted: i32[]. Requests that lost their blocks.
      recomputed: i32[]. Tokens that those will compute again.
    """

    chunk: jax.Array
    samples: jax.Array
    forks: jax.Array
    source: jax.Array
    copies: BlockCopies
    retired: jax.Array
    admitted: jax.Array
    preempted: jax.Array
    recomputed: jax.Array


def schedule(
    config: StepConfig,
    manager: MemoryManager,
    state: SchedulerState,
    victim: VictimRule = latest_arrival,
) -> tuple[SchedulerState, Plan]:
    """Plans a step: retire, bring back, admit, divide, preempt if short, grow.

    Sections 4.3 to 4.5 of the PagedAttention paper, at the level of single iterations
    (Orca, Yu et al., OSDI 2022). No keys or values are touched, so the same function
    drives the engine and a simulation of it.

    Args:
      config: static settings.
      manager: memory manager.
      state: scheduler's state.
      victim: which request to preempt when blocks run out.

    Returns:
      The state with all blocks of the step granted, and the plan. The moves between
      the device and the host that are to be made first are in `state.swap`.
    """
    given_up = 0
    state, retired = retire(config, manager, state)
    if config.host_blocks:
        state, given_up = bring_back(config, manager, state)
    # What follows changes the queue and the requests in place: no copies of them.
    state, admitted = read_first(admit(config, manager, state))
    chunk = plan_chunks(config, state)
    state, needs = preempt(config, manager, state, chunk, victim)
    copies = no_copies(config.num_rows)
    if manager.grows:
        pool, sequences, copies = grant_writes(
            state.pool,
            state.sequences,
            needs.growing,
            needs.copying,
            config.block_size,
            config.sharing,
        )
        state = dataclasses.replace(state, pool=pool, sequences=sequences)
    sequences, requests = state.sequences, state.requests
    known = requests.length[sequences.request]
    complete = (needs.chunk > 0) & (sequences.length + needs.chunk == known)
    source = jnp.arange(config.num_rows, dtype=jnp.int32)
    forks = jnp.zeros_like(complete)
    if config.forks:
        forks, source = due(state, needs.chunk)
        complete |= forks & complete[source]
    return state, Plan(
        chunk=needs.chunk,
        samples=complete & (known < requests.max_len[sequences.request]),
        forks=forks,
        source=source,
        copies=copies,
        retired=retired,
        admitted=admitted,
        preempted=needs.count,
        recomputed=needs.recomputed + given_up,
    )
