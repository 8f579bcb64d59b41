"""Groups: the sequences of one request, which share the blocks of its prompt.

A group is admitted and preempted as one. One of its sequences, the carrier, computes
the prompt; the rows of the others are UNFORKED until it has, and have no blocks
(`prompt_forks.py`). The request slot of the group's first sequence, the leader, stands
for the group in the queue.

Where memory is not shared each sequence is a request of its own. Only beams are a group
there, too: each computes the prompt for itself.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from paged_jax.beam_step import wait_for_beams
from paged_jax.config import StepConfig
from paged_jax.requests import Requests, RequestStatus
from paged_jax.sequences import SequenceStatus, blocks_for
from paged_jax.state import SchedulerState


def waiting_members(requests: Requests, slot: jax.Array) -> jax.Array:
    """Returns bool[R + 1]: the sequences of a slot's group that wait.

    After a preemption these are the ones that had not ended.
    """
    mine = requests.group == requests.group[slot]
    return mine & (requests.status == RequestStatus.WAITING)


def head_of_line(
    config: StepConfig, state: SchedulerState
) -> tuple[jax.Array, jax.Array]:
    """Returns the request slot that is next to get blocks, and how many rows it needs.

    Args:
      config: static settings.
      state: scheduler's state; its queue may be empty, and then neither means anything.

    Returns:
      i32[], the first waiting member of the group that is next in line: its carrier;
      i32[], its waiting members.
    """
    slot = state.queue.first()
    if not config.groups:
        return slot, jnp.int32(1)
    members = waiting_members(state.requests, slot)
    return jnp.argmax(members).astype(jnp.int32), jnp.sum(members, dtype=jnp.int32)


def first_tokens(config: StepConfig, requests: Requests, slot: jax.Array) -> jax.Array:
    """Returns the tokens whose blocks a carrier is granted at its admission, i32[].

    All known ones; of a group of several, the prompt only.
    """
    known = requests.length[slot]
    if not config.forks:
        return known
    several = jnp.sum(waiting_members(requests, slot)) > 1
    return jnp.where(several, requests.prompt_len[slot], known)


def blocks_to_start(
    config: StepConfig, requests: Requests, slot: jax.Array
) -> jax.Array:
    """Returns the blocks of all tokens that a group knows, i32[]; shared ones once.

    Of several sequences, each counts the block of its next token too, so that a group
    is not preempted as soon as it has computed its prompt.

    Args:
      config: static settings.
      requests: the requests.
      slot: i32[], the carrier of a waiting group.
    """
    size = config.block_size
    if not config.groups:
        return blocks_for(requests.length[slot], size)
    members = waiting_members(requests, slot)
    prompt_len = requests.prompt_len[slot]
    several = jnp.sum(members) > 1
    least = jnp.where(several, prompt_len + 1, 0)
    return _blocks(config, members, jnp.maximum(requests.length, least), prompt_len)


def peak_blocks(config: StepConfig, requests: Requests, slot: jax.Array) -> jax.Array:
    """Returns the blocks of a waiting group at its full length, i32[]."""
    if not config.groups:
        return blocks_for(requests.max_len[slot], config.block_size)
    members = waiting_members(requests, slot)
    return _blocks(config, members, requests.max_len, requests.prompt_len[slot])


def _blocks(
    config: StepConfig, members: jax.Array, tokens: jax.Array, prompt_len: jax.Array
) -> jax.Array:
    """Counts blocks of members bool[R + 1] with tokens i32[R + 1] each.

    Whole blocks of the prompt count once if they are shared, all others for each
    member: whoever writes to the prompt's last, partly filled block has a copy of it.
    """
    size = config.block_size
    whole = prompt_len // size if config.forks else 0
    own = jnp.where(members, blocks_for(tokens, size) - whole, 0)
    return whole + jnp.sum(own, dtype=jnp.int32)


class Prompts(NamedTuple):
    """Who computes a prompt for whom.

    Attributes:
      source: i32[S]. The carrier's row for each UNFORKED row, its own for others.
      carries: bool[S]. Rows that others wait for.
    """

    source: jax.Array
    carries: jax.Array


def prompts(state: SchedulerState) -> Prompts:
    """Finds the carriers; nothing to do in a step in which nobody waits for one."""
    sequences, requests = state.sequences, state.requests
    rows = jnp.arange(sequences.num_rows, dtype=jnp.int32)
    unforked = sequences.status == SequenceStatus.UNFORKED

    def find() -> Prompts:
        group = requests.group[sequences.request]
        running = sequences.status == SequenceStatus.RUNNING
        # A group with an UNFORKED row has one that is RUNNING: its carrier.
        row_of = jnp.zeros(requests.null + 1, jnp.int32)
        row_of = row_of.at[jnp.where(running, group, requests.null)].max(rows)
        source = jnp.where(unforked, row_of[group], rows)
        return Prompts(source, jnp.zeros_like(unforked).at[source].max(unforked))

    return jax.lax.cond(
        jnp.any(unforked), find, lambda: Prompts(rows, jnp.zeros_like(unforked))
    )


def goals(config: StepConfig, state: SchedulerState) -> jax.Array:
    """Returns i32[S]: tokens that each row is to have computed before anything else.

    All that are known; the prompt's for a carrier, since what follows is written to
    blocks that must not yet be shared. If all others of its group have ended before
    they were forked, it has no blocks for what follows, and takes one in a step. Beams
    wait for each other with their last token.
    """
    sequences, requests = state.sequences, state.requests
    slot, size = sequences.request, config.block_size
    goal = requests.length[slot]
    if config.beams:
        goal = wait_for_beams(state, goal)
    if not config.forks:
        return goal
    in_reach = jnp.maximum(sequences.num_blocks, sequences.length // size + 1) * size
    prompt_len = requests.prompt_len[slot]
    goal = jnp.where(prompts(state).carries, prompt_len, goal)
    return jnp.minimum(goal, in_reach)


def promised(config: StepConfig, state: SchedulerState) -> jax.Array:
    """Returns the blocks that groups will take to fork and write a token each, i32[].

    Only of groups whose prompt is being computed. Admission leaves them aside.
    """
    if not config.forks:
        return jnp.int32(0)
    requests, slot = state.requests, state.sequences.request
    size = config.block_size
    unforked = state.sequences.status == SequenceStatus.UNFORKED

    def count() -> jax.Array:
        prompt_len = requests.prompt_len[slot]
        need = blocks_for(jnp.maximum(requests.length[slot], prompt_len + 1), size)
        blocks = jnp.where(unforked, need - prompt_len // size, 0)
        carries = prompts(state).carries
        blocks += jnp.where(carries, need - blocks_for(prompt_len, size), 0)
        return jnp.sum(blocks, dtype=jnp.int32)

    return jax.lax.cond(jnp.any(unforked), count, lambda: jnp.int32(0))


def rows_of_group(state: SchedulerState, row: jax.Array) -> jax.Array:
    """Returns bool[S]: rows of a row's request that compute, or wait for the prompt."""
    sequences = state.sequences
    group = state.requests.leader(sequences.request)
    going = (sequences.status == SequenceStatus.RUNNING) | (
        sequences.status == SequenceStatus.UNFORKED
    )
    return going & (group == group[row])


def distinct_tokens(
    config: StepConfig, state: SchedulerState, rows: jax.Array
) -> jax.Array:
    """Returns the tokens that rows bool[S] of a group have in the cache, i32[].

    The prompt counts once if one of them will compute it for all.
    """
    sequences, requests = state.sequences, state.requests
    length = jnp.where(rows, sequences.length, 0)
    if not config.forks:
        return jnp.sum(length, dtype=jnp.int32)
    in_prompt = jnp.minimum(length, requests.prompt_len[sequences.request])
    return jnp.max(in_prompt) + jnp.sum(length - in_prompt, dtype=jnp.int32)
