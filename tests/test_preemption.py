"""Preemption by swap: what moves, who waits, and that no token changes."""

import functools
import random

import jax
import numpy as np
import pytest
from engines import (
    all_tokens,
    assert_all_free,
    assert_sound,
    clean,
    drawn,
    greedy,
    make_engine,
    poison,
    serve,
)
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pythons import SAME_KIND
from scheduling import run_schedule, small_config

from paged_jax import EngineConfig, Field, SequenceStatus, submit
from paged_jax.requests import RequestStatus
from paged_jax.swap import SwapSpace

SETTINGS = dict(max_n=4, num_blocks=26, max_seqs=6, max_requests=8)
# Two requests that do not fit together to their ends; the second gives way.
FIRST = [60] * 20, drawn(25, seed=1, n=2)
SECOND = [*range(61, 79)], drawn(24, seed=3, n=2)


@pytest.fixture(scope="module")
def shared():
    return make_engine(**SETTINGS, debug=True)


@pytest.fixture
def engine(shared):
    shared.reset_stats()
    yield shared
    assert not shared.has_unfinished()
    assert_all_free(shared)


@functools.cache
def alone(prompt, params):
    """Tokens of each sequence of a request, by itself."""
    engine = make_engine(**SETTINGS, preemption="recompute")
    return all_tokens(engine.generate([list(prompt)], params)[0])


def expected(request):
    return alone(tuple(request[0]), request[1])


def rows_of(engine, name):
    """Rows of a request's sequences, in their order."""
    request = np.asarray(engine.state.scheduler.sequences.request)
    slots = [s.slot for s in engine._table.records[name].sequences]
    return [
        int(np.flatnonzero(request == slot)[0]) for slot in slots if slot in request
    ]


def statuses(engine, name):
    sequences = engine.state.scheduler.sequences
    return {SequenceStatus(int(sequences.status[r])) for r in rows_of(engine, name)}


def is_out(engine, name):
    return statuses(engine, name) == {SequenceStatus.SWAPPED}


def step(engine, outputs=None):
    """One step, with the invariants checked after it."""
    new = {output.request_id: output for output in engine.step(max_steps=1)}
    if outputs is not None:
        outputs |= new
    assert_sound(engine)


def content(cache, sequences, row):
    """Keys and values of a row's tokens, in all layers."""
    table = np.asarray(sequences.block_table[row])
    count = int(sequences.length[row])
    slots = [np.asarray(x)[:, table] for x in (cache.k, cache.v)]
    return [x.reshape(x.shape[0], -1, *x.shape[3:])[:, :count] for x in slots]


def contend(engine, outputs=None):
    """Serves both requests until the second is swapped out; returns their names."""
    names = [engine.submit(*FIRST), engine.submit(*SECOND)]
    step(engine, outputs)
    while not is_out(engine, names[1]):
        step(engine, outputs)
    return names


# ------------------------------------------------------------------ what moves


def test_a_group_goes_to_the_host_with_all_that_it_shares(engine):
    first, second = engine.submit(*FIRST), engine.submit(*SECOND)
    outputs = {}
    while not is_out(engine, second):
        before = engine.state.scheduler
        before = jax.device_get((before.sequences, engine.state.cache))
        step(engine, outputs)
    state = engine.state.scheduler
    rows = rows_of(engine, second)
    # Whole blocks of the prompt are shared, the others are not: 4 + 2 * own.
    counts = [int(state.sequences.num_blocks[row]) for row in rows]
    tables = [
        np.asarray(state.sequences.block_table[row])[:count]
        for row, count in zip(rows, counts, strict=True)
    ]
    assert (tables[0][:4] == tables[1][:4]).all()
    distinct = set(np.concatenate(tables).tolist())
    assert len(distinct) == sum(counts) - 4
    references = np.asarray(state.swap.pool.ref_count)
    assert [references[block] for block in tables[0]] == [2] * 4 + [1] * (counts[0] - 4)
    kept = []
    for row in rows:
        old, new = before[0].length[row], int(state.sequences.length[row])
        assert old == new == (counts[0] - 1) * 4 + (new - 1) % 4 + 1
        kept.append(content(engine.state.host, state.sequences, row))
        for a, b in zip(kept[-1], content(before[1], before[0], row), strict=True):
            np.testing.assert_array_equal(a, b)
    status = engine.state.scheduler.requests.status
    for sequence in engine._table.records[second].sequences:
        assert status[sequence.slot] == RequestStatus.RUNNING
    row = engine.log[-1]
    assert row[Field.PREEMPTED] == row[Field.SWAPPED] == 1
    assert row[Field.SWAPPED_OUT_BLOCKS] == len(distinct)
    assert row[Field.RUNNING] == 2 and row[Field.WAITING] == 0
    # What the log says of the device's blocks leaves the host's out.
    assert row[Field.PHYSICAL_BLOCKS] == 26 - row[Field.FREE_BLOCKS]

    while is_out(engine, second):
        step(engine, outputs)
    sequences = engine.state.scheduler.sequences
    tables = [np.asarray(sequences.block_table[row]) for row in rows_of(engine, second)]
    assert (tables[0][:4] == tables[1][:4]).all() and tables[0][4] != tables[1][4]
    for row, old in zip(rows_of(engine, second), kept, strict=True):
        for a, b in zip(content(engine.state.cache, sequences, row), old, strict=True):
            np.testing.assert_array_equal(a[:, : b.shape[1]], b)
    assert engine.log[-1, Field.SWAPPED_IN_BLOCKS] == len(distinct)
    outputs |= serve(engine)
    assert all_tokens(outputs[first]) == expected(FIRST)
    assert all_tokens(outputs[second]) == expected(SECOND)
    stats = engine.stats
    assert stats.recomputed_tokens == stats.recomputed_share == 0
    assert stats.swapped_blocks == (len(distinct), len(distinct))
    assert stats.copied_blocks == int(engine.log[:, Field.COPIED_BLOCKS].sum())
    assert stats.block_nbytes == engine.memory_plan.block
    m = outputs[second].metrics
    assert m.first_scheduled_time <= m.first_token_time < m.finished_time


def test_a_prefix_that_is_held_is_shared_again(engine):
    prefix = engine.register_prefix(FIRST[0][:8])
    asked = [FIRST, ([60] * 9 + SECOND[0][:8], SECOND[1])]
    names, outputs = [engine.submit(*one) for one in asked], {}
    step(engine, outputs)
    held = int(engine._table.prefixes.records[prefix].row)
    blocks = np.asarray(engine.state.scheduler.sequences.block_table[held, :2])

    def users():
        return np.asarray(engine.state.scheduler.pool.ref_count)[blocks].tolist()

    while not is_out(engine, names[1]):
        step(engine, outputs)
    assert users() == [3, 3]
    while is_out(engine, names[1]):
        step(engine, outputs)
    others = 2 * (names[0] in engine._table.records)
    assert users() == [3 + others] * 2
    outputs |= serve(engine)
    engine.release_prefix(prefix)
    for name, one in zip(names, asked, strict=True):
        assert all_tokens(outputs[name]) == expected(one)


# ------------------------------------------------------------------ who waits


def test_nothing_is_admitted_while_anything_is_swapped_out(engine):
    outputs = {}
    names = contend(engine, outputs)
    third = engine.submit([3, 4], greedy(2))
    waited = 0
    while is_out(engine, names[1]):
        free = engine.log[-1, Field.FREE_BLOCKS]
        step(engine, outputs)
        if is_out(engine, names[1]):
            slot = engine._table.records[third].sequences[0].slot
            status = engine.state.scheduler.requests.status[slot]
            assert status == RequestStatus.WAITING
            waited += free > 1
    assert waited, "there was room for it, or this shows nothing"
    outputs |= serve(engine)
    assert all_tokens(outputs[third]) == expected(([3, 4], greedy(2)))


def test_the_latest_go_first_and_the_earliest_come_back_first(engine):
    asked = [([30 + i] * (9 + i), drawn(22, seed=i, n=2)) for i in range(3)]
    names, outputs = [engine.submit(*one) for one in asked], {}
    step(engine, outputs)
    orders = set()
    while engine.has_unfinished():
        live = [n for n in names if n in engine._table.records and rows_of(engine, n)]
        out = [name for name in live if is_out(engine, name)]
        assert out == live[len(live) - len(out) :], "an earlier one is out"
        orders.add(tuple(out))
        step(engine, outputs)
    assert {len(order) for order in orders} == {0, 1, 2}
    for name, one in zip(names, asked, strict=True):
        assert all_tokens(outputs[name]) == expected(one)


def test_a_group_in_its_prompt_is_recomputed(engine):
    # Four times 12 tokens take 12 blocks, and the prompt of 44 takes 11. It is computed
    # in chunks of 12; before the fourth of them the others want 4 blocks more.
    asked = [([5], drawn(20, seed=1, n=4)), ([7] * 44, drawn(4, seed=1, n=2))]
    names, outputs = [engine.submit(*asked[0])], {}
    for _ in range(9):
        step(engine, outputs)
    names.append(engine.submit(*asked[1]))
    while engine.has_unfinished():
        step(engine, outputs)
    assert engine.stats.recomputed_tokens == 36
    assert engine.stats.swapped_blocks == (0, 0)
    for name, one in zip(names, asked, strict=True):
        assert all_tokens(outputs[name]) == expected(one)


# ------------------------------------------------------------------ ends


def test_aborted_on_the_host_it_gives_back_every_block(engine):
    outputs = {}
    first, second = contend(engine, outputs)
    engine.abort(second)
    step(engine, outputs)
    assert int(engine.state.scheduler.swap.pool.num_free) == 26
    outputs |= serve(engine)
    assert {c.finish_reason for c in outputs[second].outputs} == {"abort"}
    for got, want in zip(all_tokens(outputs[second]), expected(SECOND), strict=True):
        assert 0 < len(got) < len(want) and got == want[: len(got)]
    assert all_tokens(outputs[first]) == expected(FIRST)


@pytest.mark.parametrize("which", [0, 1])
def test_one_of_a_group_ends_on_the_host(engine, which):
    outputs = {}
    _, second = contend(engine, outputs)
    # As when the host finds a stop string in what it has read late.
    slot = engine._table.records[second].sequences[which].slot
    engine._device.cancel([slot], RequestStatus.FINISHED_STOP)
    step(engine, outputs)
    assert len(rows_of(engine, second)) == 1
    outputs |= serve(engine)
    got, want = all_tokens(outputs[second]), expected(SECOND)
    assert got[1 - which] == want[1 - which]
    assert got[which] == want[which][: len(got[which])] != want[which]


def test_nothing_reads_memory_that_holds_no_token(engine):
    names, outputs = [engine.submit(*FIRST), engine.submit(*SECOND)], {}
    while engine.has_unfinished():
        poison(engine)
        step(engine, outputs)
    clean(engine)
    assert engine.stats.swapped_blocks > (0, 0)
    for name, one in zip(names, (FIRST, SECOND), strict=True):
        assert all_tokens(outputs[name]) == expected(one)


# ------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("settings", "host_blocks", "swaps_single"),
    [
        (dict(), 0, False),  # requests for one sequence are recomputed
        (dict(max_n=4), 20, False),
        (dict(max_n=4, host_blocks=7), 7, False),
        (dict(max_n=4, host_blocks=0), 0, False),
        (dict(max_n=4, preemption="recompute"), 0, False),
        (dict(max_n=4, sharing=False), 0, False),
        (dict(max_n=4, batching="static"), 0, False),
        (dict(preemption="swap"), 20, True),
        (dict(preemption="swap", host_blocks=0), 0, False),
        (dict(preemption="swap", memory="max", num_blocks=64), 0, False),
    ],
)
def test_the_host_has_blocks_only_if_something_may_be_swapped(
    settings, host_blocks, swaps_single
):
    settings = {"num_blocks": 20, "max_model_len": 64, "block_size": 4, **settings}
    config = EngineConfig(**settings).step_config()
    assert (config.host_blocks, config.swaps_single) == (host_blocks, swaps_single)
    state = make_engine(**settings).state
    assert isinstance(state.scheduler.swap, SwapSpace) == (host_blocks > 0)
    if host_blocks:
        assert state.scheduler.swap.pool.num_blocks == host_blocks
        assert state.host.k.shape[1] == host_blocks + 1
    else:
        assert state.host == ()


def test_pinned_memory_of_the_host(monkeypatch):
    # CPUs have it as a kind of memory, so that its types are met as on a GPU.
    mesh = Mesh(np.array(jax.devices()[:1]), ("device",))
    sharding = NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")
    monkeypatch.setattr(submit, "host_memory", lambda: sharding)
    engine = make_engine(**SETTINGS)
    outputs = engine.generate(*zip(FIRST, SECOND, strict=True))
    assert [all_tokens(o) for o in outputs] == [expected(FIRST), expected(SECOND)]
    assert engine.stats.swapped_blocks > (0, 0)
    assert engine.state.host.k.sharding.memory_kind == "pinned_host"
    assert engine.state.cache.k.sharding.memory_kind == "device"
    assert_all_free(engine)


# ------------------------------------------------------------------ overload


def overload(seed, several, num_blocks, size):
    """Lengths of requests that want five times the blocks, as `run_schedule` takes."""
    rng = random.Random(seed)
    lengths, demand = [], 0
    while demand < 5 * num_blocks:
        count = rng.randint(2, 4) if several else 1
        outputs = tuple(rng.randint(16, 50) for _ in range(count))
        prompt = rng.randint(3, 12)
        lengths.append((prompt, outputs))
        whole = prompt // size
        demand += whole + sum(-(-(prompt + o) // size) - whole for o in outputs)
    return lengths


@SAME_KIND
@pytest.mark.parametrize("several", [True, False])
def test_an_overload_of_five_times_the_memory_recomputes_little(several):
    """The default policy: groups are swapped out, and single sequences recomputed."""
    config = small_config(
        sharing=True,
        max_prefixes=0,
        max_n=4,
        max_seqs=96,
        max_requests=128,
        max_model_len=64,
        token_budget=128,
        watermark=EngineConfig().watermark,
        spare_blocks=EngineConfig().spare_blocks,
        num_blocks=180,
    )
    for seed in range(5):  # one program serves them all
        lengths = overload(seed, several, config.num_blocks, config.block_size)
        log, state = run_schedule(config, lengths)
        generated = sum(sum(outputs) for _, outputs in lengths)
        status = np.asarray(state.requests.status)[: sum(len(o) for _, o in lengths)]
        assert (status == RequestStatus.FINISHED_LENGTH).all(), seed
        assert int(state.pool.num_free) == config.num_blocks, seed
        assert int(state.swap.pool.num_free) == config.num_blocks, seed
        assert log["PREEMPTED"].sum() > 10, seed
        assert log["RECOMPUTED"].sum() <= 0.2 * generated, seed
        out, back = (log[f"SWAPPED_{way}_BLOCKS"].sum() for way in ("OUT", "IN"))
        assert out == back, seed
        assert (log["SWAPPED"].max() > 3) == several, seed
