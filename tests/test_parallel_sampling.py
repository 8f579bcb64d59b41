"""Several sequences of one prompt: the same tokens, however the memory is shared."""

import functools

import numpy as np
import pytest
from engines import (
    all_tokens,
    assert_all_free,
    assert_sound,
    clean,
    drawn,
    greedy,
    idle,
    make_engine,
    poison,
    prompts,
    serve,
)
from pythons import SAME_KIND, newest_but

from paged_jax import Field, RequestError, SequenceStatus

PREFIX = [40, 41, 42, 43, 44, 45]  # no multiple of 4
MANY = dict(max_n=8, max_seqs=16, max_requests=24, max_model_len=32, max_logprobs=0)


def requests():
    """Prompts and parameters: n from 1 to 8, greedy and drawn, some behind a prefix."""
    asked = []
    for i, prompt in enumerate(prompts(12, 14, seed=3)):
        if i % 4 == 1:
            prompt = [*PREFIX, *prompt[: i - 1]]
        n, output = 1 + i % 8, 16 - i
        params = drawn(output, seed=i, n=n, temperature=1.3, top_k=40)
        asked.append((prompt, greedy(output, n=n) if i % 3 == 2 else params))
    return [*asked, (list(range(60, 68)), drawn(9, seed=77, n=4))]  # whole blocks of 4


REQUESTS = requests()


@functools.cache
def alone():
    """Tokens of each request, served alone, each sequence by itself."""
    engine = make_engine(**MANY, num_blocks=64, sharing=False)
    return [all_tokens(engine.generate([p], params)[0]) for p, params in REQUESTS]


# The pools of shared blocks hold the largest request beside the prefix, and no more.
ENGINES = {
    "block size 4": dict(num_blocks=28, min_bucket=8),
    "block size 4, static": dict(num_blocks=28, batching="static"),
    "block size 1, a host sync each step": dict(
        block_size=1, num_blocks=89, steps_per_sync=1, debug=True
    ),
    "block size 16, whole prompts": dict(
        block_size=16, num_blocks=17, chunked_prefill=False, token_budget=24
    ),
    "block size 256": dict(block_size=256, num_blocks=9, attention_backend="reference"),
    "block size 4, prefix cache": dict(num_blocks=28, prefix_caching=True),
    "block size 2, prefix cache, static": dict(
        block_size=2, num_blocks=51, prefix_caching=True, batching="static"
    ),
    "block size 4, recomputed": dict(num_blocks=28, preemption="recompute"),
    "block size 4, nothing shared": dict(num_blocks=20, sharing=False),
    "pow2": dict(num_blocks=40, memory="pow2"),
}
SHARING = [*ENGINES][:8]
# Groups of several are swapped, what is left of one is recomputed.
SWAPS = {SHARING[i] for i in (0, 2, 3, 5)}
PREEMPTS = {*SWAPS, "block size 4, recomputed", "block size 4, nothing shared"}


# With swapping. Without, test_several_sequences has the same kind of program, and
# test_cached_groups with a prefix cache.
ON_EVERY_PYTHON = {"block size 4"}


each_engine = functools.partial(
    newest_but, ON_EVERY_PYTHON, reason="a program of the same kind, of another size"
)


@functools.cache
def engine_of(name):
    return make_engine(**MANY, **ENGINES[name])


@pytest.mark.parametrize("name", each_engine(ENGINES))
def test_batch_and_memory_change_nothing(name):
    engine = engine_of(name)
    asked, params = zip(*REQUESTS)
    outputs = engine.generate(asked, params)
    assert [all_tokens(output) for output in outputs] == alone()
    preempted = engine.log[:, Field.PREEMPTED].sum()
    assert preempted > 1 if name in PREEMPTS else preempted == 0
    moved, back = engine.stats.swapped_blocks
    assert moved == back > 0 if name in SWAPS else moved == back == 0
    if engine._static.groups:
        log = engine.log
        if engine.config.block_size > 1:
            assert log[:, Field.COPIED_BLOCKS].sum() > 10
        if engine.config.block_size <= 4:
            saved = log[:, Field.LOGICAL_BLOCKS] - log[:, Field.PHYSICAL_BLOCKS]
            assert saved.max() >= 7
    assert_all_free(engine)


@pytest.mark.long
@pytest.mark.parametrize("name", SHARING)
@pytest.mark.parametrize("size", [4, 6])
def test_a_shared_prefix_changes_nothing(name, size):
    engine = engine_of(name)
    prefix = engine.register_prefix(PREFIX[:size])
    engine.reset_stats()
    asked, params = zip(*REQUESTS)
    outputs = engine.generate(asked, params)
    assert [all_tokens(output) for output in outputs] == alone()
    # Each prompt is computed once for all its sequences, what it shares never, and all
    # but the last token of each output; and once more what was lost to preemption.
    own = 0
    for prompt, one in REQUESTS:
        shares = prompt[:size] == PREFIX[:size]
        own += len(prompt) - shares * min(size, len(prompt) - 1)
        own += one.n * (one.max_tokens - 1)
    computed = engine.log[:, Field.TOKENS].sum()
    again = engine.log[:, Field.RECOMPUTED].sum()
    if engine.config.prefix_caching:
        assert computed <= own + again  # a whole static batch may find nothing more
    else:
        assert computed == own + again
    engine.release_prefix(prefix)
    assert_all_free(engine)


@pytest.mark.parametrize("name", each_engine([SHARING[0], SHARING[4], SHARING[5]]))
def test_nothing_reads_memory_that_holds_no_token(name):
    engine = engine_of(name)
    names = [engine.submit(prompt, params) for prompt, params in REQUESTS]
    outputs = {}
    while engine.has_unfinished():
        poison(engine)
        assert_sound(engine)
        outputs |= {output.request_id: output for output in engine.step(max_steps=1)}
    assert [all_tokens(outputs[name]) for name in names] == alone()
    clean(engine)


def test_each_sequence_has_its_own_draws_whatever_n_is():
    engine = engine_of("block size 4")
    prompt, params = [3, 4, 5, 6, 7], functools.partial(drawn, 10, seed=11)
    eight = all_tokens(engine.generate([prompt], params(n=8))[0])
    assert len(set(eight)) == 8
    for n in range(1, 8):
        assert all_tokens(engine.generate([prompt], params(n=n))[0]) == eight[:n]
    plain = make_engine()
    assert all_tokens(plain.generate([prompt], params())[0]) == eight[:1]


def test_greedy_sequences_are_all_the_same():
    engine = engine_of("block size 4")
    (output,) = engine.generate([[3, 4, 5]], greedy(10, n=5))
    assert len(set(all_tokens(output))) == 1
    assert (
        all_tokens(make_engine().generate([[3, 4, 5]], greedy(10))[0])
        == (all_tokens(output)[:1])
    )


def test_requests_without_a_seed_differ_in_all_their_sequences():
    engine = engine_of("block size 4")
    outputs = engine.generate([[3, 4, 5]] * 3, drawn(12, n=4))
    assert len({tokens for output in outputs for tokens in all_tokens(output)}) == 12


# ------------------------------------------------------------------ the memory


def tables(engine):
    """Block table of each row that has one."""
    sequences = engine.state.scheduler.sequences
    return [
        np.asarray(table)[:count].tolist()
        for table, count in zip(sequences.block_table, sequences.num_blocks)
        if count
    ]


def references(engine):
    """Reference count of each block in use."""
    count = np.asarray(engine.state.scheduler.pool.ref_count)
    return {int(block): int(count[block]) for block in np.flatnonzero(count)}


def content(engine, block):
    """Keys of a block, all layers."""
    return np.asarray(engine.state.cache.k[:, block]).copy()


@pytest.fixture
def engine():
    """Blocks of 4; idle, and all blocks free at the end."""
    engine = engine_of("block size 4")
    engine.reset_stats()
    yield engine
    assert not engine.has_unfinished()
    assert_all_free(engine)


def test_figure_8(engine):
    # "Four score and seven years ago our" is 7 tokens: a block and three quarters.
    engine.submit([*range(20, 27)], drawn(3, seed=1, n=2), request_id="A")
    engine.step(max_steps=1)
    # The prompt is computed once; both samples refer to both of its blocks.
    (first, second), other = tables(engine)
    assert other == [first, second]
    assert references(engine) == {first: 2, second: 2}
    assert engine.log[-1, Field.TOKENS] == 7 and engine.log[-1, Field.SAMPLED] == 2
    prompt = content(engine, second)[:, :3]
    engine.step(max_steps=1)
    # A1 writes to a block with two references: it is copied, and A1 has the copy. Then
    # A2 is alone with the old one, and writes there.
    (_, copy), (_, old) = tables(engine)
    assert old == second and copy not in (first, second)
    assert references(engine) == {first: 2, second: 1, copy: 1}
    assert engine.log[-1, Field.COPIED_BLOCKS] == 1
    for block in (copy, second):
        np.testing.assert_array_equal(content(engine, block)[:, :3], prompt)
    assert (content(engine, copy)[:, 3] != content(engine, second)[:, 3]).any()
    output = serve(engine)["A"]
    assert len(set(all_tokens(output))) == 2
    idle(engine)
    assert references(engine) == {}


@pytest.mark.parametrize("size", [6, 8])
def test_whole_blocks_of_the_prompt_are_stored_once_to_the_end(engine, size):
    engine.submit([*range(30, 30 + size)], drawn(14, seed=2, n=4), request_id="a")
    engine.step(max_steps=1)
    while engine.has_unfinished():
        shared = size // 4
        blocks = tables(engine)
        assert len({tuple(table[:shared]) for table in blocks}) == 1
        assert [references(engine)[b] for b in blocks[0][:shared]] == [4] * shared
        assert_sound(engine)
        engine.step(max_steps=1)
    log = engine.log
    # All but the last of the four copy the partly filled block, if there is one.
    assert log[:, Field.COPIED_BLOCKS].sum() == (3 if size % 4 else 0)
    assert log[:, Field.TOKENS].sum() == size + 4 * 13
    saved = log[:, Field.LOGICAL_BLOCKS] - log[:, Field.PHYSICAL_BLOCKS]
    assert saved[1:-1].tolist() == [3 * shared] * (len(log) - 2)


def test_the_others_have_no_block_until_the_prompt_is_computed(engine):
    engine.submit([*range(30, 56)], drawn(3, seed=2, n=3), request_id="a")
    engine.step(max_steps=1)
    status = np.asarray(engine.state.scheduler.sequences.status)
    assert (status == SequenceStatus.UNFORKED).sum() == 2
    assert len(tables(engine)) == 1
    engine.step(max_steps=1)
    assert len(tables(engine)) == 3
    assert engine.log[:, Field.TOKENS].tolist() == [16, 10]
    assert engine.log[:, Field.SAMPLED].tolist() == [0, 3]
    serve(engine)


@SAME_KIND
def test_a_group_is_recomputed_whole_and_computes_its_prompt_once_more():
    engine = engine_of("block size 4, recomputed")
    asked = [[*range(30, 39)], [*range(50, 59)]]
    params = [drawn(16, seed=seed, n=4) for seed in (1, 2)]
    expected = [all_tokens(engine.generate([p], q)[0]) for p, q in zip(asked, params)]
    engine.reset_stats()
    names = [engine.submit(p, q) for p, q in zip(asked, params)]
    outputs, before = {}, None
    while not engine.log[:, Field.PREEMPTED].any():
        before = np.asarray(engine.state.scheduler.sequences.length).copy()
        engine.step(max_steps=1)
    # The second one's four sequences are gone together, its blocks too.
    log = engine.log[-1]
    assert log[Field.PREEMPTED] == 1 and log[Field.RUNNING] == 4
    assert log[Field.WAITING] == 1
    assert log[Field.RECOMPUTED] == 9 + (before[4:8] - 9).sum()
    assert engine.log[:-1, Field.RUNNING].max() == 8
    outputs = serve(engine, max_steps=1)
    assert [all_tokens(outputs[name]) for name in names] == expected
    log = engine.log
    # Its prompt counts once again, and each tail for itself.
    assert (
        log[:, Field.TOKENS].sum() == 2 * (9 + 4 * 15) + log[:, Field.RECOMPUTED].sum()
    )


def test_it_is_admitted_only_if_all_its_sequences_can_run(engine):
    first = engine.submit([3, 4], drawn(6, seed=1, n=8))
    more = engine.submit([4, 4], drawn(6, seed=1, n=6))
    second = engine.submit([5, 6], drawn(2, seed=1, n=3))
    third = engine.submit([7, 8], drawn(2, seed=1))
    engine.step(max_steps=2)
    # Two of sixteen rows are free: too few for the second, and nobody overtakes.
    assert engine.log[:, Field.RUNNING].max() == 14
    assert engine.log[-1, Field.WAITING] == 2
    outputs = serve(engine)
    times = [
        outputs[n].metrics.first_scheduled_time for n in (first, more, second, third)
    ]
    assert times == sorted(times)


@SAME_KIND
def test_what_never_fits_at_once_is_refused(engine):
    prompt = [3] * 8
    with pytest.raises(RequestError) as error:
        engine.submit(prompt, drawn(20, n=6))
    assert str(error.value) == (
        "the request's 6 sequences take up to 32 blocks and there are 28, which must "
        "hold them at once; ask for fewer or shorter ones, or raise num_blocks"
    )
    (output,) = engine.generate([prompt], drawn(20, n=5))  # 2 + 5 * 5
    assert [len(tokens) for tokens in all_tokens(output)] == [20] * 5
    # Sequences that share nothing need not run at once.
    (output,) = engine_of("block size 4, nothing shared").generate(
        [prompt], drawn(20, n=6)
    )
    assert [len(tokens) for tokens in all_tokens(output)] == [20] * 6


def test_a_prefix_may_leave_no_room_for_it(engine):
    name = engine.register_prefix([9] * 20)
    (output,) = engine.generate([[3] * 8], drawn(20, n=5))
    assert {c.finish_reason for c in output.outputs} == {"rejected"}
    assert output.metrics.finished_time is not None
    engine.release_prefix(name)


def test_engines_for_any_number_of_sequences_share_their_programs():
    # Only the programs of the last few engines are kept.
    engine = engine_of("block size 4")
    other = make_engine(**{**MANY, **ENGINES["block size 4"], "max_n": 3})
    assert other._device.programs is engine._device.programs
