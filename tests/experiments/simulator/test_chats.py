"""Lengths of requests that carry chats."""

import numpy as np
import pytest

from experiments.simulator.chats import MOST_OUTPUT, MOST_PROMPT, draw_chats
from experiments.simulator.evaluate import draw_trace


def draw(seed=0, count=4000, **changes):
    return draw_chats(np.random.default_rng(seed), count, 2048, **changes)


def test_prompts_and_outputs_are_cut():
    prompt, output = draw().T
    assert prompt.min() >= 1 and output.min() >= 1
    assert prompt.max() == MOST_PROMPT and output.max() == MOST_OUTPUT
    # Half of the chats are longer than what is kept of them.
    assert 0.4 < (prompt == MOST_PROMPT).mean() < 0.7


def test_a_chat_of_one_round_is_a_question():
    prompt, output = draw(mean_rounds=1.0).T
    assert prompt.mean() == pytest.approx(150, rel=0.1)
    assert output.mean() == pytest.approx(335, rel=0.1)


def test_more_rounds_make_longer_prompts_and_the_same_outputs():
    few, many = draw(mean_rounds=2.0), draw(mean_rounds=6.0)
    assert many[:, 0].mean() > 1.3 * few[:, 0].mean()
    assert many[:, 1].mean() == pytest.approx(few[:, 1].mean(), rel=0.05)


def test_the_seed_decides_the_trace():
    first, again, other = (draw_trace("chat", 2.0, 100.0, s) for s in (0, 0, 1))
    assert np.array_equal(first.prompt_len, again.prompt_len)
    assert not np.array_equal(first.prompt_len, other.prompt_len)
    assert len(first) == 200
