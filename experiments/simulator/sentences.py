"""Lengths of sentences to translate, behind worked examples (paper, section 6.4).

The paper does not say how long the sentences of WMT16 are, in tokens, that it has
translated from English to German behind one example (a prefix of 80 tokens) or five
(341). So this is an assumption of ours: news sentences, of 26 tokens in the mean with a
standard deviation of half of it, gamma-distributed, as sentence lengths roughly are. A
translation has 49 tokens for 26 in the mean; its ratio to the sentence is
gamma-distributed too, with a standard deviation of a fifth.
"""

import numpy as np

DATASET = "wmt16"
MEAN_INPUT, MEAN_OUTPUT = 26.0, 49.0
_CV_INPUT, _CV_RATIO = 0.5, 0.2
# Tokens of the prefix, by the number of its examples.
PREFIX_LEN = {1: 80, 5: 341}


def draw_sentences(
    rng: np.random.Generator, count: int, prefix_len: int, max_model_len: int
) -> np.ndarray:
    """Draws the lengths of requests to translate a sentence.

    Args:
      rng: source of randomness.
      count: N, requests.
      prefix_len: tokens before the sentence.
      max_model_len: longest sequence; what is longer is cut, which next to nothing is.

    Returns:
      i64[N, 2], tokens of the prompts, prefix included, and of the outputs.
    """
    sentence = _gamma(rng, MEAN_INPUT, _CV_INPUT, count)
    ratio = _gamma(rng, MEAN_OUTPUT / MEAN_INPUT, _CV_RATIO, count)
    lengths = np.stack([sentence, sentence * ratio], axis=1)
    lengths = np.maximum(np.rint(lengths), 1).astype(np.int64)
    lengths[:, 0] = np.minimum(prefix_len + lengths[:, 0], max_model_len - 1)
    lengths[:, 1] = np.minimum(lengths[:, 1], max_model_len - lengths[:, 0])
    return lengths


def _gamma(rng: np.random.Generator, mean: float, cv: float, count: int) -> np.ndarray:
    return rng.gamma(1 / cv**2, mean * cv**2, count)
