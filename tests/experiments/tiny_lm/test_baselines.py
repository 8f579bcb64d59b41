"""The counts that a model must beat."""

import numpy as np
import pytest

from experiments.tiny_lm.baselines import bigram_bits, bits_per_byte, unigram_bits
from experiments.tiny_lm.corpus import as_stream

ALTERNATING = as_stream(["ab" * 5000])


def test_two_tokens_in_turn_cost_a_bit_each_by_counts_and_nothing_by_pairs():
    assert unigram_bits(ALTERNATING, ALTERNATING) == pytest.approx(1, abs=0.05)
    assert bigram_bits(ALTERNATING, ALTERNATING) == pytest.approx(0, abs=0.01)


def test_what_was_never_seen_costs_much_but_not_everything():
    strange = as_stream(["xyz" * 100])
    for bits in (unigram_bits, bigram_bits):
        assert 7 < bits(ALTERNATING, strange) < 30


def test_ends_of_text_are_paid_for_but_are_no_bytes():
    tokens = as_stream(["abc", "d"])
    assert bits_per_byte(6 * np.log(2), tokens) == pytest.approx(6 / 4)
