"""Requests end before their time, wherever they are; their blocks come back."""

import numpy as np
import pytest
from engines import assert_all_free, assert_sound, greedy, make_engine, serve

from paged_jax import RequestError
from paged_jax.requests import RequestStatus
from paged_jax.sequences import SequenceStatus


@pytest.fixture(scope="module", params=["continuous", "static"])
def shared(request):
    return make_engine(batching=request.param)


@pytest.fixture
def engine(shared):
    yield shared
    assert not shared.has_unfinished()
    assert_all_free(shared)


def status_of(engine, name):
    """Where the device says a request stands; None if it is not there."""
    slot = engine._table.records[name].sequences[0].slot
    if slot is None:
        return None
    return RequestStatus(int(engine.state.scheduler.requests.status[slot]))


def aborted(engine, name, max_steps=16):
    """Aborts a request; returns its completion and those of the others, at the end."""
    engine.abort(name)
    outputs = serve(engine, max_steps=max_steps)
    output = outputs.pop(name)
    assert output.finished
    metrics = output.metrics
    assert metrics.arrival_time <= metrics.finished_time
    (completion,) = output.outputs
    assert (completion.finish_reason, completion.stop_reason) == ("abort", None)
    with pytest.raises(RequestError, match=f"no request '{name}' is being served"):
        engine.abort(name)
    return completion, outputs


def test_on_the_hosts_backlog(engine):
    names = [engine.submit([3, 4], greedy(3)) for _ in range(12)]
    engine.step(max_steps=1)
    assert status_of(engine, names[-1]) is None
    completion, others = aborted(engine, names[-1])
    assert completion.token_ids == () and len(others) == 11


def test_before_the_first_step(engine):
    completion, _ = aborted(engine, engine.submit([3, 4], greedy(3)))
    assert completion.token_ids == ()


@pytest.mark.parametrize("place", [0, 1])
def test_waiting_on_the_device(engine, place):
    names = [engine.submit([3 + i], greedy(20)) for i in range(6)]
    engine.step(max_steps=2)
    assert status_of(engine, names[4 + place]) == RequestStatus.WAITING
    completion, others = aborted(engine, names[4 + place], max_steps=1)
    assert completion.token_ids == ()
    assert {len(o.outputs[0].token_ids) for o in others.values()} == {20}


def test_running(engine):
    expected = engine.generate([[5, 6, 7]], greedy(30))[0].outputs[0].token_ids
    names = [engine.submit([5, 6, 7], greedy(30)) for _ in range(2)]
    engine.step(max_steps=7)
    assert status_of(engine, names[0]) == RequestStatus.RUNNING
    completion, others = aborted(engine, names[0])
    assert completion.token_ids == expected[:7]
    assert others[names[1]].outputs[0].token_ids == expected


def test_in_the_middle_of_its_prompt(engine):
    names = [engine.submit([8] * 60, greedy(3)), engine.submit([9] * 3, greedy(2))]
    engine.step(max_steps=2)
    assert int(engine.state.scheduler.sequences.length.max()) == 32
    completion, others = aborted(engine, names[0])
    assert completion.token_ids == ()
    assert len(others[names[1]].outputs[0].token_ids) == 2


def test_preempted():
    engine = make_engine()
    # 4 sequences grow to 10 blocks each, of 20.
    names = [engine.submit([3 + i] * 8, greedy(32)) for i in range(4)]
    engine.step(max_steps=4)
    waiting = [n for n in names if status_of(engine, n) == RequestStatus.WAITING]
    assert waiting == []
    while not waiting:
        engine.step(max_steps=1)
        waiting = [n for n in names if status_of(engine, n) == RequestStatus.WAITING]
    assert waiting == [names[-1]], "the latest arrival is preempted first"
    known = int(
        engine.state.scheduler.requests.length[
            engine._table.records[names[-1]].sequences[0].slot
        ]
    )
    completion, others = aborted(engine, names[-1])
    assert len(completion.token_ids) == known - 8 > 0
    assert {len(o.outputs[0].token_ids) for o in others.values()} == {32}
    assert_all_free(engine)


def test_a_stream(engine):
    name = engine.submit([5, 6, 7], greedy(40))
    seen = []
    for output in engine.stream(name):
        seen.append(output.outputs[0])
        if len(seen) == 2:
            engine.abort(name)
    assert seen[-1].finish_reason == "abort"
    assert seen[-1].text.startswith(seen[1].text)


def test_everything_at_once(engine):
    names = [engine.submit([3 + i] * 9, greedy(30)) for i in range(12)]
    engine.step(max_steps=4)
    for name in names:
        engine.abort(name)
    outputs = serve(engine)
    assert {o.outputs[0].finish_reason for o in outputs.values()} == {"abort"}
    assert set(outputs) == set(names)


def test_twice_in_a_row_is_one_abort(engine):
    names = [engine.submit([3 + i], greedy(30)) for i in range(2)]
    engine.step(max_steps=4)
    engine.abort(names[0])
    engine.abort(names[0])
    outputs = serve(engine)
    assert outputs[names[0]].outputs[0].finish_reason == "abort"
    assert len(outputs[names[1]].outputs[0].token_ids) == 30


def test_a_slot_serves_again_while_its_static_batch_goes_on():
    engine = make_engine(batching="static")
    first = engine.submit([3], greedy(4))
    # The batch of 4, 4 that wait on the device in the other slots, one on the host.
    rest = [engine.submit([4 + i], greedy(20)) for i in range(8)]
    engine.step(max_steps=6)
    last = rest[-1]
    assert status_of(engine, last) is None
    sequences = engine.state.scheduler.sequences
    row = int(np.flatnonzero(sequences.status == SequenceStatus.FINISHED)[0])
    engine.step(max_steps=1)
    assert status_of(engine, last) == RequestStatus.WAITING
    # The row of the first one is kept until the batch ends, and names that slot.
    sequences = engine.state.scheduler.sequences
    assert sequences.status[row] == SequenceStatus.FINISHED
    assert sequences.request[row] == engine._table.records[last].sequences[0].slot
    completion, others = aborted(engine, last)
    assert completion.token_ids == () and first not in others
    assert {len(o.outputs[0].token_ids) for o in others.values()} == {20}
    assert_all_free(engine)


def test_random_aborts_leave_the_blocks_sound(engine):
    names = []
    for turn in range(40):
        names.append(engine.submit([3 + turn] * (1 + turn * 7 % 23), greedy(20)))
        engine.step(max_steps=1 + turn % 3)
        live = [name for name in names if name in engine._table.records]
        if turn % 2 and live:
            engine.abort(live[turn * 5 % len(live)])
        assert_sound(engine)
    serve(engine)
