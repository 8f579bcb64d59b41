"""The prefix cache: random programs against the oracle, and what each part does.

Every state of every program is compared: free list, reference counts, tables, the order
of idle blocks, what is cached, and the invariants. The oracle knows blocks by the whole
text up to their end. Some programs run with keys that are all equal, so that only the
comparison of tokens and parents tells blocks apart, some with a few starts of runs.
"""

import collections
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_programs import Shape, check, draw_program, draw_texts
from program_text import IN_PLACE, operations_on
from pythons import newest_but

from paged_jax import lru
from paged_jax.block_pool import drop, evict, hold, init_block_pool, take
from paged_jax.cached_blocks import cache_block
from paged_jax.compat import COMPILER_OPTIONS
from paged_jax.prefix_cache import chain_key, find, find_run, init_prefix_cache

LENGTH = 200  # operations in a program

SHAPES = {
    "good keys": (150, Shape()),
    "equal keys": (200, Shape(equal_keys=True)),
    "blocks of 1, runs round the table's end": (
        150,
        Shape(block_size=1, num_blocks=7, homes=4),
    ),
    "a pool of two rows, long runs": (150, Shape(num_blocks=9, homes=7, num_texts=20)),
}


@pytest.mark.parametrize(
    "name",
    newest_but({"good keys"}, SHAPES, "a program of the same kind, with other numbers"),
)
def test_random_programs(name):
    programs, shape = SHAPES[name]
    seen = collections.Counter()
    for seed in range(programs):
        rng = random.Random(f"{name} {seed}")
        texts = draw_texts(rng, shape)
        seen += check(draw_program(rng, LENGTH, shape), texts, shape)
    # The programs are worth little if they seldom get anywhere.
    for event in ("START OK", "SHARE OK", "END OK", "found", "evicted", "merged"):
        assert seen[event] > 2 * programs, event
    assert seen["START OUT_OF_BLOCKS"] > programs / 2


def chain(*blocks):
    """The keys of a chain of blocks."""
    keys = [jnp.zeros(2, jnp.uint32)]
    for tokens in blocks:
        keys.append(chain_key(keys[-1], jnp.array(tokens)))
    return keys[1:]


def test_a_key_depends_on_every_token_its_place_and_what_came_before():
    rng = np.random.default_rng(0)
    base = rng.integers(0, 50000, (3, 8)).tolist()
    keys = {tuple(np.asarray(chain(*base)[-1]))}
    for block in range(3):
        for place in range(8):
            other = [list(b) for b in base]
            other[block][place] += 1
            keys.add(tuple(np.asarray(chain(*other)[-1])))
            if place:  # two neighbours change places
                other = [list(b) for b in base]
                pair = other[block][place - 1 : place + 1]
                other[block][place - 1 : place + 1] = pair[::-1]
                keys.add(tuple(np.asarray(chain(*other)[-1])))
    keys |= {tuple(np.asarray(k)) for k in chain(*base)[:-1]}
    assert len(keys) == 1 + 3 * 8 + 3 * 7 + 2


def test_keys_spread():
    tokens = jnp.stack(jnp.meshgrid(jnp.arange(64), jnp.arange(64)), -1).reshape(-1, 2)
    keys = np.asarray(jax.vmap(chain_key, (None, 0))(jnp.zeros(2, jnp.uint32), tokens))
    for lane in keys.T:
        filled = len(set((lane % 4096).tolist()))
        assert filled == pytest.approx(4096 * (1 - np.exp(-1)), rel=0.05)
    assert len({tuple(k) for k in keys}) == len(tokens)


def test_the_table_is_at_most_half_full():
    for num_blocks in (1, 2, 3, 4, 5, 1000, 1024):
        entries = init_prefix_cache(num_blocks, 4).table.shape[0]
        assert 2 * num_blocks <= entries < 4 * num_blocks + 1


def cached_chain(pool, texts):
    """Caches blocks of one token each, text by text; returns the blocks, too."""
    tables = []
    for text in texts:
        table = []
        for token in text:
            pool, (block,) = take(pool, jnp.ones(1, bool))
            parent = table[-1] if table else jnp.int32(0)
            pool, block = cache_block(
                pool, block, parent, jnp.array([token]), jnp.bool_(True)
            )
            table.append(block)
        tables.append([int(block) for block in table])
    return pool, tables


def everywhere(blocks):
    return jnp.array(blocks), jnp.ones(len(blocks), bool)


def found(pool, text):
    tokens = jnp.array([text], jnp.int32)
    blocks, count = find_run(
        pool.prefix_cache, tokens, jnp.int32(0), jnp.int32(len(text)), len(text)
    )
    return blocks[:count].tolist()


def test_a_run_ends_at_the_first_block_that_is_not_cached():
    pool, (first, second) = cached_chain(
        init_block_pool(9, cached_block_size=1), [[5, 6, 7], [5, 8]]
    )
    assert second[0] == first[0], "equal blocks are one"
    assert found(pool, [5, 6, 7, 7]) == first
    assert found(pool, [5, 8, 7]) == second
    assert found(pool, [6, 7]) == [], "not at the start of a text"
    assert found(pool, [5, 7]) == first[:1]
    assert pool.ref_count[first[0]] == 2


def test_the_least_recently_used_is_evicted_first_and_the_end_of_a_chain_before_it():
    pool, (a, b) = cached_chain(
        init_block_pool(6, cached_block_size=1), [[1, 2, 3], [4, 5]]
    )
    for table in (b, a):
        pool = drop(pool, *everywhere(table))
    assert int(pool.num_free) == 1 and int(pool.num_available) == 6
    # The first text is used again, without its last block.
    pool = hold(pool, *everywhere(b))
    pool = drop(pool, *everywhere(b))
    order = [a[2], a[1], a[0], b[1], b[0]]
    for i in range(5):
        after = evict(pool, jnp.int32(i + 1))
        assert after.free_stack[: after.num_free].tolist()[1:] == order[: i + 1]
        assert int(after.prefix_cache.evicted) == i + 1
    assert found(evict(pool, jnp.int32(2)), [1, 2, 3]) == a[:1]
    # Free blocks are granted before any is evicted.
    pool, granted = take(pool, jnp.ones(3, bool))
    assert sorted(granted.tolist()) == sorted([6, a[2], a[1]])
    assert int(pool.prefix_cache.evicted) == 2


def test_a_block_in_use_is_not_evicted():
    pool, (a,) = cached_chain(init_block_pool(3, cached_block_size=1), [[1, 2]])
    pool = drop(pool, *everywhere(a[1:]))
    pool, granted = take(pool, jnp.ones(2, bool))
    assert sorted(granted.tolist()) == sorted([a[1], 3])
    assert int(pool.num_available) == 0 and found(pool, [1, 2]) == a[:1]


def test_links_of_the_null_block_stay_empty():
    links = lru.push(lru.init_lru(4), jnp.array([3, 0, 1]), jnp.array([1, 0, 1], bool))
    links = lru.push(links, jnp.array([2]), jnp.array([False]))
    assert (int(links.first), int(links.last), int(links.count)) == (3, 1, 2)
    for block in (1, 3):
        links = lru.unlink(links, jnp.int32(block), jnp.bool_(False))
        links = lru.unlink(links, jnp.int32(block), jnp.bool_(True))
    assert (int(links.first), int(links.last), int(links.count)) == (0, 0, 0)
    assert not links.next.any() and not links.previous.any()


def operations(num_blocks):
    pool = init_block_pool(num_blocks, cached_block_size=3)
    blocks, mask = jnp.zeros(64, jnp.int32), jnp.zeros(64, bool)
    zero, tokens = jnp.int32(0), jnp.zeros(3, jnp.int32)

    def lookup(pool, tokens, limit):
        run = find_run(pool.prefix_cache, tokens[None], jnp.int32(0), limit, 64)
        return pool, run

    return {
        "take": (take, pool, mask),
        "hold": (hold, pool, blocks, mask),
        "drop": (drop, pool, blocks, mask),
        "evict": (evict, pool, zero),
        "cache_block": (cache_block, pool, zero, zero, tokens, mask[0]),
        "find_run": (lookup, pool, jnp.zeros(192, jnp.int32), zero),
    }


@pytest.mark.parametrize("name", operations(1))
def test_the_work_follows_the_blocks_touched_and_not_the_pool(name):
    temporaries = []
    for num_blocks in (1236, 123456):
        function, pool, *arguments = operations(num_blocks)[name]
        program = jax.jit(function, donate_argnums=0).lower(pool, *arguments)
        program = program.compile(compiler_options=COMPILER_OPTIONS)
        memory = program.memory_analysis()
        leaves = jax.tree.leaves(pool)
        assert memory.alias_size_in_bytes == sum(leaf.nbytes for leaf in leaves)
        for leaf in leaves:
            if leaf.ndim:
                dims = ",".join(map(str, leaf.shape))
                assert operations_on(program.as_text(), dims) <= IN_PLACE
        temporaries.append(memory.temp_size_in_bytes)
    assert temporaries[0] == temporaries[1] < 8192


def test_a_search_ends_at_the_first_empty_place():
    cache = init_prefix_cache(4, 2)
    key = jnp.array([7, 1], jnp.uint32)
    place = find(cache, key, jnp.int32(0), jnp.array([1, 2]))
    assert int(place) == 7 % cache.table.shape[0] and cache.table[place] == 0
