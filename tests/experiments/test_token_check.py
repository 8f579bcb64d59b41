import jax
import numpy as np
import pytest

from experiments.token_check import (
    TIE,
    Difference,
    Draw,
    draw_gap,
    find_differences,
    next_logits,
    with_gap,
)
from paged_jax import Engine, EngineConfig, SamplingParams
from paged_jax.requests import SamplingState
from paged_jax.sampling import sample
from paged_jax.submit import _sample_keys

LENGTH = 48


def test_a_request_is_compared_with_the_first_cell_that_served_it():
    tokens = {
        "a": {"one": [1, 2, 3], "two": [4, 5]},
        "b": {"three": [9, 9, 9]},
        "c": {"one": [1, 7, 3], "three": [9, 9, 9]},
        "d": {"two": [4, 5], "three": [9, 8, 9]},
    }
    assert find_differences(tokens) == [
        Difference("c", "a", "one", 1, 7, 2),
        Difference("d", "b", "three", 1, 8, 9),
    ]


def test_equal_tokens_have_no_difference():
    assert find_differences({key: {"one": [1, 2]} for key in "ab"}) == []


@pytest.fixture(scope="module")
def decoded(tiny_model):
    engine = Engine(
        tiny_model,
        EngineConfig(max_model_len=LENGTH, max_seqs=4, max_requests=4, token_budget=8),
    )
    prompt = list(b"The sky is")
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    (output,) = engine.generate([prompt], params)
    return prompt, list(output.outputs[0].token_ids)


def test_the_plain_decode_gives_the_engines_tokens(tiny_model, decoded):
    prompt, generated = decoded
    for position, token in enumerate(generated):
        logits = next_logits(tiny_model, [*prompt, *generated[:position]], LENGTH)
        assert logits.argmax() == token


def test_a_token_far_from_the_best_is_no_tie(tiny_model, decoded):
    prompt, generated = decoded
    position = 5
    logits = next_logits(tiny_model, [*prompt, *generated[:position]], LENGTH)
    worst = int(logits.argmin())
    found = with_gap(
        Difference("b", "a", "0", position, worst, generated[position]),
        tiny_model,
        prompt,
        generated,
        LENGTH,
    )
    assert found.gap == pytest.approx(float(logits.max() - logits.min()), abs=1e-5)
    assert not found.is_tie


def test_two_tokens_with_one_embedding_tie(tiny_model, decoded):
    prompt, generated = decoded
    twin = (generated[0] + 1) % 256
    params = jax.tree.map(np.array, tiny_model.params)
    head = next(v for k, v in params.items() if k == "head")
    head[twin] = head[generated[0]]
    found = with_gap(
        Difference("b", "a", "0", 0, twin, generated[0]),
        tiny_model._replace(params=params),
        prompt,
        generated,
        LENGTH,
    )
    assert found.gap == pytest.approx(0, abs=TIE / 10)
    assert found.is_tie


def test_a_difference_that_nobody_looked_at_is_no_tie():
    assert not Difference("b", "a", "0", 0, 1, 2).is_tie


def test_a_drawn_token_has_no_gap_and_its_neighbours_have_one(tiny_model):
    """The gap says what `sampling` would have drawn, from the request's seed alone."""
    logits = np.random.default_rng(0).normal(size=256).astype(np.float32)
    for number, seed in ((0, 5), (2, (3 << 32) + 7)):
        draw = Draw(seed, number, temperature=0.7)
        gaps = np.array([draw_gap(logits, draw, 9, token) for token in range(256)])
        (drawn,) = np.flatnonzero(gaps == 0)
        assert drawn == _sampled(logits, draw, position=9)
        assert (np.diff(gaps[: drawn + 1]) < 0).all()
        assert (np.diff(gaps[drawn:]) > 0).all()


def _sampled(logits, draw, position):
    """Returns the token that the engine's own sampling draws."""
    key = np.array([[draw.seed >> 32, draw.seed & 0xFFFFFFFF]], np.uint32)
    sampling = SamplingState(
        temperature=np.array([draw.temperature], np.float32),
        top_p=np.ones(1, np.float32),
        min_p=np.zeros(1, np.float32),
        top_k=np.zeros(1, np.int32),
        key=_sample_keys(key, np.array([draw.number])),
    )
    return int(sample(logits[None], sampling, np.array([position])).tokens[0])
