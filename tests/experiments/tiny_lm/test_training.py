"""Training on a small text: the loss goes down, and every run is the same."""

import chex
import jax
import numpy as np
import pytest

from experiments.tiny_lm.baselines import bigram_bits, unigram_bits
from experiments.tiny_lm.corpus import as_stream, load_corpus
from experiments.tiny_lm.settings import Settings
from experiments.tiny_lm.tokens import END_OF_TEXT, VOCAB_SIZE
from experiments.tiny_lm.training import draw_windows, evaluate, first_weights, train
from paged_jax.models.config import tiny

CONFIG = tiny(vocab_size=VOCAB_SIZE, tie_embeddings=True, eos_token_ids=(END_OF_TEXT,))
SETTINGS = Settings(steps=60, windows=8, window=32)


@pytest.fixture(scope="module")
def streams():
    corpus = load_corpus(["optax"])
    return as_stream(corpus.train), as_stream(corpus.held_out)


@pytest.fixture(scope="module")
def run(streams):
    return train(CONFIG, SETTINGS, *streams)


def test_the_loss_goes_down_below_what_frequencies_alone_give(run, streams):
    _, curve = run
    assert curve[-1].step == SETTINGS.steps
    assert [p.step for p in curve] == list(range(3, 61, 3))
    first, last = curve[0], curve[-1]
    assert first.train > 6.5 and last.train < first.train - 2
    assert last.held_out < unigram_bits(*streams) - 0.3


def test_a_memorised_text_is_predicted_better_than_from_pairs(streams):
    """With enough steps for its text, a model sees further back than one token."""
    text = as_stream(["The quick brown fox jumps over a lazy dog, and runs off."] * 50)
    settings = Settings(steps=60, windows=8, window=64)
    _, curve = train(CONFIG, settings, text, text)
    assert curve[-1].held_out < 0.3 < bigram_bits(text, text)


def test_the_last_point_is_that_of_the_returned_weights(run, streams):
    params, curve = run
    held_out = evaluate(CONFIG, params, streams[1], SETTINGS.window)
    assert curve[-1].held_out == held_out


def test_a_seed_decides_every_weight(run, streams):
    again, _ = train(CONFIG, SETTINGS, *streams)
    chex.assert_trees_all_equal(again, run[0])
    other, _ = train(CONFIG, Settings(1, 1, 8, 32), *streams)
    assert not (other["embedding"] == again["embedding"]).all()


def test_one_step_is_enough_to_run(streams):
    _, curve = train(CONFIG, Settings(steps=1, windows=2, window=16), *streams)
    assert [p.step for p in curve] == [1]


def test_first_weights_expect_nothing(streams):
    params = first_weights(CONFIG, jax.random.key(0))
    bits = evaluate(CONFIG, params, streams[1], 64, 4)
    assert bits == pytest.approx(np.log2(VOCAB_SIZE), abs=1)


def test_windows_are_pieces_of_the_stream():
    stream = np.arange(100, dtype=np.uint16)
    settings = Settings(windows=500, window=9)
    windows = draw_windows(stream, settings, np.random.default_rng(0))
    assert windows.shape == (500, 10) and windows.dtype == np.int32
    assert (np.diff(windows, axis=1) == 1).all()
    assert windows[:, 0].min() == 0 and windows[:, -1].max() == 99
