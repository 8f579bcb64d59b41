"""The end of a step for beams: those that are continued pass on what they have."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from paged_jax.beam_tables import repoint
from paged_jax.beams import (
    BeamState,
    Extensions,
    extend,
    finish,
    is_over,
)
from paged_jax.config import StepConfig
from paged_jax.requests import Requests, RequestStatus
from paged_jax.sampling import Candidates
from paged_jax.sequences import SequenceStatus
from paged_jax.state import SchedulerState


def beam_rows(state: SchedulerState) -> jax.Array:
    """Returns bool[S]: rows that hold, or wait to hold, a beam."""
    if not isinstance(state.beams, BeamState):
        return jnp.zeros(state.sequences.num_rows, bool)
    return state.beams.width[state.sequences.request] > 0


def advance_beams(
    config: StepConfig, state: SchedulerState, selects: jax.Array, found: Candidates
) -> SchedulerState:
    """Lets each search that has computed its beams' last tokens take one step.

    A loop over the searches, of no turns in a step without any.

    Args:
      config: static settings.
      state: scheduler's state, the computed tokens counted.
      selects: bool[S], rows that have computed their last tokens, and are beams. All
        rows of a search are, or none is.
      found: candidates of each row, arrays of [S, C].

    Returns:
      The state. The beams that go on have one more token. If a search is over, its
      slots have its finished texts, best first, and its rows are FINISHED.
    """

    def advance_first(carry):
        state, left = carry
        group = state.requests.group[state.sequences.request]
        mine = left & (group == group[jnp.argmax(left)])
        return _advance(config, state, mine, found), left & ~mine

    return jax.lax.while_loop(
        lambda carry: jnp.any(carry[1]), advance_first, (state, selects)
    )[0]


class _Search(NamedTuple):
    """One search: arrays of k, by the numbers of the beams.

    Attributes:
      valid: bool[k]. The search may have fewer beams than the largest.
      rows: i32[k]. Their rows; any where not valid.
      slots: i32[k]. Their request slots; the null request's where not valid.
      position: i32[]. Of the token that is chosen in this step.
    """

    valid: jax.Array
    rows: jax.Array
    slots: jax.Array
    position: jax.Array


def _advance(
    config: StepConfig, state: SchedulerState, mine: jax.Array, found: Candidates
) -> SchedulerState:
    """Takes a step of the search whose rows are `mine` bool[S]."""
    sequences, requests, beams = state.sequences, state.requests, state.beams
    width = config.max_beam_width
    number = beams.number[sequences.request]
    at = jnp.where(mine, number, width)
    row = jnp.arange(sequences.num_rows, dtype=jnp.int32)
    rows = jnp.zeros(width + 1, jnp.int32).at[at].set(row)[:width]
    valid = jnp.arange(width) < jnp.sum(mine)
    slots = jnp.where(valid, sequences.request[rows], requests.null)
    first = slots[0]
    search = _Search(valid, rows, slots, requests.length[first])

    best, ends, going = extend(
        jax.tree.map(lambda x: x[rows], found),
        jnp.where(valid, beams.total[slots], -jnp.inf),
        requests.stop_ids[first],
    )
    start = requests.prompt_len[first]
    length, most = search.position + 1 - start, requests.max_len[first] - start
    penalty = beams.length_penalty[first]
    ends = valid & (ends | (length >= most))
    score = jnp.where(valid, beams.score[slots], -jnp.inf)
    finished = finish(score, best, ends, length, penalty)
    worst = finished.score[jnp.sum(valid) - 1]
    over = is_over(worst, going.total[0], length, most, penalty, beams.stopping[first])
    beams = dataclasses.replace(
        beams,
        total=beams.total.at[slots].set(going.total),
        parents=beams.parents.at[slots, search.position].set(
            jnp.where(over, -1, going.parent)
        ),
        score=beams.score.at[slots].set(finished.score),
    )
    beams = _keep_finished(
        requests, beams, search, best, finished.source, jnp.any(ends)
    )
    pool = state.pool
    if config.sharing:
        parents = jnp.where(over, rows, rows[going.parent])
        pool, sequences = repoint(pool, sequences, rows, parents, valid)
    else:
        same = _in_common(requests, search, going.parent)
        length = jnp.where(mine, same[number], sequences.length)
        sequences = dataclasses.replace(sequences, length=length)
    status = jnp.where(mine & over, SequenceStatus.FINISHED, sequences.status)
    return dataclasses.replace(
        state,
        pool=pool,
        sequences=dataclasses.replace(sequences, status=status),
        requests=_write_texts(state, beams, search, going, over),
        beams=beams,
    )


def _keep_finished(
    requests: Requests,
    beams: BeamState,
    search: _Search,
    best: Extensions,
    source: jax.Array,
    any_new: jax.Array,
) -> BeamState:
    """Copies the texts that this step has finished; of no turns if there are none.

    Args:
      requests: the requests, the beams' tokens as they were extended.
      beams: the searches.
      search: the search.
      best: the extensions that may have finished.
      source: i32[k], see `Finished`.
      any_new: bool[], whether any did.
    """
    slots, position, width = search.slots, search.position, search.slots.shape[0]
    is_new = source >= width
    place = jnp.where(is_new, source - width, source)
    parent = slots[best.parent[place]]
    old = slots[place]

    def keep(carry):
        beams, _ = carry

        def text(kept: jax.Array, running: jax.Array, last: jax.Array) -> jax.Array:
            new = running[parent].at[:, position].set(last[place])
            return kept.at[slots].set(jnp.where(is_new[:, None], new, kept[old]))

        length = jnp.where(is_new, position + 1, beams.length[old])
        beams = dataclasses.replace(
            beams,
            length=beams.length.at[slots].set(length),
            tokens=text(beams.tokens, requests.tokens, best.token),
            logprobs=text(beams.logprobs, requests.logprobs, best.logprob),
        )
        return beams, jnp.bool_(False)

    return jax.lax.while_loop(lambda carry: carry[1], keep, (beams, any_new))[0]


def _write_texts(
    state: SchedulerState,
    beams: BeamState,
    search: _Search,
    going: Extensions,
    over: jax.Array,
) -> Requests:
    """Gives each slot its beam's tokens, or a finished text if the search is over."""
    requests, slots, position = state.requests, search.slots, search.position
    parent = slots[going.parent]

    def put(old: jax.Array, finished: jax.Array, last: jax.Array) -> jax.Array:
        # What is moved is read before anything is written.
        moved = old[parent].at[:, position].set(last)
        text = jnp.where(over, finished[slots], moved)
        old, text = jax.lax.optimization_barrier((old, text))
        return old.at[slots].set(text)

    length = jnp.where(over, beams.length[slots], position + 1)
    last = beams.tokens[slots, jnp.maximum(length - 1, 0)]
    stopped = jnp.any(requests.stop_ids[slots] == last[:, None], axis=1)
    end = jnp.where(stopped, RequestStatus.FINISHED_STOP, RequestStatus.FINISHED_LENGTH)
    ends = search.valid & over
    begins = search.valid & (position == requests.prompt_len[slots])
    timeline = requests.timeline[slots]
    time = jnp.stack([jnp.zeros_like(begins), begins, ends], axis=1)
    return dataclasses.replace(
        requests,
        tokens=put(requests.tokens, beams.tokens, going.token),
        logprobs=put(requests.logprobs, beams.logprobs, going.logprob),
        length=requests.length.at[slots].set(
            jnp.where(search.valid, length, requests.length[slots])
        ),
        status=requests.status.at[slots].set(
            jnp.where(ends, end, requests.status[slots])
        ),
        timeline=requests.timeline.at[slots].set(
            jnp.where(time, state.iteration, timeline)
        ),
    )


def _in_common(requests: Requests, search: _Search, parent: jax.Array) -> jax.Array:
    """Returns i32[k]: tokens that a beam's text and its parent's have in common.

    The memory of a row that shares none holds the keys and values of so many.
    """
    place = jnp.arange(requests.tokens.shape[1], dtype=jnp.int32)
    own = requests.tokens[search.slots]
    differs = (own != own[parent]) & (place < search.position)
    return jnp.min(jnp.where(differs, place, search.position), axis=1)


def wait_for_beams(state: SchedulerState, goal: jax.Array) -> jax.Array:
    """Keeps the beams of a search in step: all compute their last token at once.

    Until each of them lacks no more than that, those that do wait. They are apart after
    a preemption, and whenever they share no memory.

    Args:
      state: scheduler's state, with beams.
      goal: i32[S], tokens that each row has to compute: all that are known.

    Returns:
      i32[S], one less for beams that wait, or whose others do.
    """
    sequences, requests = state.sequences, state.requests
    running = sequences.status == SequenceStatus.RUNNING
    behind = running & beam_rows(state) & (goal - sequences.length > 1)

    def wait() -> jax.Array:
        group = requests.group[sequences.request]
        at = jnp.where(behind, group, requests.null)
        apart = jnp.zeros(requests.null + 1, bool).at[at].max(behind)
        return goal - (apart[group] & running & beam_rows(state))

    return jax.lax.cond(jnp.any(behind), wait, lambda: goal)
