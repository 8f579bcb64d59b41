"""Requests end before their time, wherever they are; their blocks come back."""

import dataclasses

import numpy as np
import pytest
from engines import (
    assert_all_free,
    assert_sound,
    drawn,
    greedy,
    make_engine,
    serve,
)

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


# ------------------------------------------------------------------ several sequences


@pytest.fixture(scope="module")
def groups():
    settings = dict(max_n=4, max_seqs=6, max_requests=8, num_blocks=26)
    return make_engine(**settings, preemption="recompute")


def statuses(engine, name):
    """Where the device says each sequence of a request stands."""
    status = engine.state.scheduler.requests.status
    slots = [s.slot for s in engine._table.records[name].sequences]
    return {RequestStatus(int(status[slot])) for slot in slots if slot is not None}


def unforked(engine):
    status = np.asarray(engine.state.scheduler.sequences.status)
    return int((status == SequenceStatus.UNFORKED).sum())


def step_until(engine, condition):
    for _ in range(60):
        if condition():
            return
        engine.step(max_steps=1)
    raise AssertionError("it never came to that")


def on_the_host(engine):
    for i in range(3):
        engine.submit([3 + i], drawn(9, n=3))
    name = engine.submit([3, 4], drawn(9, n=4))
    engine.step(max_steps=1)
    assert statuses(engine, name) == set()
    return name


def waiting(engine):
    engine.submit([3], drawn(20, n=4))
    name = engine.submit([3, 4], drawn(9, n=4))
    engine.step(max_steps=1)
    assert statuses(engine, name) == {RequestStatus.WAITING}
    return name


def in_the_middle_of_its_prompt(engine):
    name = engine.submit([8] * 40, drawn(9, n=3))
    engine.step(max_steps=2)
    assert unforked(engine) == 2
    return name


def just_forked(engine):
    name = engine.submit([8] * 14, drawn(9, n=3))
    engine.step(max_steps=1)
    assert unforked(engine) == 0
    return name


def running(engine):
    name = engine.submit([8] * 14, drawn(19, n=3))
    engine.step(max_steps=7)
    return name


def partly_finished(engine):
    params = drawn(12, seed=2, n=4, temperature=2.0)
    tokens = [c.token_ids for c in engine.generate([[3, 4, 5]], params)[0].outputs]
    stop = tokens[1][3]
    params = dataclasses.replace(params, stop_token_ids=[stop])
    name = engine.submit([3, 4, 5], params)
    engine.step(max_steps=6)
    assert statuses(engine, name) == {
        RequestStatus.RUNNING,
        RequestStatus.FINISHED_STOP,
    }
    return name


def preempted(engine):
    engine.submit([3] * 20, drawn(25, seed=1, n=2))
    name = engine.submit([*range(60, 78)], drawn(24, seed=3, n=2))
    for status in (RequestStatus.RUNNING, RequestStatus.WAITING):
        step_until(engine, lambda status=status: statuses(engine, name) == {status})
    return name


def computing_its_prompt_again(engine):
    name = preempted(engine)
    step_until(engine, lambda: unforked(engine) == 1)
    assert engine._table.records[name].sequences[0].length > 19
    return name


STATES = [
    on_the_host,
    waiting,
    in_the_middle_of_its_prompt,
    just_forked,
    running,
    partly_finished,
    preempted,
    computing_its_prompt_again,
]


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_a_group_in_any_state_gives_back_every_block(groups, state):
    name = state(groups)
    groups.abort(name)
    assert_sound(groups)
    outputs = serve(groups, max_steps=1)
    reasons = [c.finish_reason for c in outputs.pop(name).outputs]
    expected = {"stop", "abort"} if state is partly_finished else {"abort"}
    assert set(reasons) == expected
    assert all(c.finish_reason == "length" for o in outputs.values() for c in o.outputs)
    assert_all_free(groups)


def test_a_group_in_a_static_batch_gives_back_every_block():
    engine = make_engine(
        max_n=4, max_seqs=6, max_requests=8, num_blocks=26, batching="static"
    )
    names = [engine.submit([8 + i] * 5, drawn(9, n=3)) for i in range(2)]
    engine.step(max_steps=3)
    engine.abort(names[0])
    assert_sound(engine)
    outputs = serve(engine, max_steps=1)
    assert {c.finish_reason for c in outputs[names[0]].outputs} == {"abort"}
    assert {c.finish_reason for c in outputs[names[1]].outputs} == {"length"}
    assert_all_free(engine)


def test_the_tokens_known_at_an_abort_are_returned(groups):
    params = drawn(19, seed=4, n=3)
    free = [c.token_ids for c in groups.generate([[8] * 14], params)[0].outputs]
    name = groups.submit([8] * 14, params)
    for _ in range(7):
        groups.step(max_steps=1)
    groups.abort(name)
    output = serve(groups)[name]
    assert [c.token_ids for c in output.outputs] == [tokens[:7] for tokens in free]
