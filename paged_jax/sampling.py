"""Sampling: the next token of each row from its logits.

No random number depends on who else is in the batch: the token at position p of a
request uses `fold_in(request_key, p)`. Nothing sorts the vocabulary: the cut-offs of
top-k and top-p are found by bisection over the bits of a float.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from paged_jax.requests import SamplingState

_GROUP = 256  # tokens that are summed, or compared, together
_EXCLUDED = -jnp.inf


class Candidates(NamedTuple):
    """The likeliest next tokens, the likeliest first; of equals, the lowest first.

    Attributes:
      tokens: i32[M, C].
      logprobs: f32[M, C]. -inf beyond the vocabulary.
    """

    tokens: jax.Array
    logprobs: jax.Array


class Samples(NamedTuple):
    """The tokens chosen.

    Attributes:
      tokens: i32[M].
      logprobs: f32[M]. Log-probability of each under the model, before temperature.
      top_ids: i32[M, A]. The most likely tokens; A may be 0.
      top_logprobs: f32[M, A].
      candidates: for beam search; () where there is none.
    """

    tokens: jax.Array
    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array
    candidates: Candidates | tuple[()] = ()


def sample(
    logits: jax.Array,
    sampling: SamplingState,
    positions: jax.Array,
    num_logprobs: int = 0,
) -> Samples:
    """Chooses a token for each row.

    Args:
      logits: f32[M, V].
      sampling: parameters of each row, arrays of M rows.
      positions: i32[M], position of the token to be chosen in its sequence.
      num_logprobs: A, how many of the most likely tokens to report.

    Returns:
      The tokens, greedy where the temperature is 0.
    """
    greedy = most_likely(logits)
    random = sampling.temperature > 0
    tokens = jax.lax.cond(
        jnp.any(random),
        lambda: jnp.where(random, _draw(logits, sampling, positions), greedy),
        lambda: greedy,
    )
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    if num_logprobs:
        top, top_ids = jax.lax.top_k(logits, num_logprobs)
    else:
        top = jnp.zeros((logits.shape[0], 0), jnp.float32)
        top_ids = jnp.zeros((logits.shape[0], 0), jnp.int32)
    return Samples(tokens, chosen - normalizer, top_ids, top - normalizer[:, None])


def most_likely(logits: jax.Array) -> jax.Array:
    """Returns i32[M], the first of the largest logits f32[M, V] of each row.

    In two levels, group and token: XLA's argmax of a whole row on CPU compares one
    number at a time, and takes 14 times as long.
    """
    if logits.shape[-1] <= _GROUP:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    groups = _in_groups(logits, _EXCLUDED)
    group = jnp.argmax(jnp.max(groups, axis=-1), axis=-1)
    inside = jnp.take_along_axis(groups, group[:, None, None], axis=1)[:, 0]
    return (group * _GROUP + jnp.argmax(inside, axis=-1)).astype(jnp.int32)


def likeliest(logits: jax.Array, count: int) -> Candidates:
    """Finds the likeliest tokens of each row.

    Whoever is among the `count` largest is in one of the `count` groups with the
    largest maxima, so only those are looked at closely.

    Args:
      logits: f32[M, V].
      count: C.

    Returns:
      The candidates.
    """
    groups = _in_groups(logits, _EXCLUDED)
    maxima = jnp.max(groups, axis=-1)
    _, chosen = jax.lax.top_k(maxima, min(count, groups.shape[1]))
    chosen = jnp.sort(chosen, axis=-1)  # so that of equals the lowest comes first
    inside = jax.vmap(lambda own, places: own[places])(groups, chosen)
    inside = inside.reshape(logits.shape[0], -1)
    missing = max(count - inside.shape[1], 0)
    inside = jnp.pad(inside, ((0, 0), (0, missing)), constant_values=_EXCLUDED)
    top, place = jax.lax.top_k(inside, count)
    group = jnp.minimum(place // _GROUP, chosen.shape[1] - 1)
    group = jnp.take_along_axis(chosen, group, axis=-1)
    tokens = (group * _GROUP + place % _GROUP).astype(jnp.int32)
    # The largest first, so that a sum of many of these is as exact as it can be. It is
    # `top[:, :1]`, but from there XLA on CPU would take it anew for every token.
    largest = jnp.max(maxima, axis=-1, keepdims=True)
    rest = jnp.log(jnp.sum(jnp.exp(logits - largest), axis=-1, keepdims=True))
    return Candidates(tokens, top - largest - rest)


def _in_groups(values: jax.Array, padding: float) -> jax.Array:
    """Returns f32[M, G, `_GROUP`] of f32[M, V]."""
    rows, vocab = values.shape
    pad = ((0, 0), (0, -vocab % _GROUP))
    return jnp.pad(values, pad, constant_values=padding).reshape(rows, -1, _GROUP)


def _draw(
    logits: jax.Array, sampling: SamplingState, positions: jax.Array
) -> jax.Array:
    """Draws a token for each row: temperature, then min-p, top-k and top-p."""
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    scaled = logits / temperature[:, None]
    scaled -= jnp.max(scaled, axis=-1, keepdims=True)
    scaled = jnp.where(
        scaled >= jnp.log(sampling.min_p)[:, None], scaled, _EXCLUDED
    )  # log(0) keeps all
    scaled = jax.lax.cond(
        jnp.any(sampling.top_k > 0), keep_top_k, lambda x, _: x, scaled, sampling.top_k
    )
    weights = jnp.exp(scaled)
    weights = jax.lax.cond(
        jnp.any(sampling.top_p < 1),
        keep_top_p,
        lambda x, _: x,
        weights,
        sampling.top_p,
    )
    return _search(weights, _uniform(sampling.key, positions))


def _uniform(keys: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns f32[M] in [0, 1), from keys u32[M, 2] and positions i32[M]."""

    def one(key: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(key, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position))

    return jax.vmap(one)(keys, positions)


def keep_top_k(scores: jax.Array, k: jax.Array) -> jax.Array:
    """Excludes all but the k largest scores of each row, and ties with the k-th.

    Args:
      scores: f32[M, V], not NaN.
      k: i32[M]; 0 keeps all.

    Returns:
      f32[M, V], -inf where excluded.
    """
    # As integers in the order of the floats: flip the magnitude of negative ones.
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    order = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)

    def enough(threshold: jax.Array) -> jax.Array:
        return jnp.sum(order >= threshold[:, None], axis=-1) >= k

    threshold = _largest(enough, jnp.full(scores.shape[0], jnp.iinfo(jnp.int32).min))
    kept = (order >= threshold[:, None]) | (k <= 0)[:, None]
    return jnp.where(kept, scores, _EXCLUDED)


def keep_top_p(weights: jax.Array, top_p: jax.Array) -> jax.Array:
    """Zeroes all but the smallest set of tokens with a share `top_p` of the weight.

    Args:
      weights: f32[M, V], 0 or more.
      top_p: f32[M], above 0; 1 keeps all.

    Returns:
      f32[M, V]. Ties with the least likely token of the set are kept too.
    """
    order = jax.lax.bitcast_convert_type(weights, jnp.int32)  # order of the floats
    wanted = top_p * jnp.sum(weights, axis=-1)

    def enough(threshold: jax.Array) -> jax.Array:
        kept = jnp.where(order >= threshold[:, None], weights, 0.0)
        return jnp.sum(kept, axis=-1) >= wanted

    threshold = _largest(enough, jnp.zeros(weights.shape[0], jnp.int32))
    kept = (order >= threshold[:, None]) | (top_p >= 1)[:, None]
    return jnp.where(kept, weights, 0.0)


def _largest(holds, lowest: jax.Array) -> jax.Array:
    """Returns for each row the largest i32 for which `holds`, true at `lowest`.

    Built from the top bit down; `lowest` is 0, or the lowest integer, from which the
    same bits count upwards.
    """

    def set_bit(i: jax.Array, value: jax.Array) -> jax.Array:
        bit = jnp.left_shift(jnp.int32(1), 30 - i)
        candidate = value | bit
        return jnp.where(holds(candidate), candidate, value)

    start = jnp.where((lowest < 0) & holds(jnp.zeros_like(lowest)), 0, lowest)
    return jax.lax.fori_loop(0, 31, set_bit, start)


def _search(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Inverts the cumulative distribution in two levels: group, then token.

    Args:
      weights: f32[M, V], some positive in each row.
      uniform: f32[M] in [0, 1).

    Returns:
      i32[M], tokens of positive weight.
    """
    groups = _in_groups(weights, 0.0)
    sums = jnp.cumsum(jnp.sum(groups, axis=-1), axis=-1)
    group, left = _locate(sums, uniform * sums[:, -1])
    inside = jnp.take_along_axis(groups, group[:, None, None], axis=1)[:, 0]
    sums = jnp.cumsum(inside, axis=-1)
    token, _ = _locate(sums, left)
    return group * _GROUP + token


def _locate(sums: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Finds where running sums f32[M, W] first exceed a target f32[M].

    Returns:
      i32[M], the place, always one that adds something; and f32[M], what of the target
      is left there.
    """
    last = jnp.argmax(sums >= sums[:, -1:], axis=-1)  # rounding may overshoot the sum
    place = jnp.minimum(jnp.sum(sums <= target[:, None], axis=-1), last)
    before = jnp.where(
        place > 0,
        jnp.take_along_axis(sums, jnp.maximum(place - 1, 0)[:, None], axis=-1)[:, 0],
        0.0,
    )
    return place.astype(jnp.int32), target - before
