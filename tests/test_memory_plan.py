"""The memory plan, in numbers and as a table."""

import dataclasses

import pytest
from engines import make_engine, tiny_model

from paged_jax import MemoryPlan, blocks_that_fit

# SOSP'23, section 3: 1000 blocks of 16 tokens, sequences of up to 2048.
PLAN = MemoryPlan(
    weights=26 * 2**30,
    activations=3 * 2**30,
    block=16 * 800 * 1024,
    num_blocks=1000,
    block_size=16,
    max_model_len=2048,
)


def test_a_thousand_blocks_hold_seven_full_length_requests():
    assert PLAN.blocks_per_request == 128
    assert PLAN.full_length_requests == 7


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "each", "requests"),
    [
        (128, 2048, 128, 1),
        (127, 2048, 128, 0),
        (1000, 2049, 129, 7),
        (1000, 1, 1, 1000),
    ],
)
def test_requests_take_whole_blocks(num_blocks, max_model_len, each, requests):
    plan = dataclasses.replace(PLAN, num_blocks=num_blocks, max_model_len=max_model_len)
    assert (plan.blocks_per_request, plan.full_length_requests) == (each, requests)


def test_the_null_block_takes_memory_too():
    assert PLAN.kv_cache == 1001 * PLAN.block
    assert PLAN.total == PLAN.weights + PLAN.activations + PLAN.kv_cache


@pytest.mark.parametrize("num_blocks", [1, 2, 999, 1000])
def test_a_budget_of_the_total_fits_its_own_blocks(num_blocks):
    plan = dataclasses.replace(PLAN, num_blocks=num_blocks)
    parts = dict(weights=plan.weights, activations=plan.activations, block=plan.block)
    assert blocks_that_fit(plan.total, **parts) == num_blocks
    assert blocks_that_fit(plan.total - 1, **parts) == num_blocks - 1
    assert blocks_that_fit(plan.total + plan.block, **parts) == num_blocks + 1


def test_no_blocks_fit_in_too_little():
    for budget in (0, 5, 10, 11):
        assert blocks_that_fit(budget, weights=6, activations=4, block=1) == 0
    assert blocks_that_fit(12, weights=6, activations=4, block=1) == 1


def test_the_table():
    assert PLAN.as_rows() == [
        ("weights", "26624.0 MiB", "63.1%"),
        ("activations", "3072.0 MiB", "7.3%"),
        ("KV cache", "12512.5 MiB", "29.6%"),
        ("KV blocks", "1000", "16 tokens, 12800 KiB each"),
        ("KV slots", "16000", "819200 bytes a token"),
        ("full-length requests", "7", "2048 tokens take 128 blocks"),
    ]


def test_the_table_names_the_hosts_blocks_if_there_are_any():
    plan = dataclasses.replace(PLAN, host_blocks=99)
    assert plan.as_rows() == [
        *PLAN.as_rows(),
        ("swap space", "1250.0 MiB", "99 host blocks"),
    ]
    assert plan.total == PLAN.total


def test_the_plan_of_an_engine_is_what_it_has():
    engine = make_engine()
    plan, model = engine.memory_plan, tiny_model()
    assert plan.weights == 4 * model.config.num_params
    assert plan.kv_cache == engine.state.cache.nbytes
    assert plan.block == 4 * model.config.kv_bytes_per_token()
    assert plan.activations > 0
    assert (plan.num_blocks, plan.full_length_requests) == (20, 1)
    assert engine.compile_seconds > 0
