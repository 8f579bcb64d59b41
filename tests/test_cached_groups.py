"""Several sequences of one prompt beside a prefix cache: each finds what it can."""

import random

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
)
from pythons import SAME_KIND
from scheduling import run_schedule, small_config

from paged_jax import Field
from paged_jax.requests import RequestStatus

TEXT = list(range(10, 31))  # 5 blocks of 4 and a token
# Without a cache, those of test_several_sequences.
SETTINGS = dict(
    max_n=4, num_blocks=26, max_seqs=6, max_requests=8, preemption="recompute"
)


@pytest.fixture
def engine():
    """An engine with nothing in its cache."""
    engine = make_engine(prefix_caching=True, **SETTINGS)
    yield engine
    assert not engine.has_unfinished()
    assert_all_free(engine)


def alone(prompt, params):
    """The tokens of each sequence without a cache."""
    return all_tokens(make_engine(**SETTINGS).generate([prompt], params)[0])


def total(engine, field):
    return int(engine.log[:, field].sum())


@pytest.mark.parametrize("size", [3, 4, 5, 20, 21])
def test_a_cached_prompt_changes_no_token(engine, size):
    prompt, params = TEXT[:size], drawn(9, seed=3, n=3)
    expected = alone(prompt, params)
    assert len(set(expected)) == 3
    engine.generate([prompt], greedy(1))
    for _ in range(2):
        engine.reset_stats()
        assert all_tokens(engine.generate([prompt], params)[0]) == expected
        # The prompt is found once for all, but for the block of its last token.
        hit = (size - 1) // 4 * 4
        assert engine.stats.prefix_hit_tokens == hit
        assert total(engine, Field.TOKENS) == size - hit + 3 * 8
        assert_sound(engine)


def test_what_each_sequence_generates_is_found(engine):
    (output,) = engine.generate([TEXT[:6]], drawn(10, seed=3, n=3))
    assert len(set(all_tokens(output))) == 3
    for tokens in all_tokens(output):
        engine.reset_stats()
        engine.generate([[*TEXT[:6], *tokens, 3]], greedy(1))
        # Of the 16 tokens, the last was never computed.
        assert engine.stats.prefix_hit_tokens == 12


def test_equal_sequences_keep_one_copy_of_each_block(engine):
    params = greedy(12, n=4)
    assert all_tokens(engine.generate([TEXT], params)[0]) == alone(TEXT, params)
    idle(engine)
    cache = engine.state.scheduler.pool.prefix_cache
    assert int(cache.idle.count) == (21 + 11) // 4


def test_groups_that_arrive_together_share_the_prefill(engine):
    asked = [[*TEXT[:20], 40], [*TEXT[:20], 41]]
    params = [drawn(5, seed=i, n=3) for i in range(2)]
    outputs = engine.generate(asked, params)
    for prompt, one, output in zip(asked, params, outputs, strict=True):
        assert all_tokens(output) == alone(prompt, one)
    assert total(engine, Field.HIT_TOKENS) == 20
    assert total(engine, Field.TOKENS) == 21 + 1 + 2 * 3 * 4


def test_a_registered_prefix_is_used_if_it_has_more(engine):
    name = engine.register_prefix(TEXT[:10])
    params = drawn(9, seed=3, n=3)
    for prompt, hit in (([*TEXT[:10], 3], 10), (TEXT[:10], 9), (TEXT[:9], 8)):
        engine.reset_stats()
        assert all_tokens(engine.generate([prompt], params)[0]) == alone(prompt, params)
        assert engine.stats.prefix_hit_tokens == hit
    engine.release_prefix(name)


def test_preempted_groups_find_their_prompts_again():
    engine = make_engine(prefix_caching=True, **SETTINGS)
    asked = [[60 + i, *TEXT[: 11 + i]] for i in range(4)]
    params = [drawn(17, seed=i, n=1 + i) for i in range(4)]
    names = [engine.submit(*one) for one in zip(asked, params, strict=True)]
    outputs = {}
    while engine.has_unfinished():
        poison(engine)
        outputs |= {o.request_id: o for o in engine.step(max_steps=1)}
        assert_sound(engine)
    clean(engine)
    for name, prompt, one in zip(names, asked, params, strict=True):
        assert all_tokens(outputs[name]) == alone(prompt, one)
    assert total(engine, Field.PREEMPTED) > 0
    lost, found = total(engine, Field.RECOMPUTED), engine.stats.prefix_hit_tokens
    once = sum(len(p) + one.n * 16 for p, one in zip(asked, params, strict=True))
    assert total(engine, Field.TOKENS) == once + lost - found
    assert 0 < found < lost
    assert_all_free(engine)


@SAME_KIND
@pytest.mark.parametrize("changes", [{}, {"chunked_prefill": False}, {"block_size": 1}])
@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_everybody_ends(changes, batching):
    config = small_config(
        sharing=True,
        prefix_caching=True,
        batching=batching,
        max_n=3,
        max_prefixes=0,
        max_seqs=12,
        token_budget=24,
        num_blocks=69 if "block_size" in changes else 18,
        **changes,
    )
    rng = random.Random(0)
    found = preempted = 0
    for _ in range(30):
        lengths, count = [], 0
        while count + 3 <= config.max_requests:
            # At full length three fill the pool.
            prompt, n = rng.randint(1, 14), rng.randint(1, 3)
            lengths.append((prompt, [rng.randint(1, 23 - prompt) for _ in range(n)]))
            count += n
        # All prompts are of one token, so that each is another's start.
        log, state = run_schedule(config, lengths)
        ends = np.asarray(state.requests.status)[:count]
        assert (ends == RequestStatus.FINISHED_LENGTH).all()
        assert int(state.pool.num_available) == config.num_blocks
        found += log["HIT_TOKENS"].sum()
        preempted += log["PREEMPTED"].sum()
    assert found > 500
    assert (preempted > 0) == (batching == "continuous")
