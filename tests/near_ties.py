"""How near to another choice a choice of tokens was, by the model in float64.

Two computations of one model differ by rounding. Tokens may differ for it where the two
choices are all but equal, and nowhere else: each function returns how far apart they
are, and what is above `TIE` is no tie.
"""

import jax
import numpy as np
from oracles import llama as oracle
from oracles.beam_search import beam_search

TIE = 1e-4  # of a logit, of a probability, of a sum of log-probabilities


def gap(model, prompt, params, got, want) -> float:
    """Says how near the choice was in which the sequences of two outputs first differ.

    Args:
      model: a `LoadedModel` that the NumPy oracle can compute.
      prompt: token ids.
      params: the request's `SamplingParams`; seeded, if it draws.
      got: tokens of each sequence of an output.
      want: likewise, of the output that was expected.

    Returns:
      The largest gap of all its sequences; 0 if they are equal, infinity if they cannot
      be compared.
    """
    if list(got) == list(want):
        return 0.0
    if params.beam_width > 1:
        return beam_gap(model, prompt, params)
    if len(got) != len(want):
        return np.inf
    gaps = [0.0]
    for number, (ours, theirs) in enumerate(zip(got, want)):
        place = first_difference(ours, theirs)
        if place is None:
            continue
        if place == min(len(ours), len(theirs)):
            return np.inf
        text = [*prompt, *theirs[:place]]
        row = oracle.logits(model.config, model.params, text)[-1]
        choices = ours[place], theirs[place]
        if params.temperature == 0:
            gaps.append(row.max() - min(row[list(choices)]))
        else:
            gaps.append(draw_gap(row, params, number, len(text), *choices))
    return float(max(gaps))


def first_difference(a, b) -> int | None:
    """Returns the first place where two sequences differ; None if they are equal."""
    for place, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return place
    return None if len(a) == len(b) else min(len(a), len(b))


def draw_gap(row, params, number, position, one, other) -> float:
    """Returns how far the random number is from the bound between two tokens."""
    shares = shares_of(row, params)
    if not shares[one] or not shares[other]:
        return np.inf
    low, high = sorted((one, other))
    bounds = np.cumsum(shares)[[low, high - 1]]
    return float(np.abs(uniform(params.seed, number, position) - bounds).max())


def draw(row, params, number, position) -> int:
    """Draws the token that a sequence of a request has at a position."""
    bounds = np.cumsum(shares_of(row, params))
    return int(np.searchsorted(bounds, uniform(params.seed, number, position), "right"))


def shares_of(row, params):
    """Returns f64[V], the probabilities that a token is drawn with."""
    scaled = (row - row.max()) / params.temperature
    weights = np.where(np.exp(scaled) >= params.min_p, np.exp(scaled), 0.0)
    if params.top_k > 0:
        weights[weights < np.sort(weights)[-params.top_k]] = 0.0
    order = np.argsort(-weights, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= params.top_p * weights.sum()]] = 0.0
    return weights / weights.sum()


def uniform(seed, number, position) -> float:
    """Returns the random number of a token: in [0, 1)."""
    key = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
    key = jax.random.wrap_key_data(key, impl="threefry2x32")
    if number:
        key = jax.random.fold_in(key, np.uint32(2**32 - number))
    return float(jax.random.uniform(jax.random.fold_in(key, position)))


def beam_gap(model, prompt, params) -> float:
    """Returns how near any two of the candidates that count were, in any step."""
    width = params.beam_width
    sums, gaps = {(): 0.0}, []

    def log_probs(tokens):
        row = oracle.logits(model.config, model.params, list(tokens))[-1]
        row = row - np.logaddexp.reduce(row)
        generated = tuple(tokens[len(prompt) :])
        so_far = sums[generated]
        for token in np.argsort(-row)[: 2 * width + 2]:
            sums[(*generated, int(token))] = so_far + row[token]
        return row

    beam_search(
        log_probs,
        prompt,
        num_beams=width,
        max_new_tokens=params.max_tokens,
        eos_token_ids=params.stop_token_ids,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
    )
    for length in range(1, params.max_tokens + 1):
        best = sorted((v for k, v in sums.items() if len(k) == length), reverse=True)
        gaps += list(-np.diff(best[: 2 * width + 2]))
    return float(min(gaps))
