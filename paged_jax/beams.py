"""Beam search: which beams go on, which texts are finished, and when it is over.

The rules are those of `transformers`' `generate`. Every beam is extended by every
token. Of these candidates the best `width` may finish; the best `width` of those that
do not end a text go on. A running beam's total is the sum of its log-probabilities; a
finished text's score is that sum over a power of its length.
"""

import dataclasses
import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.new_arrays import full, zeros
from paged_jax.sampling import Candidates


class Stopping(enum.IntEnum):
    """When a search ends that has as many finished texts as beams."""

    HOPELESS = 0  # when the best beam would be no better if it ended now
    AT_ONCE = 1
    NEVER = 2  # as HOPELESS, but if longer is better, as though it had its full length


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BeamState:
    """The beam searches in service: of each request slot its beam, and one text.

    Slot by slot a beam is a sequence like any other; these are numbered, the best one
    is 0. The finished texts belong to the search and not to the beams: the slot of beam
    j has the j-th best, to be there when the search is over.

    Attributes:
      width: i32[R + 1]. Beams of the slot's search; 0 if it takes part in none.
      number: i32[R + 1]. Which beam is in the slot.
      length_penalty: f32[R + 1]. Power of the length that a sum is divided by.
      stopping: i32[R + 1]. A `Stopping`.
      total: f32[R + 1]. Sum of the beam's log-probabilities; -inf for beams other than
        the first that have no token yet, so that all first ones extend one beam.
      parents: i32[R + 1, M]. For the token at each position, the number of the beam
        that this one continued then; -1 before.
      score: f32[R + 1]. The finished text's; -inf for none.
      length: i32[R + 1]. Its tokens, prompt included.
      tokens: i32[R + 1, M]. Prompt and text.
      logprobs: f32[R + 1, M]. Log-probability of each of its tokens.
    """

    width: jax.Array
    number: jax.Array
    length_penalty: jax.Array
    stopping: jax.Array
    total: jax.Array
    parents: jax.Array
    score: jax.Array
    length: jax.Array
    tokens: jax.Array
    logprobs: jax.Array


class NewBeams(NamedTuple):
    """What is asked of beam searches that are submitted, arrays of W rows.

    Attributes:
      width: i32[W]. 0 for requests without beams.
      length_penalty: f32[W].
      stopping: i32[W].
    """

    width: jax.Array
    length_penalty: jax.Array
    stopping: jax.Array


def init_beams(num_requests: int, max_model_len: int) -> BeamState:
    """Returns no searches, for `num_requests` slots and the null request."""
    rows = num_requests + 1
    return BeamState(
        width=zeros(rows),
        number=zeros(rows),
        length_penalty=zeros(rows, np.float32),
        stopping=zeros(rows),
        total=zeros(rows, np.float32),
        parents=full((rows, max_model_len), -1),
        score=full(rows, -np.inf, np.float32),
        length=zeros(rows),
        tokens=zeros((rows, max_model_len)),
        logprobs=zeros((rows, max_model_len), np.float32),
    )


def submit_beams(
    beams: BeamState, slots: jax.Array, new: NewBeams, number: jax.Array
) -> BeamState:
    """Puts new requests' parts of their searches into their slots.

    Args:
      beams: the searches.
      slots: i32[W]; R for padding.
      new: what is asked.
      number: i32[W], which of its request's beams each slot has.
    """
    return dataclasses.replace(
        beams,
        width=beams.width.at[slots].set(new.width),
        number=beams.number.at[slots].set(number),
        length_penalty=beams.length_penalty.at[slots].set(new.length_penalty),
        stopping=beams.stopping.at[slots].set(new.stopping),
        total=beams.total.at[slots].set(jnp.where(number > 0, -jnp.inf, 0.0)),
        parents=beams.parents.at[slots].set(-1),
        score=beams.score.at[slots].set(-jnp.inf),
    )


class Extensions(NamedTuple):
    """Beams with one more token, the best first; arrays of k.

    Attributes:
      parent: i32[k]. Number of the beam that is extended.
      token: i32[k].
      logprob: f32[k]. The token's.
      total: f32[k]. The sum of all.
    """

    parent: jax.Array
    token: jax.Array
    logprob: jax.Array
    total: jax.Array


def extend(
    found: Candidates, total: jax.Array, stop_ids: jax.Array
) -> tuple[Extensions, jax.Array, Extensions]:
    """Orders the extensions of beams.

    Args:
      found: of each of k beams the likeliest tokens, at least k and as many as there
        are stop ids, arrays of [k, C].
      total: f32[k], -inf for beams that do not count.
      stop_ids: i32[E], tokens that end a text.

    Returns:
      The k best of all; bool[k], which of them end; the k best that do not end. Of
      equals, the earlier beam comes first, then the lower token.
    """
    width, count = found.tokens.shape
    parent = jnp.repeat(jnp.arange(width, dtype=jnp.int32), count)
    minus, parent, token, logprob = jax.lax.sort(
        (
            -(total[:, None] + found.logprobs).ravel(),
            parent,
            found.tokens.ravel(),
            found.logprobs.ravel(),
        ),
        num_keys=3,
    )
    ends = jnp.any(token[:, None] == stop_ids, axis=1)
    order = Extensions(parent, token, logprob, -minus)
    rank = jnp.cumsum((~ends).astype(jnp.int32)) - 1
    place = jnp.where(ends, width, jnp.minimum(rank, width))
    goes_on = jnp.zeros(width + 1, jnp.int32).at[place].set(jnp.arange(width * count))
    best = jax.tree.map(lambda x: x[:width], order)
    return best, ends[:width], jax.tree.map(lambda x: x[goes_on[:width]], order)


class Finished(NamedTuple):
    """The finished texts of a search after a step, the best first.

    Attributes:
      source: i32[k]. Where each one was before: the place of a finished text, or k and
        the place of an extension.
      score: f32[k]. -inf where there are none.
    """

    source: jax.Array
    score: jax.Array


def score_of(
    total: jax.Array, length: jax.Array, length_penalty: jax.Array
) -> jax.Array:
    """Returns a sum of log-probabilities over a power of the number of tokens."""
    return total / jnp.float32(length) ** length_penalty


def finish(
    score: jax.Array, best: Extensions, ends: jax.Array, length: jax.Array, penalty
) -> Finished:
    """Orders the finished texts of a search, those of this step among them.

    Args:
      score: f32[k], of the texts that were finished, the best first; -inf for none.
      best: the best extensions.
      ends: bool[k], which of them are finished by their last token.
      length: i32[], generated tokens of each.
      penalty: f32[], the length penalty.

    Returns:
      The k best; of equals, the earlier ones.
    """
    new = jnp.where(ends, score_of(best.total, length, penalty), -jnp.inf)
    minus, source = jax.lax.sort(
        (
            -jnp.concatenate([score, new]),
            jnp.arange(2 * score.shape[0], dtype=jnp.int32),
        ),
        num_keys=2,
    )
    return Finished(source[: score.shape[0]], -minus[: score.shape[0]])


def is_over(
    worst: jax.Array,
    total: jax.Array,
    length: jax.Array,
    max_length: jax.Array,
    penalty: jax.Array,
    stopping: jax.Array,
) -> jax.Array:
    """Returns whether a search ends after a step, bool[].

    Args:
      worst: f32[], score of the last finished text that counts; -inf if there are
        fewer.
      total: f32[], that of the best beam that goes on.
      length: i32[], generated tokens.
      max_length: i32[], most tokens to generate.
      penalty: f32[], the length penalty.
      stopping: i32[], a `Stopping`.
    """
    hopes_for_length = (stopping == Stopping.NEVER) & (penalty > 0)
    hoped = jnp.where(hopes_for_length, max_length, length)
    hopeless = score_of(total, hoped, penalty) <= worst
    ends = (stopping == Stopping.AT_ONCE) | (length >= max_length) | hopeless
    return (worst > -jnp.inf) & ends
