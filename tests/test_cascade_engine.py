"""The engine with shared prefixes read once: the same tokens as without."""

import functools

import jax
import numpy as np
import pytest
from engines import all_tokens, drawn, greedy, make_engine, prompts, tiny_model
from near_ties import TIE, gap

from paged_jax import SamplingParams
from paged_jax.models import decoder
from pallas_kernels.cascade import find_cascade


def text(length: int) -> list[int]:
    """Returns random tokens."""
    return np.random.default_rng(length).integers(3, 128, length).tolist()


# Two tiles of 64 tokens and more, for four sequences each: samples, beams, and prompts
# that start with a registered prefix; some without company.
PREFIX = text(129)
REQUESTS = [
    (text(133), drawn(8, seed=1, temperature=0.8, n=4)),
    (text(140), SamplingParams(beam_width=4, max_tokens=8, temperature=0.0)),
    *(([*PREFIX, *tail], greedy(6)) for tail in prompts(4, 6)),
    (text(70), greedy(5)),
    (text(9), drawn(7, seed=3)),
]


@functools.cache
def served(cascade: bool, kv_dtype: str | None) -> list[list[tuple[int, ...]]]:
    """Returns the tokens of each sequence of each request."""
    engine = make_engine(
        attention_backend="xla",
        cascade=cascade,
        kv_dtype=kv_dtype,
        block_size=16,
        num_blocks=48,
        max_model_len=160,
        max_seqs=8,
        max_requests=16,
        max_n=4,
        max_beam_width=4,
        token_budget=24,
    )
    prefix = engine.register_prefix(PREFIX)
    prompts, params = zip(*REQUESTS)
    outputs = engine.generate(list(prompts), list(params))
    engine.release_prefix(prefix)
    return [all_tokens(output) for output in outputs]


@pytest.fixture
def sizes(monkeypatch):
    """The numbers of tokens in the passes of each step of an engine made later."""
    seen = []

    def find_and_tell(*args, **kwargs):
        found = find_cascade(*args, **kwargs)
        jax.debug.callback(lambda starts: seen.append(starts), found.starts)
        return found

    monkeypatch.setattr(decoder, "find_cascade", find_and_tell)
    return seen


@pytest.mark.newest(reason="test_cascade has the passes, and what they add up to")
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_tokens_are_the_same(sizes, kv_dtype):
    got, want = served(True, kv_dtype), served(False, kv_dtype)
    shared = np.array([np.sum(starts > 0) for starts in sizes])
    assert shared.max() == 8  # two groups of four at once
    assert (shared == 0).any()
    for (prompt, params), ours, theirs in zip(REQUESTS, got, want):
        found = gap(tiny_model(), prompt, params, ours, theirs)
        assert found <= TIE, f"tokens part where the choices are {found:.3g} apart"
