"""Input and output lengths like those of the paper's datasets."""

import functools
import json
from pathlib import Path

import numpy as np

from experiments.errors import UserError

_FILE = Path(__file__).parent / "data" / "length_quantiles.json"
_PAPER = _FILE.with_name("paper.json")
# Others that a pair that does not fit may swap with, before its output is shortened.
_TRIES = 100
# Drawing again and again is no way to meet a model length that next to nothing fits.
_LEAST_SHARE = 0.01


def datasets() -> tuple[str, ...]:
    """Returns the datasets whose lengths can be drawn."""
    return tuple(k for k, v in _quantiles().items() if isinstance(v, dict))


def quantile(dataset: str, which: str, share: np.ndarray) -> np.ndarray:
    """Returns the length below which a share of the requests falls.

    Between the tabulated percentiles the length is linear in the share; beyond the
    first and the last it is constant.

    Args:
      dataset: one of `datasets()`.
      which: `input` or `output`.
      share: f64[N], from 0 to 1.

    Returns:
      f64[N], in tokens.
    """
    table = _quantiles()[dataset]
    return np.interp(share, np.array(table["percentiles"]) / 100, table[which])


def draw_lengths(
    rng: np.random.Generator,
    count: int,
    dataset: str,
    scale: float,
    max_model_len: int,
    correlation: float = 0.0,
) -> np.ndarray:
    """Draws the lengths of requests.

    Input and output are independent by default (their correlation in ShareGPT is 0.04,
    that in Alpaca is not known); else their ranks depend on each other as those of two
    Gaussian variables do. As in the paper, pairs that do not fit the model length are
    dropped and drawn again. The draw is stratified: each of N equal shares of a
    distribution is met once, in random order, so that even a few dozen requests have
    the spread of the whole set.

    Args:
      rng: source of randomness.
      count: N, requests.
      dataset: one of `datasets()`.
      scale: lengths are divided by this, and rounded to 1 or more.
      max_model_len: longest sequence, input and output together, in tokens.
      correlation: of the two Gaussian variables, above -1 and below 1.

    Returns:
      i64[N, 2], input and output lengths; each pair sums to `max_model_len` or less.

    Raises:
      UserError: next to no pair of lengths fits the model length, or a correlation out
        of range.
    """

    def lengths(which: str, share: np.ndarray) -> np.ndarray:
        scaled = np.rint(quantile(dataset, which, share) / scale)
        # What is too long anyway is kept in the range of integers.
        return np.clip(scaled, 1, max_model_len + 1).astype(np.int64)

    shares = (np.arange(1000) + 0.5) / 1000
    inputs, outputs = lengths("input", shares), lengths("output", shares)
    fit = np.searchsorted(outputs, max_model_len - inputs, side="right").mean() / 1000
    if fit < _LEAST_SHARE:
        raise UserError(
            f"{100 * fit:.1f}% of {dataset}'s lengths, divided by "
            f"workload.length_scale {scale:g}, fit engine.max_model_len "
            f"{max_model_len}; raise one of the two"
        )
    kept = np.zeros((0, 2), np.int64)
    while len(kept) < count:
        missing = count - len(kept)
        both = zip(("input", "output"), _shares(rng, missing, correlation))
        pairs = np.stack([lengths(which, share) for which, share in both], axis=1)
        kept = np.concatenate([kept, pairs[pairs.sum(1) <= max_model_len]])
    return kept


def draw_pairs(
    rng: np.random.Generator,
    count: int,
    dataset: str,
    longest: int,
) -> np.ndarray:
    """Draws lengths of requests from the histograms of the paper's Fig 11 themselves.

    They are of pairs that fit the model length already: to drop those that do not, when
    input and output are drawn apart, would shorten both. Such a pair swaps outputs with
    another one, so that the histograms stay as they are. Stratified, as in
    `draw_lengths`; inside a bin all lengths are equally likely.

    Args:
      rng: source of randomness.
      count: N, requests.
      dataset: one of `datasets()`.
      longest: input and output together, in tokens; no less than in the figure (2048).

    Returns:
      i64[N, 2], input and output lengths; each pair sums to `longest` or less.
    """
    both = zip(("input", "output"), _shares(rng, count, 0.0))
    inputs, outputs = (_from_histogram(dataset, which, share) for which, share in both)
    for i in np.flatnonzero(inputs + outputs > longest):
        for j in rng.integers(count, size=_TRIES):
            if max(inputs[i] + outputs[j], inputs[j] + outputs[i]) <= longest:
                outputs[[i, j]] = outputs[[j, i]]
                break
        else:
            # Of a few requests all may be long.
            outputs[i] = longest - inputs[i]
    return np.stack([inputs, outputs], axis=1)


def _from_histogram(dataset: str, which: str, share: np.ndarray) -> np.ndarray:
    """Returns the lengths below which these shares of the requests fall, i64[N]."""
    left, right, height = np.array(_histograms()[dataset][which]).T
    edges = np.append(left, right[-1])
    below = np.append(0.0, np.cumsum(height) / height.sum())
    return np.floor(np.interp(share, below, edges)).astype(np.int64)


def _shares(
    rng: np.random.Generator, count: int, correlation: float
) -> list[np.ndarray]:
    """Returns two f64[N] in [0, 1), one in each of N equal intervals, shuffled."""
    if not -1 < correlation < 1:
        raise UserError(
            f"correlation is {correlation}; it must be above -1 and below 1"
        )
    if correlation == 0:
        return [(rng.permutation(count) + rng.random(count)) / count for _ in range(2)]
    one, other = rng.standard_normal((2, count))
    other = correlation * one + np.sqrt(1 - correlation**2) * other
    return [
        (np.argsort(np.argsort(z)) + rng.random(count)) / count for z in (one, other)
    ]


@functools.cache
def _quantiles() -> dict:
    return json.loads(_FILE.read_text("utf-8"))


@functools.cache
def _histograms() -> dict:
    return json.loads(_PAPER.read_text("utf-8"))["fig11"]["histograms"]
