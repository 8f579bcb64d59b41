"""Automatic sharing: prompts find what earlier ones, or each other, have computed."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import (
    assert_all_free,
    assert_sound,
    greedy,
    idle,
    make_engine,
    poison,
    serve,
    tiny_model,
    tokens_of,
)
from pythons import SAME_KIND, newest_but
from scheduling import run_schedule, small_config

from paged_jax import Field, SamplingParams, prefix_cache
from paged_jax.block_pool import evict
from paged_jax.requests import RequestStatus
from paged_jax.shared_blocks import read_counts

TEXT = list(range(10, 31))  # 5 blocks of 4 and a token


@pytest.fixture(scope="module")
def shared():
    return make_engine(prefix_caching=True)


@pytest.fixture
def engine(shared):
    """An engine with nothing in its cache."""
    yield shared
    assert not shared.has_unfinished()
    assert_all_free(shared)
    empty_cache(shared)
    shared.reset_stats()


def empty_cache(engine):
    """Evicts all that is cached, once the ended sequences have given it up."""
    idle(engine)
    device = engine._device
    pool = device.state.scheduler.pool
    count = int(pool.prefix_cache.idle.count)
    pool = _evict(pool, count)
    scheduler = device.state.scheduler
    scheduler = type(scheduler)(**{**vars(scheduler), "pool": pool})
    device.state = type(device.state)(scheduler, device.state.cache)
    assert int(pool.num_free) == engine.config.total_blocks


@jax.jit
def _evict(pool, count):
    return read_counts(evict(pool, count))[0]


def log_of(engine, field):
    return engine.log[:, field].astype(int)


def total(engine, field):
    return int(log_of(engine, field).sum())


@functools.cache
def alone(prompt, output):
    return tokens_of(make_engine().generate([list(prompt)], greedy(output)))[0]


# ------------------------------------------------------------------ the same tokens


def workload(scale):
    """Prompts of shared and own parts, greedy and drawn; some start as others do."""
    rng = np.random.default_rng(1)
    stem = rng.integers(3, 128, 40 * scale).tolist()
    asked = []
    for i in range(10):
        keep = int(rng.choice([0, 8, 12, 16, 25])) * scale
        own = rng.integers(3, 128, rng.integers(1, 12)).tolist()
        prompt = stem[:keep] if i % 4 == 3 and keep else [*stem[:keep], *own]
        output = int(rng.integers(4, 26))
        params = greedy(output)
        if i % 3 == 2:
            params = SamplingParams(
                temperature=0.9, seed=i, max_tokens=output, ignore_eos=True
            )
        asked.append((prompt, params))
    return asked + asked[:2]  # the same prompts again


@functools.cache
def expected(scale):
    """The tokens of each request of the workload when it is served alone."""
    engine = make_engine()
    if scale > 1:
        engine = make_engine(
            tiny_model(max_position_embeddings=1024),
            max_model_len=600,
            num_blocks=150,
            token_budget=64,
        )
    return [tokens_of(engine.generate([p], q))[0] for p, q in workload(scale)]


ENGINES = {
    "block size 4": dict(),
    "block size 4, static": dict(batching="static"),
    "block size 1, a host sync each step": dict(
        block_size=1, num_blocks=80, steps_per_sync=1, token_budget=8, max_prefixes=0
    ),
    "block size 2, whole prompts": dict(
        block_size=2, num_blocks=40, chunked_prefill=False, token_budget=48
    ),
    "block size 16, reference attention": dict(
        block_size=16, num_blocks=6, attention_backend="reference", token_budget=8
    ),
    "block size 256": dict(
        block_size=256, num_blocks=9, max_model_len=600, token_budget=64
    ),
}
PREEMPTS = {
    "block size 4",
    "block size 1, a host sync each step",
    "block size 16, reference attention",
}


@pytest.mark.parametrize(
    "name",
    newest_but(
        {"block size 4"}, ENGINES, "a program of the same kind, of another size"
    ),
)
def test_a_hit_changes_no_token(name):
    changes = ENGINES[name]
    scale = 20 if changes.get("block_size") == 256 else 1
    model = tiny_model(max_position_embeddings=1024) if scale > 1 else tiny_model()
    asked = workload(scale)
    prompts, params = zip(*asked)
    engine = make_engine(model, prefix_caching=True, **changes)
    assert tokens_of(engine.generate(prompts, params)) == expected(scale)
    assert engine.stats.prefix_hit_tokens > 0
    if name in PREEMPTS:
        assert total(engine, Field.PREEMPTED) > 1, "the pool is too large to preempt"
        assert engine.stats.evicted_blocks > 5
    one_by_one = [tokens_of(engine.generate([p], q))[0] for p, q in asked]
    assert one_by_one == expected(scale)
    again = [tokens_of(engine.generate([p], q))[0] for p, q in reversed(asked)]
    assert again == expected(scale)[::-1]
    assert total(engine, Field.COPIED_BLOCKS) == 0, "a cached block is never written"
    assert_all_free(engine)


@SAME_KIND
def test_keys_that_collide_change_no_token(monkeypatch):
    monkeypatch.setattr(prefix_cache, "_mix", jnp.zeros_like)
    # Settings of its own, so that the program with these keys serves nobody else.
    engine = make_engine(prefix_caching=True, max_stop_ids=3, token_budget=8)
    prompts, params = zip(*workload(1))
    assert tokens_of(engine.generate(prompts, params)) == expected(1)
    assert engine.stats.prefix_hit_tokens > 0
    assert not engine.state.scheduler.pool.prefix_cache.key.any()


@pytest.mark.parametrize(
    "name",
    newest_but(
        {"block size 4"},
        ["block size 4", "block size 16, reference attention"],
        "test_equality has the other backend",
    ),
)
def test_nothing_is_read_of_blocks_that_were_evicted(name):
    engine = make_engine(prefix_caching=True, **ENGINES[name])
    names = [engine.submit(prompt, params) for prompt, params in workload(1)]
    outputs = {}
    while engine.has_unfinished():
        poison(engine)
        outputs |= {output.request_id: output for output in engine.step(max_steps=1)}
    assert tokens_of(outputs[name] for name in names) == expected(1)
    assert engine.stats.prefix_hit_tokens > 0 and engine.stats.evicted_blocks > 5


# ------------------------------------------------------------------ what is found


@pytest.mark.parametrize("size", [1, 2, 4, 5, 8, 9, 20, 21])
def test_all_whole_blocks_are_found_but_the_last_token_is_computed(engine, size):
    prompt = TEXT[:size]
    first = tokens_of(engine.generate([prompt], greedy(1)))
    assert total(engine, Field.TOKENS) == size
    engine.reset_stats()
    assert tokens_of(engine.generate([prompt], greedy(1))) == first
    hit = (size - 1) // 4 * 4
    assert engine.stats.prefix_hit_tokens == hit
    assert total(engine, Field.TOKENS) == size - hit >= 1


def test_generated_tokens_are_found_too(engine):
    (output,) = engine.generate([TEXT[:6]], greedy(10))
    text = [*TEXT[:6], *output.outputs[0].token_ids]
    engine.reset_stats()
    engine.generate([[*text, 3]], greedy(1))
    # Of its 16 tokens, the last was never computed.
    assert engine.stats.prefix_hit_tokens == 12


def test_only_the_start_of_a_text_is_found(engine):
    engine.generate([TEXT], greedy(1))
    engine.reset_stats()
    for prompt in ([99, *TEXT], TEXT[4:], [*TEXT[:7], 99, *TEXT[8:]]):
        engine.generate([prompt], greedy(1))
    assert engine.stats.prefix_hit_tokens == 0 + 0 + 4


def test_equal_blocks_of_a_static_batch_become_one():
    engine = make_engine(prefix_caching=True, batching="static")
    engine.generate([TEXT, TEXT, TEXT[:9]], greedy(8))
    idle(engine)
    # What they have cached: 6 blocks of the first two, those of the third included.
    cache = engine.state.scheduler.pool.prefix_cache
    ends = (len(TEXT) + 7) // 4 + (9 + 7) // 4 - 2
    assert int(cache.idle.count) == ends
    assert_all_free(engine)


def test_a_registered_prefix_gives_its_part_filled_block_as_well(engine):
    name = engine.register_prefix(TEXT[:10])
    engine.reset_stats()
    engine.generate([[*TEXT[:10], 3], [*TEXT[:9], 3]], greedy(1))
    assert log_of(engine, Field.HIT_TOKENS).max() == 10 + 8
    assert total(engine, Field.TOKENS) == 1 + 2
    engine.release_prefix(name)
    engine.reset_stats()
    # Its whole blocks are still there.
    engine.generate([[*TEXT[:10], 3]], greedy(1))
    assert engine.stats.prefix_hit_tokens == 8


# ------------------------------------------------------------------ together


def test_requests_that_arrive_together_share_the_prefill(engine):
    asked = [[*TEXT[:20], 40 + i] for i in range(4)]
    engine.generate(asked, greedy(3))
    # The first computes all of its 21 tokens, the others their last one each.
    assert total(engine, Field.HIT_TOKENS) == 3 * 20
    assert total(engine, Field.TOKENS) == 21 + 3 + 4 * 2
    assert log_of(engine, Field.RUNNING)[:3].tolist() == [1, 1, 4]


def test_others_are_not_kept_waiting_by_a_text_that_is_being_generated(engine):
    text = [*TEXT[:5], *alone(tuple(TEXT[:5]), 40)]
    engine.submit(TEXT[:5], greedy(40))
    engine.step(max_steps=4)
    engine.reset_stats()
    engine.submit(text, greedy(1))
    engine.step(max_steps=1)
    assert log_of(engine, Field.ADMITTED).tolist() == [1]
    serve(engine)


def test_who_waits_for_an_aborted_one_goes_on_with_what_it_has_left(engine):
    prompt = [*TEXT, *TEXT, *TEXT[:10]]
    first = engine.submit([*prompt, 50], greedy(2))
    second = engine.submit([*prompt, 51], greedy(2))
    engine.step(max_steps=2)
    assert log_of(engine, Field.WAITING).tolist() == [1, 1]
    engine.abort(first)
    engine.reset_stats()
    outputs = serve(engine)
    assert engine.stats.prefix_hit_tokens == 32
    assert tokens_of([outputs[second]])[0] == alone((*prompt, 51), 2)


def test_a_preempted_sequence_finds_its_own_blocks(engine):
    asked = [[60 + i, *TEXT[:5]] for i in range(4)]
    own = [alone(tuple(p), 26) for p in asked]
    assert tokens_of(engine.generate(asked, greedy(26))) == own
    assert total(engine, Field.PREEMPTED) > 0
    computed, lost = total(engine, Field.TOKENS), total(engine, Field.RECOMPUTED)
    # Each computes its prompt and all but its last token once.
    once = 4 * (6 + 25)
    assert computed == once + lost - engine.stats.prefix_hit_tokens
    assert 0 < engine.stats.prefix_hit_tokens < lost


FULL = [
    {"num_blocks": 12},
    {"num_blocks": 12, "chunked_prefill": False},
    {"num_blocks": 33, "block_size": 1},
]


@SAME_KIND
@pytest.mark.parametrize("changes", FULL)
@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_everybody_ends(changes, batching):
    config = small_config(
        sharing=True, prefix_caching=True, batching=batching, token_budget=24, **changes
    )
    rng = random.Random(0)
    found = preempted = 0
    for _ in range(40):
        lengths = []
        for _ in range(rng.randint(1, config.max_requests)):
            prompt = rng.randint(1, 23)
            lengths.append((prompt, rng.randint(1, 32 - prompt)))
        # All prompts are of one token, so that each is another's start.
        log, state = run_schedule(config, lengths)
        ends = np.asarray(state.requests.status)[: len(lengths)]
        assert (ends == RequestStatus.FINISHED_LENGTH).all()
        assert int(state.pool.num_available) == config.num_blocks
        found += log["HIT_TOKENS"].sum()
        preempted += log["PREEMPTED"].sum()
    assert found > 1000
    assert (preempted > 0) == (batching == "continuous")


# ------------------------------------------------------------------ what is kept


def test_what_was_used_least_recently_is_evicted_first(engine):
    a, b, c = ([token] * 21 for token in (40, 50, 60))
    for prompt in (a, b, a, c):
        engine.generate([prompt], greedy(1))
    # 5 blocks each are idle, of 20.
    assert log_of(engine, Field.IDLE_BLOCKS)[-1] == 15
    assert engine.stats.evicted_blocks == 0
    engine.generate([[70] * 37], greedy(1))  # takes 10: 5 are free
    assert engine.stats.evicted_blocks == 5
    for prompt, hit in ((a, 20), (c, 20), (b, 0)):
        engine.reset_stats()
        engine.generate([prompt], greedy(1))
        assert engine.stats.prefix_hit_tokens == hit


def test_the_end_of_a_text_is_evicted_before_its_start(engine):
    engine.generate([TEXT], greedy(1))
    engine.generate([[70] * 60], greedy(1))  # 15 blocks, and 15 are free
    assert engine.stats.evicted_blocks == 0
    engine.generate([[80] * 9], greedy(1))  # takes 3
    engine.reset_stats()
    engine.generate([TEXT], greedy(1))
    assert engine.stats.prefix_hit_tokens == 8


def test_blocks_in_use_are_counted_once_in_the_log(engine):
    asked = [[*TEXT[:20], 40 + i] for i in range(4)]
    engine.generate([asked[0]], greedy(1))
    engine.reset_stats()
    for prompt in asked:
        engine.submit(prompt, greedy(3))
    engine.step(max_steps=1)
    log = {field.name: int(engine.log[0, field]) for field in Field}
    assert log["LOGICAL_BLOCKS"] == 4 * 6 and log["PHYSICAL_BLOCKS"] == 5 + 4
    assert log["LIVE"] == 20 + 4 and log["RESERVED"] == 4 * (5 + 4)
    assert log["FREE_BLOCKS"] == 20 - 9 and log["IDLE_BLOCKS"] == 0
    serve(engine)
    assert_sound(engine)


def test_turned_off_it_leaves_nothing_in_the_state():
    off = make_engine().state.scheduler.pool
    on = make_engine(prefix_caching=True).state.scheduler.pool
    assert off.prefix_cache == () and len(jax.tree.leaves(off)) == 3
    assert len(jax.tree.leaves(on)) == 14
