"""Simulated beams share and part as those of the real engine do."""

import re

import numpy as np
import pytest
from engines import make_engine

from experiments.errors import UserError
from experiments.simulator.beams import Searches, draw_searches, recorded_parents
from experiments.simulator.evaluate import draw_trace, evaluate
from experiments.simulator.run import make_program, simulate
from experiments.simulator.systems import MAX_MODEL_LEN
from experiments.simulator.trace import Trace, pieces
from paged_jax import EngineConfig, SamplingParams
from paged_jax.step_log import Field

WIDTH = 3
ONE = np.ones(1, int)


def unit(work):
    """A step takes a second."""
    del work
    return 1.0


def small(**changes):
    settings = dict(
        block_size=4,
        num_blocks=24,
        max_model_len=64,
        max_seqs=6,
        max_requests=64,
        max_prefixes=0,
        max_beam_width=WIDTH,
        token_budget=16,
        watermark=0.05,
        spare_blocks=0,
    )
    return EngineConfig(**(settings | changes))


def make_trace(count, seed=0, longest=20, rate=None, search=None):
    rng = np.random.default_rng(seed)
    arrival = np.zeros(count)
    if rate:
        arrival = np.cumsum(rng.exponential(1 / rate, count))
    prompts, outputs = rng.integers(1, longest, (2, count))
    outputs = np.repeat(outputs[:, None], WIDTH, axis=1)
    search = np.zeros(count, np.int64) if search is None else search
    return Trace(arrival, prompts, outputs, search=search)


def repeat(trace, search):
    return Trace(trace.arrival, trace.prompt_len, trace.output_len, search=search)


def run(config, trace, recorded):
    program = make_program(config, unit, log_length=2048)
    return simulate(config, trace, program, recorded=recorded)


def filled(recorded):
    """Adds searches that nobody repeats: arrays of equal shapes compile once."""
    return [*recorded, *[ancestry(40)] * (8 - len(recorded))]


def assert_same_logs(found, expected, but=()):
    assert len(found) == len(expected)
    for field in Field:
        if field not in but:
            np.testing.assert_array_equal(
                found[:, field], expected[:, field], err_msg=field.name
            )


def ancestry(count, width=WIDTH, seed=0):
    """Parents at random, the better beams more often."""
    rng = np.random.default_rng(seed)
    parents = np.minimum(rng.geometric(0.6, (count, width)) - 1, width - 1)
    parents[0] = 0
    return parents.astype(np.int8)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"num_blocks": 22}, id="swap"),
        pytest.param(
            {"num_blocks": 22, "preemption": "recompute"},
            id="recompute",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"batching": "static", "num_blocks": 22},
            id="static",
            marks=pytest.mark.long,
        ),
    ],
)
def test_its_batches_are_the_engines(changes):
    engine = make_engine(
        max_prefixes=0,
        max_requests=24,
        max_seqs=9,
        max_beam_width=WIDTH,
        steps_per_sync_offline=512,
        **changes,
    )
    trace = make_trace(8, search=np.arange(8))
    rng = np.random.default_rng(7)
    names, outputs = [], {}
    for prompt, output in zip(trace.prompt_len, trace.output_len[:, 0], strict=True):
        params = SamplingParams(
            max_tokens=int(output), beam_width=WIDTH, n=WIDTH, ignore_eos=True
        )
        tokens = rng.integers(3, 128, int(prompt)).tolist()
        names.append(engine.submit(tokens, params))
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step(512)}
    recorded = [
        np.array(outputs[name].beam_parents, np.int8).reshape(-1, WIDTH)
        for name in names
    ]
    assert sum((parents[1:] != np.arange(WIDTH)).any() for parents in recorded) > 3
    expected = engine.stats.log
    if "batching" not in changes:
        assert expected[:, Field.PREEMPTED].sum() > 0
        swapped = expected[:, Field.SWAPPED_OUT_BLOCKS].sum()
        assert (swapped > 0) == ("preemption" not in changes)
        assert expected[:, Field.COPIED_BLOCKS].sum() > 0
    assert_same_logs(run(engine.config, trace, recorded).log, expected)


def test_beams_that_continue_themselves_are_sequences():
    trace = make_trace(8)
    alone = np.array([[0] * WIDTH, range(WIDTH)], np.int8)
    beams = run(small(), trace, filled([alone]))
    config = small(max_n=WIDTH, max_beam_width=1)
    sequences = run(config, repeat(trace, None), None)
    assert_same_logs(beams.log, sequences.log)
    np.testing.assert_array_equal(beams.ended, sequences.ended)
    np.testing.assert_array_equal(beams.first_token, sequences.first_token)


def test_beams_of_one_parent_share_all_whole_blocks():
    trace = Trace(0 * ONE, 6 * ONE, np.full((1, WIDTH), 30), search=0 * ONE)
    log = run(small(), trace, filled([np.zeros((2, WIDTH), np.int8)])).log
    # Copied by all but one, freed with the next choice.
    decoding = log[(log[:, Field.SAMPLED] == WIDTH) & (log[:, Field.TOKENS] == WIDTH)]
    length = np.arange(7, 7 + len(decoding))
    assert len(decoding) == 29
    np.testing.assert_array_equal(
        decoding[:, Field.PHYSICAL_BLOCKS], (length - 1) // 4 + WIDTH
    )
    np.testing.assert_array_equal(
        decoding[:, Field.LOGICAL_BLOCKS], WIDTH * -(-length // 4)
    )
    copied = np.where(length % 4 == 1, 0, WIDTH - 1)
    np.testing.assert_array_equal(decoding[:, Field.COPIED_BLOCKS], copied)


def test_beyond_what_is_recorded_it_goes_round_without_the_first_step():
    trace = make_trace(6, seed=4)
    short = ancestry(6)
    unrolled = np.concatenate([short[:1]] + [short[1:]] * 6)
    assert_same_logs(
        run(small(), trace, filled([short])).log,
        run(small(), trace, filled([unrolled])).log,
    )


def test_each_request_repeats_its_own_search():
    recorded = filled([ancestry(20, seed=seed) for seed in range(4)])
    search = np.array([3, 1, 1, 0, 2, 3])
    trace = make_trace(6, seed=4, search=search)
    renamed = filled([recorded[i] for i in search])
    assert_same_logs(
        run(small(), trace, recorded).log,
        run(small(), repeat(trace, np.arange(6)), renamed).log,
    )
    other = run(small(), repeat(trace, search[::-1]), recorded)
    assert (
        other.log[:, Field.PHYSICAL_BLOCKS].tolist()
        != run(small(), trace, recorded).log[:, Field.PHYSICAL_BLOCKS].tolist()
    )


def test_a_ring_of_slots_gives_what_one_run_gives():
    recorded = filled([ancestry(20, seed=seed) for seed in range(3)])
    trace = make_trace(21, seed=5, rate=0.1, search=np.arange(21) % 3)
    whole = run(small(), trace, recorded)
    streamed = run(small(max_requests=36), pieces(trace, 7), recorded)
    np.testing.assert_array_equal(streamed.ended, whole.ended)
    np.testing.assert_array_equal(streamed.first_token, whole.first_token)
    assert_same_logs(streamed.log, whole.log)


def test_without_sharing_each_beam_has_a_chunk():
    trace = make_trace(8)
    found = run(small(memory="pow2", num_blocks=64), trace, [ancestry(9)])
    log = found.log
    np.testing.assert_array_equal(
        log[:, Field.LOGICAL_BLOCKS], log[:, Field.PHYSICAL_BLOCKS]
    )
    assert not (log[:, Field.RUNNING] % WIDTH).any()
    assert log[:, Field.COPIED_BLOCKS].sum() == log[:, Field.PREEMPTED].sum() == 0
    # Each beam computes the prompt, and each token once: nothing is computed again.
    tokens = WIDTH * (trace.prompt_len + trace.output_len[:, 0] - 1)
    assert log[:, Field.TOKENS].sum() == tokens.sum()
    assert found.rejected == 0 and np.isfinite(found.ended).all()


def test_how_wide_its_tables_are_changes_nothing():
    trace = draw_trace("alpaca", 10.0, 6.0, 0, beam_width=WIDTH - 1)
    narrow = evaluate("vllm", "opt-13b", trace)
    wide = evaluate("vllm", "opt-13b", trace, max_model_len=MAX_MODEL_LEN)
    np.testing.assert_array_equal(narrow.ended, wide.ended)
    assert narrow.means == wide.means and narrow.steps == wide.steps
    assert 0 < narrow.means["kv_utilization"] < 1


@pytest.mark.parametrize(
    "system, longest, width",
    [
        ("vllm", MAX_MODEL_LEN // 2, MAX_MODEL_LEN // 2),
        ("vllm", MAX_MODEL_LEN // 2 + 1, MAX_MODEL_LEN),
        ("orca_max", 40, MAX_MODEL_LEN),
    ],
)
def test_tables_are_narrow_where_that_reserves_nothing(system, longest, width):
    class Seen(Exception):
        """Nothing needs to be run."""

    def see(program):
        assert program.config.max_model_len == width
        raise Seen

    outputs = np.full((1, 2), longest - 10)
    trace = Trace(np.zeros(1), np.array([10]), outputs, search=np.zeros(1, np.int64))
    with pytest.raises(Seen):
        evaluate(system, "opt-13b", trace, change=see)


def test_each_recorded_step_is_as_likely():
    recorded = [ancestry(1), ancestry(11), ancestry(31), np.zeros((0, WIDTH), np.int8)]
    drawn = draw_searches(np.random.default_rng(0), 4000, recorded)
    shares = np.bincount(drawn, minlength=4) / 4000
    np.testing.assert_allclose(shares, [0, 0.25, 0.75, 0], atol=0.03)


def test_a_trace_repeats_its_draw():
    a, b, c = (
        draw_trace("alpaca", 5.0, 20.0, seed, beam_width=4) for seed in (1, 1, 2)
    )
    assert a.beam_width == a.n == 4
    np.testing.assert_array_equal(a.search, b.search)
    assert (a.search != c.search).any()
    # The same requests as without beams.
    one = draw_trace("alpaca", 5.0, 20.0, 1)
    np.testing.assert_array_equal(a.prompt_len, one.prompt_len)
    np.testing.assert_array_equal(a.output_len[:, :1], one.output_len)


@pytest.mark.parametrize("width", [2, 4, 6])
def test_what_is_recorded_begins_with_the_prompt(width):
    recorded = recorded_parents(width)
    assert len(recorded) >= 20
    ancestry = Searches(width).on_device(1)
    assert ancestry.parents.shape[2] == width and (ancestry.steps >= 2).all()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: run(small(), make_trace(2), None), "one of 2, 4, 6"),
        (
            lambda: run(small(), repeat(make_trace(2), None), [ancestry(3)]),
            "beam width 1, and engine.max_beam_width is 3",
        ),
        (
            lambda: run(small(max_beam_width=1, max_n=3), make_trace(2), None),
            "beam width 3, and engine.max_beam_width is 1",
        ),
        (
            lambda: run(
                small(),
                Trace(ONE, ONE, np.array([[1, 2, 3]]), search=0 * ONE),
                [ancestry(3)],
            ),
            "the same output_len",
        ),
        (lambda: run(small(), make_trace(2), [ancestry(3, 4)]), "(steps, 3)"),
        (
            lambda: run(small(), make_trace(2), [ancestry(3) + np.int8(1)]),
            "from 0 to 2",
        ),
        (
            lambda: run(small(), make_trace(2, search=np.array([0, 1])), [ancestry(3)]),
            "repeats search 1, and 1 are",
        ),
        (lambda: draw_trace("alpaca", 1.0, 9.0, 0, 2, 2), "n is 2 and beam_width 2"),
        (lambda: draw_trace("alpaca", 1.0, 9.0, 0, 1, 5), "beam width 5"),
    ],
)
def test_what_cannot_be_repeated_is_said(call, message):
    with pytest.raises(UserError, match=re.escape(message)):
        call()
