"""The bound of a workload, against sums token by token."""

import math

import pytest

from experiments.engine_bench import bound
from experiments.engine_bench.random_llama import SHAPES
from experiments.engine_bench.workload import KV_TOKENS, Request
from experiments.machine_speed import Speed

CONFIG = SHAPES["tiny"]
FAST = 1e30


def flops_of(request):
    """Adds up what a sequence needs, one token after the other."""
    q, kv = CONFIG.num_heads * CONFIG.head_dim, CONFIG.num_kv_heads * CONFIG.head_dim
    hidden, inner = CONFIG.hidden_size, CONFIG.intermediate_size
    weights = 2 * hidden * q + 2 * hidden * kv + 3 * hidden * inner
    total = 0
    for position in range(len(request.prompt) + request.max_tokens - 1):
        total += CONFIG.num_layers * (2 * weights + 4 * q * (position + 1))
        if position >= len(request.prompt) - 1:  # a token is sampled there
            total += 2 * hidden * CONFIG.vocab_size
    return total


REQUESTS = [Request([1] * 5, 3), Request([1], 1), Request([1, 2], 40)]


def test_all_arithmetic_counts():
    seconds = bound.least_seconds(CONFIG, REQUESTS, Speed(bandwidth=FAST, flops=1e9))
    assert seconds * 1e9 == pytest.approx(sum(map(flops_of, REQUESTS)))


def weights_read(requests):
    """Returns how many times all weights are read, when that bounds."""
    speed = Speed(bandwidth=1.0, flops=FAST)
    one = bound.least_seconds(CONFIG, [Request([1], 1)], speed)
    return bound.least_seconds(CONFIG, requests, speed) / one


def test_the_longest_request_takes_as_many_steps_as_it_has_tokens():
    assert weights_read(REQUESTS) == pytest.approx(40)


def test_the_budget_bounds_how_many_run_at_once():
    requests = [Request([1] * 100, 50)] * 200
    held = sum(len(r.prompt) + i for r in requests for i in range(r.max_tokens))
    assert weights_read(requests) == pytest.approx(math.ceil(held / KV_TOKENS))


def test_the_machine_is_measured_on_as_many_cores_as_asked():
    speed = bound.measure(1)
    assert speed.flops > 1e9 and speed.bandwidth > 1e8
