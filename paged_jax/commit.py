"""Commit: what a step computed becomes part of the sequences."""

import dataclasses

import jax.numpy as jnp

from paged_jax.config import StepConfig
from paged_jax.fork import fork_due
from paged_jax.requests import RequestStatus
from paged_jax.sampling import Samples
from paged_jax.scheduler import Plan
from paged_jax.sequences import SequenceStatus
from paged_jax.state import SchedulerState


def commit(
    config: StepConfig, state: SchedulerState, plan: Plan, samples: Samples
) -> SchedulerState:
    """Counts computed tokens, forks, appends sampled ones, and ends what has ended.

    Args:
      config: static settings.
      state: scheduler's state, with the blocks of the plan granted.
      plan: the step's plan.
      samples: the sampled tokens, arrays of S rows; used where the plan samples.

    Returns:
      The state after the step. Ended sequences are FINISHED and keep their blocks until
      they are retired; a prefix whose last token is computed is HELD.
    """
    sequences, requests = state.sequences, state.requests
    length = sequences.length + plan.chunk
    complete = length == requests.length[sequences.request]
    held = (plan.chunk > 0) & complete & ~plan.samples
    sequences = dataclasses.replace(sequences, length=length)
    state = dataclasses.replace(state, sequences=sequences)
    if config.groups:
        # Only now, so that the step has written to no block that is shared.
        state = fork_due(config, state, plan.forks, plan.source)
        sequences = state.sequences
    slot = jnp.where(plan.samples, sequences.request, requests.null)
    position = requests.length[slot]
    count = plan.samples.astype(jnp.int32)

    stopped = jnp.any(requests.stop_ids[slot] == samples.tokens[:, None], axis=1)
    full = position + 1 >= requests.max_len[slot]
    ended = plan.samples & (stopped | full)
    end_status = jnp.where(
        stopped, RequestStatus.FINISHED_STOP, RequestStatus.FINISHED_LENGTH
    )
    touched = jnp.where(held, sequences.request, slot)
    status = jnp.where(ended, end_status, requests.status[touched])
    status = jnp.where(held, RequestStatus.HELD, status)

    first = plan.samples & (position == requests.prompt_len[slot])
    timeline = requests.timeline[touched]
    timeline = timeline.at[:, 1].set(jnp.where(first, state.iteration, timeline[:, 1]))
    timeline = timeline.at[:, 2].set(
        jnp.where(ended | held, state.iteration, timeline[:, 2])
    )
    requests = dataclasses.replace(
        requests,
        tokens=requests.tokens.at[slot, position].set(samples.tokens),
        length=requests.length.at[slot].add(count),
        status=requests.status.at[touched].set(status),
        timeline=requests.timeline.at[touched].set(timeline),
        logprobs=requests.logprobs.at[slot, position].set(samples.logprobs),
        top_ids=requests.top_ids.at[slot, position].set(samples.top_ids),
        top_logprobs=requests.top_logprobs.at[slot, position].set(samples.top_logprobs),
    )
    row_status = jnp.where(ended, SequenceStatus.FINISHED, sequences.status)
    row_status = jnp.where(held, SequenceStatus.HELD, row_status)
    sequences = dataclasses.replace(sequences, status=row_status)
    return dataclasses.replace(
        state,
        sequences=sequences,
        requests=requests,
        iteration=state.iteration + 1,
    )
