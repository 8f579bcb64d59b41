"""Registered prefixes: shared blocks, copied when they are written."""

import jax
import numpy as np
import pytest
from engines import (
    assert_all_free,
    assert_sound,
    greedy,
    idle,
    make_engine,
    serve,
    tokens_of,
)

from paged_jax import Field, RequestError, SequenceStatus

PREFIX = list(range(10, 20))  # 2 blocks of 4 and a half


@pytest.fixture(scope="module")
def shared():
    return make_engine()


@pytest.fixture
def engine(shared):
    yield shared
    assert not shared.has_unfinished()
    for name in list(shared._table.prefixes.records):
        shared.release_prefix(name)
    assert_all_free(shared)
    shared.reset_stats()


def blocks_of(engine, name):
    """The blocks of a registered prefix."""
    row = engine._table.prefixes.records[name].row
    sequences = engine.state.scheduler.sequences
    count = int(sequences.num_blocks[row])
    return np.asarray(sequences.block_table[row])[:count].copy()


def content(engine, blocks):
    """Keys and values of some blocks, all layers."""
    cache = engine.state.cache
    return jax.tree.map(lambda x: np.asarray(x[:, blocks]).copy(), (cache.k, cache.v))


def references(engine, blocks):
    return np.asarray(engine.state.scheduler.pool.ref_count)[blocks].tolist()


def log_of(engine, field):
    return engine.log[:, field].astype(int)


def test_sharers_refer_to_the_whole_blocks_and_copy_the_part_filled_one(engine):
    name = engine.register_prefix(PREFIX)
    blocks = blocks_of(engine, name)
    assert references(engine, blocks) == [1, 1, 1]
    before = content(engine, blocks)
    engine.reset_stats()
    for token in (30, 31, 32):
        engine.submit([*PREFIX, token], greedy(6))
    engine.step(max_steps=1)
    assert references(engine, blocks) == [4, 4, 1]
    # All three write to the third block in their first step: each copies it, since the
    # prefix keeps its own.
    assert log_of(engine, Field.COPIED_BLOCKS).tolist() == [3]
    assert log_of(engine, Field.LOGICAL_BLOCKS).tolist() == [9]
    assert log_of(engine, Field.PHYSICAL_BLOCKS).tolist() == [2 + 3]
    # Only what the prefix does not have was computed.
    assert log_of(engine, Field.TOKENS).tolist() == [3]
    assert log_of(engine, Field.LIVE).tolist() == [8 + 3 * 3]
    assert log_of(engine, Field.RESERVED).tolist() == [5 * 4]
    free = int(engine.state.scheduler.pool.num_free)
    assert free == engine.config.num_blocks - 3 - 3
    assert_sound(engine)
    serve(engine)
    idle(engine)
    assert references(engine, blocks) == [1, 1, 1]
    for ours, theirs in zip(before, content(engine, blocks)):
        np.testing.assert_array_equal(ours, theirs)
    assert log_of(engine, Field.COPIED_BLOCKS).sum() == 3


def test_a_prefix_of_whole_blocks_is_never_copied(engine):
    engine.register_prefix(PREFIX[:8])
    engine.reset_stats()
    engine.generate([[*PREFIX[:8], 30], [*PREFIX[:8], 31, 32]], greedy(9))
    assert log_of(engine, Field.COPIED_BLOCKS).sum() == 0
    assert (
        log_of(engine, Field.LOGICAL_BLOCKS) - log_of(engine, Field.PHYSICAL_BLOCKS)
    ).max() == 2


@pytest.mark.parametrize("size", [8, 9, 10])
def test_a_prompt_that_is_the_prefix_computes_its_last_token(engine, size):
    prompt = PREFIX[:size]
    alone = tokens_of(engine.generate([prompt], greedy(8)))
    engine.register_prefix(prompt)
    engine.reset_stats()
    assert tokens_of(engine.generate([prompt] * 3, greedy(8))) == alone * 3
    assert log_of(engine, Field.TOKENS)[0] == 3
    # Its slot is in a shared block, unless the block holds nothing else.
    copied = 0 if size == 9 else 3
    assert log_of(engine, Field.COPIED_BLOCKS).sum() == copied


def test_outputs_are_those_without_sharing(engine):
    asked = [[*PREFIX, *range(40, 40 + n)] for n in (1, 2, 3, 7)] + [
        PREFIX,
        PREFIX[:9],
        [*PREFIX[:9], 99],
        [99, *PREFIX],
        [*PREFIX, *PREFIX],
    ]
    expected = tokens_of(engine.generate(asked, greedy(12)))
    name = engine.register_prefix(PREFIX)
    assert tokens_of(engine.generate(asked, greedy(12))) == expected
    engine.release_prefix(name)
    assert tokens_of(engine.generate(asked, greedy(12))) == expected


def test_sharers_that_are_preempted_share_again(engine):
    asked = [[*PREFIX, 40 + i] for i in range(6)]
    expected = [tokens_of(engine.generate([p], greedy(30)))[0] for p in asked]
    engine.register_prefix(PREFIX)
    engine.reset_stats()
    assert tokens_of(engine.generate(asked, greedy(30))) == expected
    assert log_of(engine, Field.PREEMPTED).sum() > 0
    assert log_of(engine, Field.COPIED_BLOCKS).sum() > 6
    # What a victim shares is not computed again: each token of its own once, those of
    # the prefix never, and those that it lost once more. The last one of all is not.
    own = 6 * (len(asked[0]) - len(PREFIX) + 30 - 1)
    again = log_of(engine, Field.RECOMPUTED).sum()
    assert log_of(engine, Field.TOKENS).sum() == own + again


def test_the_longest_prefix_that_fits_is_shared(engine):
    short = engine.register_prefix(PREFIX[:4])
    long = engine.register_prefix(PREFIX[:8])
    # The second starts with the first, and shares it.
    first, second = blocks_of(engine, short), blocks_of(engine, long)
    assert first[0] == second[0] and references(engine, second) == [2, 1]
    engine.submit([*PREFIX, 50], greedy(4))
    engine.submit([*PREFIX[:6], 50], greedy(4))
    engine.step(max_steps=1)
    assert references(engine, second) == [4, 2]
    log = engine.log[-1]
    assert log[Field.LOGICAL_BLOCKS] == 3 + 2 and log[Field.PHYSICAL_BLOCKS] == 4
    serve(engine)
    engine.release_prefix(short)
    idle(engine)
    assert references(engine, second) == [1, 1]


def test_release_while_shared(engine):
    prompt = [*PREFIX, 60]
    alone = tokens_of(engine.generate([prompt], greedy(20)))[0]
    name = engine.register_prefix(PREFIX)
    blocks = blocks_of(engine, name)
    names = [engine.submit(prompt, greedy(20)) for _ in range(6)]
    engine.step(max_steps=3)
    engine.reset_stats()
    engine.release_prefix(name)
    engine.step(max_steps=2)
    assert references(engine, blocks) == [4, 4, 0], "its own part is given back"
    assert_sound(engine)
    # The sharers' blocks still count once, though no prefix is held.
    rows = engine.log[engine.log[:, Field.RUNNING] == 4]
    np.testing.assert_array_equal(
        rows[:, Field.LOGICAL_BLOCKS] - rows[:, Field.PHYSICAL_BLOCKS], 3 * 2
    )
    outputs = serve(engine)
    assert tokens_of(outputs[n] for n in names) == [alone] * 6
    with pytest.raises(
        RequestError, match=f"no prefix '{name}' is registered; registered: none"
    ):
        engine.release_prefix(name)


def test_released_and_registered_again(engine):
    prompt = [*PREFIX, 60]
    alone = tokens_of(engine.generate([prompt], greedy(5)))
    for turn in range(4):  # once while the blocks of the last one are not yet freed
        name = engine.register_prefix([*PREFIX[: -turn or None]])
        assert tokens_of(engine.generate([prompt], greedy(5))) == alone
        engine.release_prefix(name)
        if turn % 2:
            assert_all_free(engine)


def test_another_prefix_may_take_the_place_of_a_released_one(engine):
    first = engine.register_prefix(PREFIX)
    for i in range(6):
        engine.submit([*PREFIX, i + 3], greedy(12))
    engine.step(max_steps=2)
    engine.release_prefix(first)
    other = [99, 98, 97, 96, 95]
    engine.register_prefix(other)
    outputs = [*serve(engine).values()]
    assert len(outputs) == 6
    again = [
        tokens_of(engine.generate([o.prompt_token_ids], greedy(12))) for o in outputs
    ]
    assert [*map(list, zip(tokens_of(outputs)))] == again


def test_a_released_prefix_is_not_looked_for_in_its_row(engine):
    last = [*PREFIX, *range(60, 70)]
    expected = tokens_of(engine.generate([last], greedy(6)))[0]
    prefix = engine.register_prefix(PREFIX)
    row = engine._table.prefixes.records[prefix].row
    for output in (3, 16, 16, 16, 30):
        engine.submit([*PREFIX, 50 + output], greedy(output))
    name = engine.submit(last, greedy(6))
    engine.step(max_steps=2)
    engine.release_prefix(prefix)
    # The fifth takes the row; the last is admitted beside it, its prefix long gone.
    engine.step(max_steps=4)
    sequences = engine.state.scheduler.sequences
    assert sequences.status[row] == SequenceStatus.RUNNING
    assert sequences.length[row] > len(PREFIX)
    assert tokens_of([serve(engine)[name]])[0] == expected


def test_requests_go_on_while_a_prefix_is_registered(engine):
    expected = tokens_of(engine.generate([[5, 6]], greedy(3)))
    name = engine.submit([5, 6], greedy(3))
    stream = engine.submit([7, 8], greedy(40), stream=True)
    others = [engine.submit([9 + i], greedy(30)) for i in range(6)]
    prefix = engine.register_prefix(PREFIX * 5)
    seen = engine.step(max_steps=1)
    assert tokens_of(o for o in seen if o.request_id == name) == expected
    assert stream in {o.request_id for o in seen}
    done = {o.request_id for o in seen if o.finished} | set(serve(engine))
    assert done >= {name, stream, *others} and prefix not in done


def test_every_request_slot_may_be_taken_when_a_prefix_comes(engine):
    names = [engine.submit([9 + i], greedy(20)) for i in range(20)]
    engine.step(max_steps=1)
    engine.register_prefix(PREFIX)
    assert set(serve(engine)) == set(names)


def test_prefixes_have_request_slots_of_their_own():
    # Also fewer requests on the device than sequences that could run.
    engine = make_engine(max_requests=1)
    engine.register_prefix(PREFIX)
    engine.register_prefix([50, 51])
    outputs = engine.generate([[*PREFIX, 3 + i] for i in range(7)], greedy(3))
    assert len(outputs) == 7


def test_there_can_be_too_many(engine):
    for token in (3, 4):
        engine.register_prefix([token] * 5)
    with pytest.raises(RequestError) as error:
        engine.register_prefix([5] * 5)
    assert str(error.value) == (
        "2 prefixes are registered and max_prefixes is 2; release one or raise "
        "max_prefixes"
    )


def test_one_may_be_too_long(engine):
    with pytest.raises(RequestError, match="the prompt has 64 tokens and max_model"):
        engine.register_prefix([3] * 64)
    engine.register_prefix([3] * 40)
    with pytest.raises(RequestError) as error:
        engine.register_prefix([4] * 44)
    assert str(error.value) == (
        "the prefix of 44 tokens does not fit in 20 blocks of 4 beside what is held; "
        "shorten it, release another or raise num_blocks"
    )
    # A prefix whose blocks are there can still be registered.
    engine.register_prefix([4] * 40)


def test_a_request_that_the_prefixes_leave_no_room_for_is_rejected(engine):
    engine.register_prefix([3] * 60)
    (output,) = engine.generate([[4] * 30], greedy(3))
    assert output.finished and output.outputs[0].finish_reason == "rejected"
    assert output.outputs[0].token_ids == ()
    assert output.metrics.finished_time is not None


def test_registering_needs_sharing():
    for changes in ({"sharing": False}, {"memory": "max"}, {"max_prefixes": 0}):
        with pytest.raises(
            RequestError, match="sharing is off: it needs memory='paged'"
        ):
            make_engine(**changes).register_prefix(PREFIX)


def test_a_prefix_is_no_request(engine):
    name = engine.register_prefix(PREFIX)
    assert not engine.has_unfinished()
    with pytest.raises(RequestError, match=f"no request '{name}' is being served"):
        engine.abort(name)
