"""An engine whose cache has 8 bits: the same tokens in every company, in less memory.

What a slot holds is rounded with a scale of its own, so that company, preemption and
sharing change as little as they do with floats.
"""

import functools

import numpy as np
import pytest
from engines import (
    all_tokens,
    assert_all_free,
    drawn,
    greedy,
    make_engine,
    poison,
    tiny_model,
)

from paged_jax import Field
from paged_jax.memory_plan import blocks_that_fit

PREFIX = [40, 41, 42, 43, 44, 45, 46, 47, 48, 49]  # no multiple of 4 or 16


def requests():
    """Prompts and parameters: greedy, drawn and of two sequences, some with PREFIX."""
    rng = np.random.default_rng(1)
    asked = []
    for i in range(8):
        prompt = rng.integers(3, 128, rng.integers(1, 25)).tolist()
        if i % 2:
            prompt = [*PREFIX, *prompt[: i + 3]]
        length = int(rng.integers(5, 34 - len(prompt)))
        params = greedy(length)
        if i % 4 == 2:
            params = drawn(length, seed=i, n=2, temperature=0.9)
        asked.append((prompt, params))
    return asked


REQUESTS = requests()
ENGINES = {
    "int8, recomputed": dict(kv_dtype="int8", preemption="recompute"),
    "int8, swapped, cached": dict(
        kv_dtype="int8", preemption="swap", prefix_caching=True
    ),
    "e4m3, blocks of 16, xla": dict(
        kv_dtype="float8_e4m3fn",
        block_size=16,
        num_blocks=6,
        attention_backend="xla",
    ),
}


@functools.cache
def alone(kv_dtype, backend="auto"):
    """The tokens of each request served alone, with memory to spare."""
    engine = make_engine(
        kv_dtype=kv_dtype, num_blocks=64, attention_backend=backend, max_n=2
    )
    return [all_tokens(engine.generate([p], params)[0]) for p, params in REQUESTS]


@pytest.mark.long
@pytest.mark.parametrize("name", ENGINES)
def test_company_preemption_and_sharing_change_nothing(name):
    settings = ENGINES[name]
    engine = make_engine(max_n=2, **settings)
    prefix = engine.register_prefix(PREFIX)
    prompts, params = zip(*REQUESTS)
    expected = alone(settings["kv_dtype"], engine.config.attention_backend)
    names = [engine.submit(p, ask) for p, ask in zip(prompts, params)]
    outputs = {}
    while engine.has_unfinished():
        poison(engine)
        outputs |= {output.request_id: output for output in engine.step(max_steps=1)}
    for asked, want in zip(names, expected):
        assert all_tokens(outputs[asked]) == want
        for completion in outputs[asked].outputs:
            assert np.isfinite(completion.cumulative_logprob)
    log = engine.log
    assert log[:, Field.PREEMPTED].sum() > 0, "the pool is too large to preempt"
    assert log[:, Field.COPIED_BLOCKS].sum() > 0
    assert log[:, Field.RUNNING].max() >= 2
    engine.release_prefix(prefix)
    assert_all_free(engine)


def test_the_plan_counts_the_scales_and_a_budget_holds_more_blocks():
    engine = make_engine(kv_dtype="int8")
    plan, model = engine.memory_plan, tiny_model().config
    assert plan.kv_cache == engine.state.cache.nbytes
    assert plan.block == 4 * model.kv_bytes_per_token("int8")
    vectors = 2 * model.num_layers * model.num_kv_heads
    assert model.kv_bytes_per_token("int8") == vectors * (model.head_dim + 4)

    def blocks(block):
        return blocks_that_fit(
            10**7, weights=plan.weights, activations=plan.activations, block=block
        )

    floats = 4 * model.kv_bytes_per_token()
    ratio = 4 * model.head_dim / (model.head_dim + 4)
    assert blocks(plan.block) == pytest.approx(ratio * blocks(floats), rel=0.01)
