"""Fork: the sequences of a request get the prompt that one of them has computed."""

import dataclasses

import jax
import jax.numpy as jnp

from paged_jax.block_pool import hold, take
from paged_jax.config import StepConfig
from paged_jax.groups import prompts
from paged_jax.sequences import SequenceStatus, blocks_for
from paged_jax.state import SchedulerState


def due(state: SchedulerState, chunk: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Says which rows are forked at the end of a step.

    Args:
      state: scheduler's state.
      chunk: i32[S], tokens that each row computes in the step.

    Returns:
      bool[S], UNFORKED rows whose carrier has the whole prompt by then; i32[S], see
      `Prompts.source`.
    """
    sequences, requests = state.sequences, state.requests
    source = prompts(state).source
    unforked = sequences.status == SequenceStatus.UNFORKED
    computed = (sequences.length + chunk)[source]
    return unforked & (computed >= requests.prompt_len[sequences.request]), source


def blocks_to_fork(
    config: StepConfig, state: SchedulerState, chunk: jax.Array
) -> jax.Array:
    """Returns the blocks that the forks at the end of a step take, i32[].

    None the first time. After a preemption each sequence, the carrier too, gets blocks
    for what it had generated.
    """
    requests, slot = state.requests, state.sequences.request
    forks, source = due(state, chunk)

    def count() -> jax.Array:
        tail = blocks_for(requests.length[slot], config.block_size)
        tail -= blocks_for(requests.prompt_len[slot], config.block_size)
        carriers = jnp.zeros_like(forks).at[source].max(forks)
        return jnp.sum(jnp.where(forks | carriers, tail, 0), dtype=jnp.int32)

    return jax.lax.cond(jnp.any(forks), count, lambda: jnp.int32(0))


def fork_due(
    config: StepConfig, state: SchedulerState, forks: jax.Array, source: jax.Array
) -> SchedulerState:
    """Shares the blocks of prompts among the sequences that were waiting for them.

    A loop over the forked rows and their carriers, of no turns in most steps. Nothing
    is copied: the partly filled last block is shared too, until it is written (paper,
    section 4.4 and figure 8).

    Args:
      config: static settings.
      state: scheduler's state; the carriers' lengths are counted up.
      forks: bool[S], rows to fork; the pool holds `blocks_to_fork`.
      source: i32[S], their carriers' rows.

    Returns:
      The state; forked rows are RUNNING and hold the prompt's tokens.
    """
    requests, size = state.requests, config.block_size
    column = jnp.arange(state.sequences.table_width, dtype=jnp.int32)

    def fork_first(carry):
        pool, sequences, left = carry
        row = jnp.argmax(left).astype(jnp.int32)
        slot = sequences.request[row]
        prompt_len = requests.prompt_len[slot]
        in_prompt = column < blocks_for(prompt_len, size)
        need = blocks_for(requests.length[slot], size)
        blocks = sequences.block_table[source[row]]
        pool = hold(pool, blocks, in_prompt & (row != source[row]))
        pool, tail = take(pool, ~in_prompt & (column < need))
        sequences = dataclasses.replace(
            sequences,
            block_table=sequences.block_table.at[row].set(
                jnp.where(in_prompt, blocks, tail)
            ),
            num_blocks=sequences.num_blocks.at[row].set(need),
            length=sequences.length.at[row].set(prompt_len),
            status=sequences.status.at[row].set(SequenceStatus.RUNNING),
        )
        return pool, sequences, left.at[row].set(False)

    left = forks | jnp.zeros_like(forks).at[source].max(forks)
    pool, sequences, _ = jax.lax.while_loop(
        lambda carry: jnp.any(carry[2]), fork_first, (state.pool, state.sequences, left)
    )
    return dataclasses.replace(state, pool=pool, sequences=sequences)
