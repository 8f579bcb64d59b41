"""Chunks: how many tokens of each sequence the next step computes."""

import jax
import jax.numpy as jnp

from paged_jax.config import StepConfig
from paged_jax.groups import goals
from paged_jax.sequences import SequenceStatus
from paged_jax.state import SchedulerState

_LAST = jnp.iinfo(jnp.int32).max


def plan_chunks(config: StepConfig, state: SchedulerState) -> jax.Array:
    """Divides the step's token budget among the running sequences.

    A sequence with one token to compute is decoding and always gets it, so that a long
    prompt never stalls the others. Prompts share what is left in order of arrival: the
    first takes as much as it can. If prompts are not chunked, one that does not fit
    whole waits for the next step.

    Args:
      config: static settings.
      state: scheduler's state.

    Returns:
      i32[S], tokens to compute in each row; their sum is within the budget.
    """
    sequences, requests = state.sequences, state.requests
    running = sequences.status == SequenceStatus.RUNNING
    pending = jnp.where(running, goals(config, state) - sequences.length, 0)
    decoding = pending == 1
    arrival = requests.arrival[sequences.request]

    def take_earliest(carry):
        chunk, waiting, left = carry
        row = jnp.argmin(jnp.where(waiting, arrival, _LAST))
        size = jnp.minimum(pending[row], left)
        if not config.chunked_prefill:
            # Longer than the whole budget: outgrown through recomputation, chunked.
            whole = pending[row] <= left
            outgrown = pending[row] > config.token_budget
            size = jnp.where(whole | outgrown, size, 0)
            left = jnp.where(size > 0, left, 0)  # nobody overtakes
        return chunk.at[row].set(size), waiting.at[row].set(False), left - size

    chunk, _, _ = jax.lax.while_loop(
        lambda carry: jnp.any(carry[1]) & (carry[2] > 0),
        take_earliest,
        (
            decoding.astype(jnp.int32),
            pending > 1,
            config.token_budget - jnp.sum(decoding, dtype=jnp.int32),
        ),
    )
    return chunk
