"""A registered prefix is shared as the engine shares it, and costs no time."""

import numpy as np
import pytest
from engines import drawn, greedy, make_engine
from simulations import assert_same_log, draw_trace, run, small

from experiments.errors import UserError
from experiments.simulator.trace import Trace
from paged_jax.step_log import Field

PREFIX = 10  # of which two blocks of 4 are shared


@pytest.mark.parametrize(
    "changes, n",
    [
        pytest.param({}, 1, id="recompute"),
        pytest.param(
            {"preemption": "swap", "token_budget": 6},
            1,
            id="swap",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"max_n": 3, "num_blocks": 30}, 3, id="several", marks=pytest.mark.long
        ),
    ],
)
def test_its_batches_are_the_engines(changes, n):
    engine = make_engine(
        max_prefixes=1,
        max_requests=24,
        steps_per_sync_offline=512,
        **{"num_blocks": 20, **changes},
    )
    engine.register_prefix([5] * 8)
    trace = draw_trace(8, n, longest=30)
    trace.prompt_len[:] += PREFIX
    trace.output_len[:] = np.minimum(trace.output_len, 20)
    for prompt, output in zip(trace.prompt_len, trace.output_len[:, 0], strict=True):
        params = greedy(int(output)) if n == 1 else drawn(int(output), n=n)
        engine.submit([5] * PREFIX + [3] * int(prompt - PREFIX), params)
    while engine.has_unfinished():
        engine.step(512)
    found = run(engine.config, trace, log_length=2048, prefix_len=PREFIX)
    assert_same_log(found.log, engine.stats.log)
    assert found.means["block_saving"] > 0.1
    if n == 1:
        assert found.log[:, Field.PREEMPTED].sum() > 0


def test_the_clock_starts_when_the_prefix_is_there():
    trace = Trace(np.array([2.5]), np.array([40]), np.array([[5]]))
    config = small(max_prefixes=1)
    found = run(config, trace, prefix_len=33)
    # Of 40 tokens 32 are there: a step instead of three.
    assert found.first_token[0] == 2.5 + 1 and found.ended[0] == 2.5 + 1 + 4
    assert found.means["steps"] == 5
    # Less than a block is nothing to share.
    assert run(config, trace, prefix_len=3).first_token[0] == 2.5 + 3


def test_a_prefix_keeps_room_for_more_requests():
    trace = draw_trace(30, seed=4, longest=16)
    trace.prompt_len[:] += 16
    config = small(max_prefixes=1, max_seqs=12)
    apart, shared = run(config, trace), run(config, trace, prefix_len=16)
    assert shared.means["mean_running"] > 1.3 * apart.means["mean_running"]
    assert shared.seconds < apart.seconds


@pytest.mark.parametrize(
    "changes, prefix_len, message",
    [
        ({}, 8, "engine.max_prefixes is 0"),
        ({"max_prefixes": 1, "memory": "max"}, 8, "it needs 1 or more"),
        ({"max_prefixes": 1, "prefix_caching": True}, 8, "choose one way to share"),
        ({"max_prefixes": 1}, 48, "less than engine.max_model_len 48"),
        ({"max_prefixes": 1}, -4, "prefix_len is -4"),
        ({"max_prefixes": 1}, 12, "request 1 of the trace has a prompt of 11 tokens"),
    ],
)
def test_what_cannot_be_shared_is_refused(changes, prefix_len, message):
    trace = Trace(np.zeros(2), np.array([12, 11]), np.array([[3], [3]]))
    with pytest.raises(UserError, match=message):
        run(small(num_blocks=32, **changes), trace, prefix_len=prefix_len)
