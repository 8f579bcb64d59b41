import jax
import numpy as np
import pytest

from experiments.token_check import (
    TIE,
    Difference,
    find_differences,
    next_logits,
    with_gap,
)
from paged_jax import Engine, EngineConfig, SamplingParams

LENGTH = 48


def rows_of(**digests):
    return [
        {"key": key, "details": {"workload": {"digest": digest}}}
        for key, digest in digests.items()
    ]


def test_cells_are_compared_with_the_first_that_served_the_same_requests():
    rows = rows_of(a="one", b="two", c="one", d="two")
    tokens = {
        "a": {"0": [1, 2, 3], "1": [4, 5]},
        "b": {"0": [9, 9, 9], "1": [9, 9]},
        "c": {"0": [1, 7, 3], "1": [4, 5]},
        "d": {"0": [9, 9, 9], "1": [9, 9]},
    }
    assert find_differences(rows, tokens) == [Difference("c", "a", "0", 1, 7, 2)]


def test_equal_tokens_have_no_difference():
    tokens = {key: {"0": [1, 2]} for key in "ab"}
    assert find_differences(rows_of(a="one", b="one"), tokens) == []


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
