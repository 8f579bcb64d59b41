"""The requests that all engines get."""

import numpy as np
import pytest

from experiments.engine_bench import workload
from experiments.engine_bench.models import Model
from experiments.engine_bench.random_llama import SHAPES
from experiments.engine_bench.workload import Request
from paged_jax import load_model

# From the same distributions and seed, computed apart from this code.
FIRST = [27469, 17732, 24453, 25911, 1955]
LAST = [28011, 23047, 9963]


def test_the_random_requests_are_known():
    requests = workload.random_requests(SHAPES["small"].vocab_size)
    prompts = [len(request.prompt) for request in requests]
    outputs = [request.max_tokens for request in requests]
    assert (len(requests), sum(prompts), sum(outputs)) == (64, 4132, 6276)
    assert max(np.add(prompts, outputs)) == 301
    assert requests[0].prompt[:5] == FIRST
    assert requests[0].max_tokens == 98
    assert requests[63].prompt[-3:] == LAST


def test_lengths_do_not_depend_on_the_vocabulary():
    few, many = (workload.random_requests(size) for size in (4096, 32000))
    for one, other in zip(few, many, strict=True):
        assert len(one.prompt) == len(other.prompt)
        assert one.max_tokens == other.max_tokens
        assert 3 <= min(one.prompt) and max(one.prompt) < 4096


def test_more_than_the_budget_holds_is_asked_at_once():
    requests = workload.random_requests(32000)
    assert sum(len(r.prompt) + r.max_tokens for r in requests) > 2 * workload.KV_TOKENS
    assert len(requests) <= workload.MAX_SEQS


@pytest.mark.parametrize(
    "tokens, expected",
    [
        ([4, 5, 6], 3),  # no end
        ([4, 2, 6], 1),
        ([4, 5, 2], 2),
        ([4, 1, 2], 1),  # the earliest of several
        ([2, 5, 6], 3),  # nothing but an end: something is asked for all the same
        ([2, 5, 1], 2),
    ],
)
def test_outputs_stop_short_of_the_end_of_a_text(tokens, expected):
    request = Request([9, 9], 3)
    (kept,) = workload.end_before([request], [tokens], (1, 2))
    assert kept == Request([9, 9], expected)


def test_the_digest_tells_workloads_apart():
    requests = workload.random_requests(4096, 3)
    assert workload.digest(requests) == workload.digest(list(requests))
    longer = [*requests[:2], requests[2]._replace(max_tokens=1)]
    assert workload.digest(requests) != workload.digest(longer)


def test_real_requests_are_the_projects_own_prompts():
    model = Model("smollm2")
    requests = model.requests(8)
    assert requests == model.requests(8)
    tokenizer = load_model("smollm2-135m").tokenizer
    for request in requests:
        assert "<|im_start|>user" in tokenizer.decode(
            request.prompt, skip_special_tokens=False
        )
        assert len(request.prompt) + request.max_tokens <= workload.MAX_MODEL_LEN
    assert model.stop_ids() == tokenizer.eos_token_ids
    assert Model("small").stop_ids() == ()
