"""Admit: waiting requests join the batch, first come first served."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from paged_jax.block_tables import write_needs
from paged_jax.config import StepConfig
from paged_jax.memory_managers import MemoryManager
from paged_jax.requests import RequestStatus, pop
from paged_jax.sequences import SequenceStatus
from paged_jax.shared_blocks import SharedBlocks
from paged_jax.state import SchedulerState, active_rows


class _Round(NamedTuple):
    """What a round of admission keeps count of.

    Attributes:
      state: scheduler's state.
      active: i32[], rows in the batch.
      tokens_left: i32[], tokens of the step's budget that nobody has asked for.
      owed: i32[], blocks that the batch is about to take: the next growth of running
        sequences, and copies on write.
      promised: i32[], blocks that a static batch may come to hold.
      shared: what the first request of the queue can share.
      admitted: i32[], requests admitted in this round.
    """

    state: SchedulerState
    active: jax.Array
    tokens_left: jax.Array
    owed: jax.Array
    promised: jax.Array
    shared: SharedBlocks
    admitted: jax.Array


def admit(
    config: StepConfig, manager: MemoryManager, state: SchedulerState
) -> tuple[SchedulerState, jax.Array]:
    """Admits requests from the head of the queue while they fit.

    Head of line blocks: nobody overtakes. A request fits if a row is free, if the
    memory manager can grant its blocks and leave the watermark (paper's artifact: 1% of
    the blocks) beside what the running sequences need in this step, and if the step's
    token budget has room: for one token of it if prompts may be chunked, else for all.
    Under static batching a batch is admitted only when the last one is over, all in one
    step, and no larger than what fits at its members' full lengths; the token budget
    then spreads its prompts over steps.

    With a prefix cache, a request waits while the block that it would compute first is
    one that a running sequence in prefill is about to compute: it shares it a few steps
    later. (Not under static batching: it would miss the batch.) Prefills go on, or are
    preempted and no longer waited for, so that nobody waits for ever.

    A request that does not fit with nothing else in the batch never will, and is
    rejected.

    Args:
      config: static settings.
      manager: memory manager.
      state: scheduler's state.

    Returns:
      The state, and i32[], the number of requests admitted.
    """
    static = state.static_batching
    active = jnp.sum(active_rows(state.sequences), dtype=jnp.int32)
    known = state.requests.length[state.sequences.request]
    running = state.sequences.status == SequenceStatus.RUNNING
    pending = jnp.where(running, known - state.sequences.length, 0)
    free_at_start = manager.num_free(state.pool)
    may_open = ~static | (active == 0)

    def look(
        state: SchedulerState, active: jax.Array, tokens_left: jax.Array
    ) -> SharedBlocks:
        # The null request has no tokens to look for.
        asked = (state.queue.count > 0) & may_open & (active < config.max_seqs)
        asked &= static | (tokens_left > 0)
        slot = jnp.where(asked, state.queue.first(), state.requests.null)
        return manager.find_shared(
            config, state.pool, state.sequences, state.requests, slot
        )

    def fits(r: _Round, headroom: jax.Array) -> jax.Array:
        slot = r.state.queue.first()
        s = r.state
        return manager.fits(config, s.pool, s.requests, slot, r.shared, headroom) & (
            ~static
            | (
                r.promised + manager.peak_blocks(config, s.sequences, s.requests, slot)
                <= free_at_start
            )
        )

    def goes_on(r: _Round) -> jax.Array:
        wanted = r.state.requests.length[r.state.queue.first()]
        # Not chunked, a prompt must fit whole; one that outgrew the budget through
        # recomputation is chunked all the same.
        least = (
            1 if config.chunked_prefill else jnp.minimum(wanted, config.token_budget)
        )
        headroom = r.owed + jnp.where(r.active > 0, config.watermark_blocks, 0)
        return (
            (r.state.queue.count > 0)
            & may_open
            & (r.active < config.max_seqs)
            & (static | ((r.tokens_left >= least) & ~r.shared.in_progress))
            & fits(r, headroom)
        )

    def admit_first(r: _Round) -> _Round:
        state = r.state
        slot = state.queue.first()
        row = jnp.argmax(state.sequences.status == SequenceStatus.EMPTY)
        row = row.astype(jnp.int32)
        promised = r.promised + manager.peak_blocks(
            config, state.sequences, state.requests, slot
        )
        pool, sequences = manager.grant(
            config, state.pool, state.sequences, state.requests, slot, row, r.shared
        )
        sequences = dataclasses.replace(
            sequences, request=sequences.request.at[row].set(slot)
        )
        first_time = state.requests.timeline[slot, 0]
        requests = dataclasses.replace(
            state.requests,
            status=state.requests.status.at[slot].set(RequestStatus.RUNNING),
            timeline=state.requests.timeline.at[slot, 0].set(
                jnp.where(first_time < 0, state.iteration, first_time)
            ),
        )
        state = dataclasses.replace(
            state,
            pool=pool,
            sequences=sequences,
            requests=requests,
            queue=pop(state.queue),
        )
        shared = sequences.length[row]
        active = r.active + 1
        tokens_left = r.tokens_left - (requests.length[slot] - shared)
        return _Round(
            state=state,
            active=active,
            tokens_left=tokens_left,
            owed=r.owed + (shared % config.block_size != 0),
            promised=promised,
            shared=look(state, active, tokens_left),
            admitted=r.admitted + 1,
        )

    tokens_left = config.token_budget - jnp.sum(pending)
    zero = owed = jnp.int32(0)
    if manager.grows:
        growing, copying = write_needs(
            state.pool, state.sequences, pending, config.block_size, config.sharing
        )
        owed = jnp.sum(growing | copying, dtype=jnp.int32)
    shared = look(state, active, tokens_left)
    end = jax.lax.while_loop(
        goes_on,
        admit_first,
        _Round(state, active, tokens_left, owed, zero, shared, zero),
    )
    hopeless = (end.state.queue.count > 0) & (end.active == 0) & ~fits(end, zero)
    return _reject_first(end.state, hopeless), end.admitted


def _reject_first(state: SchedulerState, hopeless: jax.Array) -> SchedulerState:
    """Takes the first request off the queue as REJECTED if `hopeless`."""
    requests = state.requests
    slot = jnp.where(hopeless, state.queue.first(), requests.null)
    end = jnp.where(hopeless, state.iteration, requests.timeline[slot, 2])
    queue = pop(state.queue)
    return dataclasses.replace(
        state,
        requests=dataclasses.replace(
            requests,
            status=requests.status.at[slot].set(
                jnp.where(hopeless, RequestStatus.REJECTED, requests.status[slot])
            ),
            timeline=requests.timeline.at[slot, 2].set(end),
        ),
        queue=dataclasses.replace(
            state.queue,
            head=jnp.where(hopeless, queue.head, state.queue.head),
            count=jnp.where(hopeless, queue.count, state.queue.count),
        ),
    )
