"""What a model must beat: counts of bytes, and of bytes after a byte."""

import numpy as np

from experiments.tiny_lm.tokens import END_OF_TEXT, VOCAB_SIZE


def unigram_bits(train: np.ndarray, held_out: np.ndarray) -> float:
    """Returns bits per byte of a model that knows how frequent each token is.

    Args:
      train: u16[N], a stream of texts, as from `corpus.as_stream`.
      held_out: another one.
    """
    counts = np.bincount(train, minlength=VOCAB_SIZE) + 1.0
    return bits_per_byte(-np.log(counts / counts.sum())[held_out].sum(), held_out)


def bigram_bits(train: np.ndarray, held_out: np.ndarray) -> float:
    """Returns bits per byte of a model that knows what follows each token.

    Pairs are counted a thousandth more often than seen, so that none is impossible.

    Args:
      train: u16[N], a stream of texts, as from `corpus.as_stream`.
      held_out: another one.
    """
    counts = np.full((VOCAB_SIZE, VOCAB_SIZE), 1e-3)
    np.add.at(counts, (train[:-1], train[1:]), 1.0)
    nats = -np.log(counts / counts.sum(1, keepdims=True))
    before = np.concatenate([[END_OF_TEXT], held_out[:-1]])
    return bits_per_byte(nats[before, held_out].sum(), held_out)


def bits_per_byte(nats: float, tokens: np.ndarray) -> float:
    """Returns what all tokens cost together, ends of text too, for each byte of text.

    Args:
      nats: the sum of the tokens' negative log-probabilities.
      tokens: the tokens that were predicted.
    """
    return float(nats / np.log(2) / np.count_nonzero(tokens != END_OF_TEXT))
