"""Admit: waiting requests join the batch, first come first served."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from paged_jax.block_tables import write_needs
from paged_jax.config import StepConfig
from paged_jax.groups import (
    first_tokens,
    goals,
    head_of_line,
    promised,
    waiting_members,
)
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


def pending_tokens(config: StepConfig, state: SchedulerState) -> jax.Array:
    """Returns i32[S]: tokens that each running row has still to compute."""
    running = state.sequences.status == SequenceStatus.RUNNING
    return jnp.where(running, goals(config, state) - state.sequences.length, 0)


def blocks_owed(
    config: StepConfig, state: SchedulerState, pending: jax.Array
) -> jax.Array:
    """Returns the blocks that the batch is about to take, i32[].

    The next growth of rows with pending tokens i32[S], and copies on write; of memory
    that grows.
    """
    growing, copying = write_needs(
        state.pool, state.sequences, pending, config.block_size, config.sharing
    )
    return jnp.sum(growing | copying, dtype=jnp.int32)


def blocks_to_leave(
    config: StepConfig, state: SchedulerState, running: jax.Array
) -> jax.Array:
    """Returns the blocks that are left free beside `running` i32[] sequences, i32[].

    The watermark, and some for each of them, so that one grows on for a while before
    another must go. A static batch needs none: it fits to its end. If nothing runs,
    nothing is left.
    """
    each = jnp.where(state.static_batching, 0, config.spare_blocks)
    return running * each + jnp.where(running > 0, config.watermark_blocks, 0)


def admit(
    config: StepConfig, manager: MemoryManager, state: SchedulerState
) -> tuple[SchedulerState, jax.Array]:
    """Admits requests from the head of the queue while they fit.

    Head of line blocks: nobody overtakes. A request fits if a row is free, if the
    memory manager can grant its blocks beside what the running sequences need in this
    step and leave `blocks_to_leave`, the watermark (paper's artifact: 1% of the blocks)
    among them, and if the step's token budget has room: for one token of it if prompts
    may be chunked, else for all.
    Under static batching a batch is admitted only when the last one is over, all in one
    step, and no larger than what fits at its members' full lengths; the token budget
    then spreads its prompts over steps.

    Nothing is admitted while anything is swapped out.

    A group fits if there are rows for all of its sequences, and blocks for all their
    known tokens. Its carrier is granted those of the prompt; the others get a row.
    Where memory is not shared, each member is granted its own.

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
    pending = pending_tokens(config, state)
    free_at_start = manager.num_free(state.pool)
    may_open = ~static | (active == 0)
    if config.host_blocks:
        may_open &= ~jnp.any(state.sequences.status == SequenceStatus.SWAPPED)

    def look(
        state: SchedulerState, active: jax.Array, tokens_left: jax.Array
    ) -> SharedBlocks:
        slot, rows = head_of_line(config, state)
        asked = (state.queue.count > 0) & may_open & (active + rows <= config.max_seqs)
        asked &= static | (tokens_left > 0)
        # The null request has no tokens to look for.
        slot = jnp.where(asked, slot, state.requests.null)
        return manager.find_shared(
            config, state.pool, state.sequences, state.requests, slot
        )

    def fits(r: _Round, slot: jax.Array, headroom: jax.Array) -> jax.Array:
        s = r.state
        return manager.fits(config, s.pool, s.requests, slot, r.shared, headroom) & (
            ~static
            | (
                r.promised + manager.peak_blocks(config, s.sequences, s.requests, slot)
                <= free_at_start
            )
        )

    def goes_on(r: _Round) -> jax.Array:
        slot, rows = head_of_line(config, r.state)
        wanted = first_tokens(config, r.state.requests, slot)
        # Not chunked, a prompt must fit whole; one that outgrew the budget through
        # recomputation is chunked all the same.
        least = (
            1 if config.chunked_prefill else jnp.minimum(wanted, config.token_budget)
        )
        headroom = r.owed + promised(config, r.state)
        headroom += blocks_to_leave(config, r.state, r.active)
        return (
            (r.state.queue.count > 0)
            & may_open
            & (r.active + rows <= config.max_seqs)
            & (static | ((r.tokens_left >= least) & ~r.shared.in_progress))
            & fits(r, slot, headroom)
        )

    def admit_first(r: _Round) -> _Round:
        state = r.state
        slot, rows = head_of_line(config, state)
        goal = first_tokens(config, state.requests, slot)
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
        state = dataclasses.replace(
            state, pool=pool, sequences=sequences, queue=pop(state.queue)
        )
        if config.forks:
            state = _seat_members(config, state, slot)
        elif config.groups:
            state = _grant_members(config, manager, state, slot, r.shared)
        state = _mark(config, state, slot, True, RequestStatus.RUNNING, event=0)
        sequences = state.sequences
        shared = sequences.length[row]
        active = r.active + rows
        tokens_left = r.tokens_left - (goal - shared)
        if config.groups and not config.forks:
            tokens_left -= (goal - shared) * (rows - 1)
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
        owed = blocks_owed(config, state, pending)
    shared = look(state, active, tokens_left)
    end = jax.lax.while_loop(
        goes_on,
        admit_first,
        _Round(state, active, tokens_left, owed, zero, shared, zero),
    )
    slot, _ = head_of_line(config, end.state)
    hopeless = (end.state.queue.count > 0) & (end.active == 0) & ~fits(end, slot, zero)
    return _reject_first(config, end.state, slot, hopeless), end.admitted


def _seat_members(
    config: StepConfig, state: SchedulerState, carrier: jax.Array
) -> SchedulerState:
    """Gives the other members of a carrier's group the first empty rows, UNFORKED.

    Args:
      config: static settings.
      state: scheduler's state; the carrier has its row, and all members are WAITING.
      carrier: i32[], its request slot.

    Returns:
      The state; there are rows enough, the caller has checked.
    """
    sequences, requests = state.sequences, state.requests
    others = waiting_members(requests, carrier).at[carrier].set(False)
    (slots,) = jnp.nonzero(others, size=config.max_seqs, fill_value=requests.null)
    empty = sequences.status == SequenceStatus.EMPTY
    rank = jnp.cumsum(empty.astype(jnp.int32)) - 1
    takes = empty & (rank < jnp.sum(others))
    taken = slots[jnp.clip(rank, 0, config.max_seqs - 1)].astype(jnp.int32)
    return dataclasses.replace(
        state,
        sequences=dataclasses.replace(
            sequences,
            request=jnp.where(takes, taken, sequences.request),
            status=jnp.where(takes, SequenceStatus.UNFORKED, sequences.status),
        ),
    )


def _grant_members(
    config: StepConfig,
    manager: MemoryManager,
    state: SchedulerState,
    carrier: jax.Array,
    shared: SharedBlocks,
) -> SchedulerState:
    """Gives the other members of a group rows and blocks of their own.

    Args:
      config: static settings; memory is not shared.
      manager: memory manager.
      state: scheduler's state; the carrier has its row, and all members are WAITING.
      carrier: i32[], its request slot.
      shared: nothing.

    Returns:
      The state; all of them fit, the caller has checked.
    """
    requests = state.requests

    def grant_next(carry):
        pool, sequences, left = carry
        slot = jnp.argmax(left).astype(jnp.int32)
        row = jnp.argmax(sequences.status == SequenceStatus.EMPTY).astype(jnp.int32)
        pool, sequences = manager.grant(
            config, pool, sequences, requests, slot, row, shared
        )
        sequences = dataclasses.replace(
            sequences, request=sequences.request.at[row].set(slot)
        )
        return pool, sequences, left.at[slot].set(False)

    others = waiting_members(requests, carrier).at[carrier].set(False)
    pool, sequences, _ = jax.lax.while_loop(
        lambda carry: jnp.any(carry[2]),
        grant_next,
        (state.pool, state.sequences, others),
    )
    return dataclasses.replace(state, pool=pool, sequences=sequences)


def _reject_first(
    config: StepConfig, state: SchedulerState, slot: jax.Array, hopeless: jax.Array
) -> SchedulerState:
    """Takes the first request off the queue as REJECTED if `hopeless`."""
    state = _mark(config, state, slot, hopeless, RequestStatus.REJECTED, event=2)
    queue = pop(state.queue)
    return dataclasses.replace(
        state,
        queue=dataclasses.replace(
            state.queue,
            head=jnp.where(hopeless, queue.head, state.queue.head),
            count=jnp.where(hopeless, queue.count, state.queue.count),
        ),
    )


def _mark(
    config: StepConfig,
    state: SchedulerState,
    slot: jax.Array,
    valid: jax.Array | bool,
    status: RequestStatus,
    event: int,
) -> SchedulerState:
    """Gives a request, or its whole waiting group, a new status.

    Args:
      config: static settings.
      state: scheduler's state.
      slot: i32[], the request's slot, or that of any member.
      valid: bool[]; if false, nothing changes.
      status: the status.
      event: the column of `Requests.timeline` that takes the iteration, if it has none.

    Returns:
      The state.
    """
    requests = state.requests
    if config.groups:
        members = valid & waiting_members(requests, slot)
        time = requests.timeline[:, event]
        time = jnp.where(members & (time < 0), state.iteration, time)
        new_status = jnp.where(members, status, requests.status)
        timeline = requests.timeline.at[:, event].set(time)
    else:
        at = jnp.where(valid, slot, requests.null)
        time = requests.timeline[at, event]
        time = jnp.where(valid & (time < 0), state.iteration, time)
        new_status = requests.status.at[at].set(
            jnp.where(valid, status, requests.status[at])
        )
        timeline = requests.timeline.at[at, event].set(time)
    return dataclasses.replace(
        state,
        requests=dataclasses.replace(requests, status=new_status, timeline=timeline),
    )
