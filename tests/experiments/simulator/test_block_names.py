"""The prefix cache, driven by names that a trace has for its blocks."""

import functools
import json

import jax
import numpy as np
import pytest
from engines import drawn, greedy, make_engine
from program_text import IN_PLACE, operations_on
from simulations import UNIT, assert_same_log, draw_trace, run, small

from experiments.errors import UserError
from experiments.simulator import run as run_module
from experiments.simulator.block_names import UNNAMED, PieceNames
from experiments.simulator.cache_bound import infinite_cache
from experiments.simulator.readers import Malformed, read_trace
from experiments.simulator.recorded import longest, to_traces
from experiments.simulator.run import init_simulator, make_program
from experiments.simulator.trace import Trace, pieces
from paged_jax.step_log import Field

PIECE = 8


def draw_named(count, seed=0, most_pieces=4, alphabet=2, gap=0.0):
    """Returns requests whose prompts begin alike, and end with tokens of their own."""
    rng = np.random.default_rng(seed)
    ids = np.full((count, most_pieces), UNNAMED, np.int32)
    prompt_len = np.zeros(count, np.int64)
    for row, names in enumerate(ids):
        depth = rng.integers(0, most_pieces + 1)
        names[:depth] = rng.integers(0, alphabet, depth)
        prompt_len[row] = depth * PIECE + rng.integers(1, PIECE)
    outputs = rng.integers(1, 20, (count, 1))
    arrival = np.arange(count) * gap
    return Trace(arrival, prompt_len, outputs, names=PieceNames(ids, PIECE))


def cached(**changes):
    """Returns settings with a prefix cache, and room for the longest request."""
    return small(prefix_caching=True, **{"max_model_len": 60, **changes})


def prompt_of(trace, row):
    """Returns tokens that are equal where the names are, and else differ."""
    length = int(trace.prompt_len[row])
    named = [3 + name for name in trace.names.ids[row] if name != UNNAMED]
    tokens = [token for token in named for _ in range(PIECE)]
    return tokens + [60 + row] * (length - len(tokens))


@pytest.mark.parametrize(
    "changes, n",
    [
        pytest.param({}, 1, id="recompute"),
        pytest.param(
            {"chunked_prefill": False, "token_budget": 64, "block_size": 2},
            1,
            id="unchunked",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"preemption": "swap", "token_budget": 6},
            1,
            id="swap",
            marks=pytest.mark.long,
        ),
        pytest.param({"max_n": 2}, 2, id="several", marks=pytest.mark.long),
    ],
)
def test_its_batches_are_the_engines(changes, n):
    blocks = 80 // changes.get("block_size", 4)
    engine = make_engine(
        max_prefixes=0,
        max_requests=24,
        num_blocks=blocks + 2,
        prefix_caching=True,
        steps_per_sync_offline=512,
        **changes,
    )
    trace = draw_named(12)
    outputs = np.repeat(trace.output_len, n, axis=1)
    trace = Trace(trace.arrival, trace.prompt_len, outputs, names=trace.names)
    for row in range(len(trace)):
        length = int(trace.output_len[row, 0])
        # So hot that no two sequences draw the same tokens: the engine would find their
        # blocks alike, and names tell them apart.
        params = greedy(length) if n == 1 else drawn(length, n=n, temperature=1e3)
        engine.submit(prompt_of(trace, row), params)
    while engine.has_unfinished():
        engine.step(512)
    found = run(engine.config, trace, log_length=2048)
    assert_same_log(found.log, engine.stats.log)
    for field in (Field.HIT_TOKENS, Field.EVICTED_BLOCKS, Field.PREEMPTED):
        assert n > 1 or found.log[:, field].sum() > 0, field.name


def test_all_is_found_that_was_computed_before_if_nothing_is_evicted():
    trace = draw_named(60, alphabet=3, gap=100.0)
    config = cached(num_blocks=4000)
    found = run(config, trace)
    bound = infinite_cache(pieces(trace, 7), 4)
    assert found.means["evicted_blocks"] == 0
    assert 0.2 < bound.ratio < 0.9
    assert found.means["prefix_hit_ratio"] == pytest.approx(bound.ratio, rel=1e-6)


def test_less_is_found_in_less_memory():
    trace = draw_named(60, alphabet=3, gap=100.0)
    found = run(cached(), trace)
    assert found.means["evicted_blocks"] > 50
    ratio = infinite_cache(trace, 4).ratio
    assert 0.1 * ratio < found.means["prefix_hit_ratio"] < 0.9 * ratio


def test_a_ring_of_slots_gives_what_one_run_gives():
    trace = draw_named(90, seed=3, gap=3.0)
    whole = run(cached(max_requests=128), trace)
    streamed = run(cached(max_requests=20), pieces(trace, 7))
    for name in ("first_token", "ended", "output_len"):
        np.testing.assert_array_equal(getattr(streamed, name), getattr(whole, name))
    for name, value in whole.means.items():
        assert streamed.means[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
    assert whole.means["prefix_hit_ratio"] > 0.1


@pytest.mark.parametrize("block_size", [1, 4, 8])
@pytest.mark.parametrize("seed", range(5))
def test_the_bound_is_what_a_set_of_texts_says(block_size, seed):
    trace = draw_named(40, seed)
    known, found = set(), 0
    for row in range(len(trace)):
        text = tuple(prompt_of(trace, row))
        for end in range(block_size, len(text), block_size):
            if text[:end] not in known:
                break
            found += block_size
        known |= {text[:end] for end in range(1, len(text) + 1)}
    bound = infinite_cache(pieces(trace, 9), block_size)
    assert (bound.found, bound.asked) == (found, trace.prompt_len.sum())


def copied(text, shape):
    return "copy" in operations_on(text, ",".join(map(str, shape)))


def test_names_are_changed_in_place():
    config = cached(max_requests=61, num_blocks=83)
    program = make_program(config, UNIT)
    state = init_simulator(config, program, (0, 1))
    names = state.scheduler.requests.tokens
    assert names.shape == (62, 15), "one for each block"
    lowered = run_module._run.lower(
        program, state, np.int32(1), np.bool_(True), np.int32(1)
    )
    text = lowered.compile().as_text()
    assert operations_on(text, "62,15") <= IN_PLACE
    for leaf in jax.tree.leaves(state.scheduler.pool):
        assert leaf.ndim == 0 or not copied(text, leaf.shape), leaf.shape


def test_without_a_cache_there_are_no_names():
    config = small()
    state = init_simulator(config, make_program(config, UNIT), (0, 1))
    assert state.scheduler.requests.tokens.shape == (65, 0) and state.closed == ()
    assert not jax.tree.leaves(state.scheduler.pool.prefix_cache)


@pytest.mark.parametrize(
    "trace, changes, message",
    [
        (draw_trace(3), {}, "no names of blocks"),
        (draw_named(3), {"block_size": 16}, "pieces of 8 tokens and"),
    ],
    ids=["no names", "large blocks"],
)
def test_what_cannot_be_found_by_is_refused(trace, changes, message):
    with pytest.raises(UserError, match=message):
        run(cached(**changes), trace)
    if trace.names is None:
        with pytest.raises(UserError, match=message):
            infinite_cache(trace, 4)


# ------------------------------------------------------------------ Mooncake's files


@functools.cache
def lines():
    records = [
        {
            "timestamp": 0,
            "input_length": 1300,
            "output_length": 5,
            "hash_ids": [4, 5, 6],
        },
        {
            "timestamp": 3000,
            "input_length": 1300,
            "output_length": 7,
            "hash_ids": [4, 9],
        },
        {
            "timestamp": 90000,
            "input_length": 700,
            "output_length": 1,
            "hash_ids": [4, 5],
        },
    ]
    return [json.dumps(record) for record in records]


def write(tmp_path, more=()):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([*lines(), *more]))
    return path


def test_hashes_of_a_recording_drive_the_cache(tmp_path):
    path = write(tmp_path)

    def rows():
        return read_trace(path, "mooncake", strict=True)

    assert longest(rows()) == 1307
    config = cached(block_size=16, max_model_len=1312, num_blocks=300, token_budget=512)
    found = run(config, to_traces(rows(), 2))
    # The second finds one piece of 512, the third all that has its names: 688 of 700.
    bound = infinite_cache(to_traces(rows()), 16)
    assert bound == (512 + 688, 3300)
    assert found.means["prefix_hit_ratio"] == pytest.approx(bound.ratio)
    assert found.means["evicted_blocks"] == 0
    np.testing.assert_array_equal(found.output_len, [5, 7, 1])


@pytest.mark.parametrize("name", [-1, 2**31])
def test_hashes_out_of_range_are_malformed(tmp_path, name):
    bad = json.dumps(json.loads(lines()[0]) | {"hash_ids": [name]})
    malformed = Malformed()
    path = write(tmp_path, [bad])
    assert len(list(read_trace(path, "mooncake", malformed=malformed))) == 3
    assert "hash id" in malformed.named[0]


def test_a_recording_without_times_needs_arrivals(tmp_path):
    path = write(tmp_path)
    rows = [
        row._replace(arrival=None, hash_ids=()) for row in read_trace(path, "mooncake")
    ]
    with pytest.raises(UserError, match="no times"):
        next(to_traces(rows))
    (trace,) = to_traces(rows, arrivals=iter([0.5, 1.5, 2.5]))
    np.testing.assert_array_equal(trace.arrival, [0.5, 1.5, 2.5])
    assert trace.names is None
    with pytest.raises(UserError, match="not enough arrivals"):
        next(to_traces(rows, arrivals=[1.0]))
