"""The simulator takes the engine's steps, and its clock is right."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from engines import greedy, make_engine
from simulations import UNIT, PerToken, draw_trace, small

from experiments.errors import UserError
from experiments.simulator import run as simulator_run
from experiments.simulator.plain import simulate_plain
from experiments.simulator.run import make_program, simulate
from experiments.simulator.trace import Trace, pieces
from paged_jax import SamplingParams
from paged_jax.step_log import Field


def make_trace(count, n=1, seed=0, longest=20, rate=None):
    rng = np.random.default_rng(seed)
    arrival = np.zeros(count)
    if rate:
        arrival = np.cumsum(rng.exponential(1 / rate, count))
    return Trace(
        arrival,
        rng.integers(1, longest, count),
        rng.integers(1, longest, (count, n)),
    )


def run(config, trace, costs=UNIT, window=None, **changes):
    program = make_program(config, costs, **changes)
    window = {} if window is None else {"window": window}
    return simulate(config, trace, program, **window)


def batch_of(scheduler):
    """Returns which request each row has, as what, and when what happened to each."""
    sequences = scheduler.sequences
    return {
        "request": np.array(sequences.request),
        "status": np.array(sequences.status),
        "timeline": np.array(scheduler.requests.timeline),
    }


def keep_batches(monkeypatch):
    """Makes the simulator stop after each step; returns the batches, as they come."""
    run_steps, kept = simulator_run._run, []

    def take_step(program, state, max_steps, *rest):
        before = int(state.scheduler.iteration)
        state = run_steps(program, state, jnp.minimum(max_steps, 1), *rest)
        if int(state.scheduler.iteration) > before:
            kept.append(batch_of(state.scheduler))
        return state

    monkeypatch.setattr(simulator_run, "_run", take_step)
    return kept


@pytest.mark.parametrize(
    "changes, n",
    [
        ({}, 1),
        ({"chunked_prefill": False, "token_budget": 48}, 1),
        ({"preemption": "swap", "token_budget": 6}, 1),
        ({"memory": "pow2"}, 1),
        ({"batching": "static"}, 1),
        ({"max_n": 3, "num_blocks": 30}, 3),
    ],
    ids=["paged", "unchunked", "swap", "pow2", "static", "several"],
)
def test_its_batches_are_the_engines(changes, n, monkeypatch):
    # As in test_registered_prefix, so that programs are shared; nothing is registered.
    engine = make_engine(
        max_prefixes=1, max_requests=24, steps_per_sync_offline=512, **changes
    )
    # Room for the longest; 20 blocks of 4 for 4 sequences, so that blocks run out.
    trace = make_trace(8, n, longest=30)
    trace.output_len[:] = trace.output_len[:, :1]
    for prompt, output in zip(trace.prompt_len, trace.output_len[:, 0], strict=True):
        params = greedy(int(output))
        if n > 1:
            params = SamplingParams(
                max_tokens=int(output), n=n, temperature=1.0, ignore_eos=True
            )
        engine.submit([3] * int(prompt), params)
    batches = []
    while engine.has_unfinished():
        engine.step(1)
        batches.append(batch_of(engine.state.scheduler))
    simulated = keep_batches(monkeypatch)
    found = run(engine.config, trace, log_length=2048).log
    # Which request is in which row, and when each was admitted, answered and ended.
    assert len(simulated) == len(batches) > 20
    for step, (ours, theirs) in enumerate(zip(simulated, batches, strict=True)):
        for name, of_engine in theirs.items():
            np.testing.assert_array_equal(ours[name], of_engine, f"{name}, {step}")
    expected = engine.stats.log
    assert len(found) == len(expected)
    for field in Field:
        np.testing.assert_array_equal(
            found[:, field], expected[:, field], err_msg=field.name
        )
    if n == 1 and changes.get("batching") != "static" and "memory" not in changes:
        assert expected[:, Field.PREEMPTED].sum() > 0


def test_a_lone_request_takes_a_step_for_each_token():
    trace = Trace(np.array([2.5]), np.array([40]), np.array([[5]]))
    found = run(small(), trace)
    # 40 tokens of 16 a step: three steps, of which the third gives the first token.
    assert found.first_token[0] == 2.5 + 3
    assert found.ended[0] == 2.5 + 3 + 4
    assert found.steps >= 7 and found.rejected == 0


def test_nothing_runs_before_it_arrives():
    trace = make_trace(60, seed=3, rate=0.5)
    found = run(small(), trace)
    assert (found.first_token >= trace.arrival + 0.99999).all()
    assert (found.ended >= trace.arrival + trace.output_len[:, 0] - 1e-5).all()
    assert (found.ended - found.first_token >= trace.output_len[:, 0] - 1.00001).all()


@pytest.mark.parametrize(
    "n, slots, load",
    [(1, 18, 0.3), (1, 33, 0.3), (1, 18, 3.0), (3, 48, 0.3), (3, 18, 3)],
)
def test_a_ring_of_slots_gives_what_one_run_gives(n, slots, load):
    # Sequences that end together need no more slots than twice what can run.
    draw = draw_trace if slots < 20 else make_trace
    trace = draw(200 // n, n, seed=5, rate=load / n)
    whole = run(small(max_requests=201, max_n=n), trace)
    config = small(max_requests=slots, max_n=n)
    streamed = run(config, pieces(trace, 7))
    for name in ("first_token", "ended", "output_len"):
        np.testing.assert_array_equal(getattr(streamed, name), getattr(whole, name))
    assert streamed.steps == whole.steps
    overloaded = load > 1
    for name, value in whole.means.items():
        if name == "mean_waiting" and overloaded:
            assert streamed.means[name] < value  # those without slots are left out
            continue
        assert streamed.means[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name


def test_sharing_saves_blocks_and_preemptions():
    trace = make_trace(40, 4, seed=2, rate=1.0)
    shared = run(small(max_n=4, max_requests=200), trace)
    apart = run(small(max_n=4, max_requests=200, sharing=False), trace)
    assert shared.means["block_saving"] > 0.1 > apart.means["block_saving"]
    assert shared.means["preemptions"] < apart.means["preemptions"]


def test_a_static_batch_can_come_back_as_one():
    config = small(batching="static", memory="max", num_blocks=48)
    trace = make_trace(12, seed=1)
    alone = run(config, trace)
    together = run(config, trace, together=True)
    assert len(set(together.ended)) == together.steps - alone.steps + len(
        set(together.ended)
    )
    assert len(set(together.ended)) < len(set(alone.ended))
    # Each batch is over when its longest is.
    for moment in set(together.ended):
        members = together.ended == moment
        assert alone.ended[members].max() == moment


def test_only_the_window_counts():
    trace = make_trace(60, seed=3, rate=0.5)
    whole = run(small(), trace)
    part = run(small(), trace, window=(20, 60))
    assert part.means["steps"] < whole.means["steps"]
    assert part.seconds == whole.seconds
    assert 0 < part.means["mean_running"] <= 6


@pytest.mark.parametrize("prompt, rejected", [(40, 1), (32, 0)])
def test_what_never_fits_is_rejected(prompt, rejected):
    # Three sequences take the prompt's blocks of 4, and one each: 13 or 11 of 12.
    trace = Trace(np.zeros(2), np.array([prompt, 4]), np.full((2, 3), 4))
    found = run(small(num_blocks=12, max_n=3), trace)
    assert found.rejected == rejected
    assert np.isnan(found.ended).tolist() == [bool(rejected), False]
    assert found.latencies.count == 2 - rejected


@pytest.mark.parametrize(
    "trace, changes, message",
    [
        (Trace(np.zeros(1), np.array([40]), np.array([[9]])), {}, "has 49 tokens"),
        (make_trace(40, rate=9.0), {"max_requests": 8}, "max_requests is 8"),
        (
            Trace(np.array([1.0, 0.5]), np.array([4, 4]), np.array([[1], [1]])),
            {},
            "in order of arrival",
        ),
    ],
)
def test_what_cannot_be_served_is_said(trace, changes, message):
    with pytest.raises(UserError, match=message):
        run(small(**changes), trace)


@functools.cache
def _busy():
    return run(small(), make_trace(50, seed=9))


def test_shares_of_the_pool_sum_up():
    means = _busy().means
    parts = [v for name, v in means.items() if name.startswith("kv_breakdown.")]
    assert sum(parts) == pytest.approx(1)
    assert 0 < means["kv_utilization"] <= 1


@pytest.mark.parametrize(
    "changes", [{}, {"chunked_prefill": False}, {"spare_blocks": 1}]
)
@pytest.mark.parametrize("rate", [0.2, 2.0])
def test_a_simulation_in_plain_python_gives_the_same(changes, rate):
    trace = make_trace(150, seed=11, rate=rate)
    config = small(token_budget=24, max_requests=160, preemption="recompute", **changes)
    costs = PerToken(0.5, 0.125)
    program = make_program(config, costs)
    found = simulate(config, trace, program)
    first, ended, steps = simulate_plain(
        program.config, trace, lambda tokens, rows: 0.5 + 0.125 * tokens
    )
    np.testing.assert_allclose(found.first_token, first, atol=1e-3)
    np.testing.assert_allclose(found.ended, ended, atol=1e-3)
    assert found.steps == steps
    if rate == 2.0:
        assert found.means["preemptions"] > 0
