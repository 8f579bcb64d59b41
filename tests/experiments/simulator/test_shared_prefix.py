"""Fig 16's set-up: sentences to translate behind examples that are shared, or not."""

import numpy as np
import pytest

from experiments.errors import UserError
from experiments.simulator.evaluate import draw_trace, evaluate
from experiments.simulator.sentences import PREFIX_LEN, draw_sentences
from experiments.simulator.systems import SETUPS, engine_config


def test_sentences_have_the_lengths_that_are_stated():
    lengths = draw_sentences(np.random.default_rng(0), 50_000, 80, 2048)
    prompt, output = lengths.T
    assert prompt.min() >= 81 and output.min() >= 1
    assert (prompt - 80).mean() == pytest.approx(26, rel=0.01)
    assert (prompt - 80).std() == pytest.approx(13, rel=0.03)
    assert output.mean() == pytest.approx(49, rel=0.01)
    cut = draw_sentences(np.random.default_rng(0), 5_000, 80, 120)
    assert cut.sum(axis=1).max() == 120 and cut.min() >= 1


def test_llama_has_the_memory_that_its_weights_leave():
    setup = SETUPS["llama-13b"]
    # 0.95 x 39.39 GiB less 24.2 of weights, 0.3 of activations and 1, for 13.1 MB each.
    assert setup.num_blocks == pytest.approx(11.92 * 2**30 / (16 * 819_200), abs=5)
    assert engine_config("orca_oracle", setup, prefixes=1).max_prefixes == 0


@pytest.mark.long
def test_vllm_shares_the_prefix_and_orca_does_not():
    prefix_len = PREFIX_LEN[5]
    trace = draw_trace("wmt16", 40.0, 10.0, seed=0, prefix_len=prefix_len)
    options = dict(dataset="wmt16", prefix_len=prefix_len)
    vllm = evaluate("vllm", "llama-13b", trace, **options)
    orca = evaluate("orca_oracle", "llama-13b", trace, **options)
    assert vllm.means["block_saving"] > 0.6 and orca.means["block_saving"] == 0
    assert vllm.means["mean_running"] > 2 * orca.means["mean_running"]
    assert vllm.seconds < orca.seconds


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: draw_trace("alpaca", 1.0, 5.0, 0, prefix_len=80), "have a prefix"),
        (
            lambda: engine_config("ft", SETUPS["llama-13b"], dataset="wmt16"),
            "no batch size of ft for llama-13b and 'wmt16'",
        ),
    ],
)
def test_what_the_paper_does_not_have_is_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()
