"""Commit: what a step computed becomes part of the sequences."""

import dataclasses

import jax.numpy as jnp

from paged_jax.beam_step import advance_beams, beam_rows
from paged_jax.cached_blocks import cache_full_blocks
from paged_jax.config import StepConfig
from paged_jax.prompt_forks import fork_due
from paged_jax.requests import RequestStatus
from paged_jax.sampling import Candidates, Samples
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
      they are retired; a prefix whose last token is computed is HELD. Blocks that were
      filled are in the prefix cache, if there is one.
    """
    sequences, requests = state.sequences, state.requests
    length = sequences.length + plan.chunk
    complete = length == requests.length[sequences.request]
    held = (plan.chunk > 0) & complete & ~plan.samples
    sequences = dataclasses.replace(sequences, length=length)
    state = dataclasses.replace(state, sequences=sequences)
    state = cache_full_blocks(state, length - plan.chunk)
    if config.forks:
        # Only now, so that the step has written to no block that is shared, and that
        # all members name the blocks that are cached.
        state = fork_due(config, state, plan.forks, plan.source)
    sequences = state.sequences
    draws = plan.samples & ~beam_rows(state) if config.beams else plan.samples
    slot = jnp.where(draws, sequences.request, requests.null)
    position = requests.length[slot]
    count = draws.astype(jnp.int32)

    stopped = jnp.any(requests.stop_ids[slot] == samples.tokens[:, None], axis=1)
    full = position + 1 >= requests.max_len[slot]
    ended = draws & (stopped | full)
    end_status = jnp.where(
        stopped, RequestStatus.FINISHED_STOP, RequestStatus.FINISHED_LENGTH
    )
    touched = jnp.where(held, sequences.request, slot)
    status = jnp.where(ended, end_status, requests.status[touched])
    status = jnp.where(held, RequestStatus.HELD, status)

    first = draws & (position == requests.prompt_len[slot])
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
    state = dataclasses.replace(state, sequences=sequences, requests=requests)
    if config.beams:
        assert isinstance(samples.candidates, Candidates)
        beams = plan.samples & ~draws
        state = advance_beams(config, state, beams, samples.candidates)
    return dataclasses.replace(state, iteration=state.iteration + 1)
