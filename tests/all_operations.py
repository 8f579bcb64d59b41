"""Programs of all operations on the block memory, run by JAX and by the oracle.

A program is `i32[N, 4]`: an opcode and three arguments in each row. JAX runs it as one
jitted scan over an empty pool, and returns one row of integers for each state; the
oracle writes the same row in plain Python, and the two must be equal in every place.

Keys and values are made as a model's are: those of a token depend on it and on all that
come before it. They are written to small caches, copied, and moved as a step would do
it, and looked up through the tables after every operation.
"""

import collections
import dataclasses
import enum
import functools
import itertools
import random
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import often
from oracles.memory import Memory

from paged_jax import beam_tables, block_tables, invariants, prefix_cache, swap
from paged_jax.block_pool import BlockPool, evict, init_block_pool
from paged_jax.block_tables import (
    Status,
    grant_row,
    grant_writes,
    no_copies,
    release_row,
    write_needs,
)
from paged_jax.cached_blocks import cache_full_blocks
from paged_jax.config import EngineConfig
from paged_jax.kv_cache import copy_blocks, init_kv_cache, move_blocks, write_kv
from paged_jax.memory_managers import MANAGERS
from paged_jax.sequences import (
    Sequences,
    blocks_for,
    init_sequences,
    on_host,
    slots_of,
)
from paged_jax.submit import init_scheduler
from paged_jax.swap import SwapSpace, forget_moves, init_swap_space, release_host_rows


class Op(enum.IntEnum):
    """Opcodes, with their arguments; several rows are given as bits."""

    NOTHING = 0
    ALLOCATE = 1  # row, tokens, text: with new blocks, all filled at once
    START = 2  # row, tokens, text: with what the cache holds, the rest to be filled
    APPEND = 3  # rows, tokens as bits
    FILL = 4  # rows, tokens
    FORK = 5  # source, target
    SHARE_PREFIX = 6  # source, target, tokens
    COPY_ON_WRITE = 7  # row, logical block
    RELEASE = 8  # row
    ABORT = 9  # rows: all blocks of a request, in whatever state it is
    EVICT = 10  # blocks
    REPOINT = 11  # rows, their parents as digits of base 8
    SWAP_OUT = 12  # rows
    SWAP_IN = 13  # rows, tokens to have blocks for beyond those that a row has


class Shape(NamedTuple):
    """How large the memory is; it is small, so that all of its limits are met."""

    num_blocks: int = 13
    host_blocks: int = 9
    num_rows: int = 6
    table_width: int = 5
    block_size: int = 4
    num_texts: int = 8
    caching: bool = True

    @property
    def capacity(self) -> int:
        """Most tokens of a row."""
        return self.table_width * self.block_size


class Trace(NamedTuple):
    """What JAX says of each state.

    Attributes:
      status: i32[N].
      holds: name of each invariant -> bool[N].
      states: i32[N, K], see `_summary`.
    """

    status: np.ndarray
    holds: dict[str, np.ndarray]
    states: np.ndarray


NUM_LAYERS = 2


# ---------------------------------------------------------------------------- in JAX


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
    """All that operations change.

    Attributes:
      pool: the device's blocks.
      space: the host's, and the moves from one to the other.
      sequences: the rows.
      tokens: i32[S + texts, T * B]. The tokens of each row, then texts to start from.
    """

    pool: BlockPool
    space: SwapSpace
    sequences: Sequences
    tokens: jax.Array


class _Done(NamedTuple):
    """What an operation returns.

    Attributes:
      state: keys and values are still where they were.
      status: i32[].
      copies: to be made before anything is written.
      written: i32[S]. How many of each row's last tokens are to be written.
      filled_from: i32[S]. Tokens whose full blocks are cached already.
    """

    state: _State
    status: jax.Array
    copies: block_tables.BlockCopies
    written: jax.Array
    filled_from: jax.Array


def _values(tokens):
    """Stands for keys and values: of each token, and all before it, one i32 number."""
    weights = np.random.default_rng(0).integers(1, 2**31, tokens.shape[-1])
    return jnp.cumsum((tokens + 1) * jnp.asarray(weights, jnp.int32), axis=-1)


def _operations(shape: Shape):
    """Returns a function (state, a, b, c) -> `_Done` for each opcode."""
    size, rows = shape.block_size, jnp.arange(shape.num_rows)

    def bits(value):
        return (value >> rows) & 1

    def done(state, status=Status.OK, copies=None, written=None, filled_from=None):
        length = state.sequences.length
        return _Done(
            state,
            jnp.int32(status),
            no_copies(shape.num_rows) if copies is None else copies,
            jnp.zeros_like(length) if written is None else written,
            length if filled_from is None else filled_from,
        )

    def changed(state, pool, sequences, **others):
        return dataclasses.replace(state, pool=pool, sequences=sequences, **others)

    def with_text(tokens, row, text, ok):
        at = jnp.where(ok, row, 0)
        return tokens.at[at].set(jnp.where(ok, tokens[text], tokens[at]))

    def nothing(state, a, b, c):
        return done(state)

    def allocate(state, row, num_tokens, text):
        pool, sequences, status = block_tables.allocate(
            state.pool, state.sequences, row, num_tokens, block_size=size
        )
        ok = status == Status.OK
        written = jnp.where((rows == row) & ok, num_tokens, 0)
        tokens = with_text(state.tokens, row, text, ok)
        state = changed(state, pool, sequences, tokens=tokens)
        return done(state, status, None, written, sequences.length - written)

    def start(state, row, num_tokens, text):
        pool, blocks, count = state.pool, None, jnp.int32(0)
        idle = jnp.int32(0)
        if shape.caching:
            limit = (num_tokens - 1) // size
            blocks, count = prefix_cache.find_run(
                pool.prefix_cache, state.tokens, text, limit, shape.table_width
            )
            found = jnp.arange(shape.table_width) < count
            idle = jnp.sum(found & (pool.ref_count[blocks] == 0))
        need = blocks_for(num_tokens, size)
        short = need - count + idle > pool.num_available
        status = jnp.where(short, Status.OUT_OF_BLOCKS, Status.OK)
        taken = state.sequences.status[row] != 0
        status = jnp.where(taken, Status.ROW_IN_USE, status)
        ok = status == Status.OK
        pool, sequences = grant_row(
            pool,
            state.sequences,
            row,
            need,
            count * size,
            ok,
            shared_blocks=blocks,
            num_shared=count,
        )
        tokens = with_text(state.tokens, row, text, ok)
        return done(changed(state, pool, sequences, tokens=tokens), status)

    def append(state, appending, new, c):
        appending = bits(appending) == 1
        before = state.sequences.length
        pool, sequences, copies, status = block_tables.append(
            state.pool, state.sequences, appending, block_size=size
        )
        written = sequences.length - before
        at = jnp.minimum(before, shape.capacity - 1)
        old = state.tokens[rows, at]
        tokens = state.tokens.at[rows, at].set(jnp.where(written, bits(new), old))
        state = changed(state, pool, sequences, tokens=tokens)
        return done(state, status, copies, written, before)

    def fill(state, filling, num_tokens, c):
        pool, sequences = state.pool, state.sequences
        before = sequences.length
        room = sequences.num_blocks * size - before
        room = jnp.where(sequences.status == 1, room, 0)
        num_new = bits(filling) * jnp.minimum(room, num_tokens)
        growing, copying = write_needs(pool, sequences, num_new, size)
        short = jnp.sum(growing | copying) > pool.num_available
        status = jnp.where(short, Status.OUT_OF_BLOCKS, Status.OK)
        ok = status == Status.OK
        pool, sequences, copies = grant_writes(
            pool, sequences, growing & ok, copying & ok, size
        )
        num_new = jnp.where(ok, num_new, 0)
        sequences = dataclasses.replace(sequences, length=before + num_new)
        return done(changed(state, pool, sequences), status, copies, num_new, before)

    def share_prefix(state, source, target, num_tokens):
        pool, sequences, status = block_tables.share_prefix(
            state.pool, state.sequences, source, target, num_tokens, block_size=size
        )
        tokens = with_text(state.tokens, target, source, status == Status.OK)
        return done(changed(state, pool, sequences, tokens=tokens), status)

    def fork(state, source, target, c):
        pool, sequences, status = block_tables.fork(
            state.pool, state.sequences, source, target, block_size=size
        )
        tokens = with_text(state.tokens, target, source, status == Status.OK)
        return done(changed(state, pool, sequences, tokens=tokens), status)

    def copy_on_write(state, row, logical, c):
        pool, sequences, copies, status = block_tables.copy_on_write(
            state.pool, state.sequences, row, logical
        )
        return done(changed(state, pool, sequences), status, copies)

    def release(state, row, b, c):
        pool, sequences, status = block_tables.release(state.pool, state.sequences, row)
        return done(changed(state, pool, sequences), status)

    def abort(state, ending, b, c):
        ending = bits(ending) == 1
        swapped = ending & on_host(state.sequences)
        space, sequences = release_host_rows(state.space, state.sequences, swapped, 0)
        sequences = dataclasses.replace(sequences, request=rows)

        def release_one(row, both):
            ends = ending[row] & (both[1].status[row] != 0)
            return release_row(*both, row, ends)

        pool, sequences = jax.lax.fori_loop(
            0, shape.num_rows, release_one, (state.pool, sequences)
        )
        return done(changed(state, pool, sequences, space=space))

    def evict_some(state, count, b, c):
        if not shape.caching:
            return done(state)
        pool = state.pool
        pool = evict(pool, jnp.minimum(count, pool.prefix_cache.idle.count))
        return done(changed(state, pool, state.sequences))

    def repoint(state, beams, parents, c):
        valid = bits(beams) == 1
        parents = (parents >> 3 * rows) & 7
        pool, sequences = beam_tables.repoint(
            state.pool, state.sequences, rows, parents, valid
        )
        taken = jnp.where(valid, parents, rows)
        tokens = state.tokens.at[rows].set(state.tokens[taken])
        return done(changed(state, pool, sequences, tokens=tokens))

    def swap_out(state, going, b, c):
        pool, space, sequences, status = swap.swap_out(
            state.pool, state.space, state.sequences, bits(going) == 1, block_size=size
        )
        return done(changed(state, pool, sequences, space=space), status)

    def swap_in(state, coming, num_new, c):
        coming = bits(coming) == 1
        need = blocks_for(state.sequences.length + num_new, size)
        pool, space, sequences, status = swap.swap_in(
            state.pool, state.space, state.sequences, coming, need
        )
        length = sequences.length
        start = jnp.where(coming & (status == Status.OK), 0, length)
        state = changed(state, pool, sequences, space=space)
        return done(state, status, filled_from=start)

    return {
        Op.NOTHING: nothing,
        Op.ALLOCATE: allocate,
        Op.START: start,
        Op.APPEND: append,
        Op.FILL: fill,
        Op.FORK: fork,
        Op.SHARE_PREFIX: share_prefix,
        Op.COPY_ON_WRITE: copy_on_write,
        Op.RELEASE: release,
        Op.ABORT: abort,
        Op.EVICT: evict_some,
        Op.REPOINT: repoint,
        Op.SWAP_OUT: swap_out,
        Op.SWAP_IN: swap_in,
    }


@functools.partial(often.jit, static_argnames="shape")
def _run(program, texts, shape: Shape) -> Trace:
    size = shape.block_size
    operations = _operations(shape)
    position = jnp.arange(shape.capacity)
    row = jnp.repeat(jnp.arange(shape.num_rows), shape.capacity)

    def slots(sequences):
        """The slot of each position of each row, i32[S, T * B]."""
        places = jnp.tile(position, shape.num_rows)
        return slots_of(sequences, row, places, size).reshape(-1, shape.capacity)

    def step(carry, operation):
        state, scheduler, cache, host = carry
        code, a, b, c = operation
        branches = [operations[op] for op in Op]
        done = jax.lax.switch(code, branches, state, a, b, c)
        pool, space, sequences = done.state.pool, done.state.space, done.state.sequences
        tokens = done.state.tokens
        length = sequences.length[:, None]
        written = (position >= length - done.written[:, None]) & (position < length)
        values = _values(tokens[: shape.num_rows])
        into = jnp.where(written, slots(sequences), 0).ravel()
        cache, _ = move_blocks(host, cache, **vars(space.ins))
        host, _ = move_blocks(cache, host, **vars(space.outs))
        cache = copy_blocks(cache, *done.copies)
        for layer in range(NUM_LAYERS):
            kv = (values + layer).reshape(-1, 1, 1)
            cache = write_kv(cache, layer, kv, -kv, into)
        holds = {"writes_private": invariants.writes_are_private(pool, into, size)}
        if shape.caching:
            cached = pool.prefix_cache.parent[into // size] >= 0
            holds["no_cached_block_written"] = ~jnp.any((into >= size) & cached)

        scheduler = dataclasses.replace(
            scheduler,
            pool=pool,
            sequences=sequences,
            requests=dataclasses.replace(scheduler.requests, tokens=tokens),
        )
        scheduler = cache_full_blocks(scheduler, done.filled_from)
        pool, sequences = scheduler.pool, scheduler.sequences
        block, offset = jnp.divmod(slots(sequences), size)
        expected = values + jnp.arange(NUM_LAYERS)[:, None, None]
        swapped = on_host(sequences)[:, None]

        def read(of_cache):
            on_device = of_cache(cache)[:, block, offset, 0, 0]
            block_of_host = jnp.where(swapped, block, 0)
            return jnp.where(
                swapped, of_cache(host)[:, block_of_host, offset, 0, 0], on_device
            )

        right = (read(lambda c: c.k) == expected) & (read(lambda c: c.v) == -expected)
        holds["rows_read_their_own"] = jnp.all(right | (position >= length))
        state = _State(pool, forget_moves(space), sequences, tokens)
        carry = state, scheduler, cache, host
        return carry, (done.status, holds, state)

    config = EngineConfig(
        block_size=size,
        num_blocks=shape.num_blocks,
        max_model_len=shape.capacity,
        max_seqs=shape.num_rows,
        max_requests=shape.num_rows + shape.num_texts,
        max_prefixes=0,
    )
    scheduler = init_scheduler(config.step_config(), MANAGERS["paged"], False)
    sequences = init_sequences(shape.num_rows, shape.table_width)
    rows = jnp.arange(shape.num_rows, dtype=jnp.int32)
    tokens = jnp.zeros_like(scheduler.requests.tokens)
    state = _State(
        init_block_pool(shape.num_blocks, size if shape.caching else 0),
        init_swap_space(shape.host_blocks),
        dataclasses.replace(sequences, request=rows),
        tokens.at[shape.num_rows : shape.num_rows + shape.num_texts].set(texts),
    )
    scheduler = dataclasses.replace(scheduler, pool=state.pool, sequences=sequences)
    cache, host = (
        init_kv_cache(NUM_LAYERS, num_blocks, size, 1, 1, jnp.int32)
        for num_blocks in (shape.num_blocks, shape.host_blocks)
    )
    _, (status, holds, states) = jax.lax.scan(
        step, (state, scheduler, cache, host), tuple(program.T)
    )
    # Of all states at once: a state at a time costs more than the operations do.
    holds |= jax.vmap(_check_blocks)(states)
    return Trace(status, holds, jax.vmap(functools.partial(_summary, shape))(states))


def _check_blocks(state: _State) -> dict[str, jax.Array]:
    """Checks both pools, each against the rows whose tables name its blocks."""
    sequences, swapped = state.sequences, on_host(state.sequences)
    there = jax.tree.map(
        lambda x: jnp.where(swapped.reshape(-1, *[1] * (x.ndim - 1)), x, 0), sequences
    )
    there = dataclasses.replace(there, status=swapped.astype(jnp.int32))
    host = invariants.check_blocks(state.space.pool, there)
    device = invariants.check_blocks(state.pool, sequences)
    return device | {f"host: {name}": value for name, value in host.items()}


def _summary(shape: Shape, state: _State) -> jax.Array:
    """Puts a state into one row of integers, part by part as in `_expected`."""
    pool, sequences, tokens = state.pool, state.sequences, state.tokens

    def free_list(pool):
        place = jnp.arange(pool.num_blocks)
        return jnp.where(place < pool.num_free, pool.free_stack[:-1], 0)

    parts = [
        free_list(pool),
        pool.ref_count[1:],
        free_list(state.space.pool),
        state.space.pool.ref_count[1:],
        sequences.block_table,
        sequences.length,
        sequences.status,
        tokens[: shape.num_rows],
    ]
    if shape.caching:
        cache = pool.prefix_cache

        def visit(at, _):
            return cache.idle.next[at], at

        _, idle = jax.lax.scan(visit, cache.idle.first, length=shape.num_blocks)
        cached = jnp.where((cache.parent >= 0)[:, None], cache.tokens, -1)
        parts += [idle, cache.parent[1:], cached[1:]]
    return jnp.concatenate([part.ravel() for part in parts])


# ------------------------------------------------------------------------- the oracle


def _parts(shape: Shape) -> dict[str, int]:
    """The parts of a state's row, and how long each of them is."""
    parts = {
        "free list": shape.num_blocks,
        "reference counts": shape.num_blocks,
        "host's free list": shape.host_blocks,
        "host's reference counts": shape.host_blocks,
        "block tables": shape.num_rows * shape.table_width,
        "lengths": shape.num_rows,
        "statuses": shape.num_rows,
        "tokens": shape.num_rows * shape.capacity,
    }
    if shape.caching:
        parts |= {
            "idle blocks": shape.num_blocks,
            "parents": shape.num_blocks,
            "tokens of cached blocks": shape.num_blocks * shape.block_size,
        }
    return parts


def _expected(shape: Shape, memory: Memory) -> list[int]:
    """Puts the oracle's state into one row of integers."""
    tables, row = memory.tables, []
    for pool in (memory.device, memory.host):
        row += pool.free + [0] * (len(pool.ref_count) - 1 - len(pool.free))
        row += pool.ref_count[1:]
    for i in range(shape.num_rows):
        table = tables.get(i, [])
        row += table + [0] * (shape.table_width - len(table))
    row += memory.length
    row += [
        (5 if i in memory.swapped else 1) if i in tables else 0
        for i in range(shape.num_rows)
    ]
    for i in range(shape.num_rows):
        row += memory.texts[i]
    if shape.caching:
        size, nothing = shape.block_size, [-1] * shape.block_size
        row += [*memory.idle] + [0] * (shape.num_blocks - len(memory.idle))
        chains = [memory.chain_of.get(b) for b in range(1, shape.num_blocks + 1)]
        row += [memory.cached.get(c[:-size], 0) if c else -1 for c in chains]
        for chain in chains:
            row += chain[-size:] if chain else nothing
    return row


def apply(memory: Memory, operation) -> str:
    """Carries out one operation in the oracle; returns the name of the status."""
    code, a, b, c = operation

    def rows(bits):
        return [row for row in range(memory.num_rows) if bits >> row & 1]

    if code == Op.ALLOCATE:
        return memory.allocate(a, b, c)
    if code == Op.START:
        return memory.start(a, b, c)
    if code == Op.APPEND:
        return memory.append({row: b >> row & 1 for row in rows(a)})
    if code == Op.FILL:
        return memory.fill(rows(a), b)
    if code == Op.FORK:
        return memory.fork(a, b)
    if code == Op.SHARE_PREFIX:
        return memory.share_prefix(a, b, c)
    if code == Op.COPY_ON_WRITE:
        return memory.copy_on_write(a, b)
    if code == Op.RELEASE:
        return memory.release(a)
    if code == Op.ABORT:
        return memory.abort(rows(a))
    if code == Op.EVICT:
        return memory.evict(a)
    if code == Op.REPOINT:
        return memory.repoint({row: b >> 3 * row & 7 for row in rows(a)})
    if code == Op.SWAP_OUT:
        return memory.swap_out(rows(a))
    if code == Op.SWAP_IN:
        return memory.swap_in(rows(a), b)
    return "OK"


# --------------------------------------------------------------------------- programs

WEIGHTS = {
    Op.ALLOCATE: 2,
    Op.START: 8,
    Op.APPEND: 18,
    Op.FILL: 10,
    Op.FORK: 8,
    Op.SHARE_PREFIX: 3,
    Op.COPY_ON_WRITE: 2,
    Op.RELEASE: 2,
    Op.ABORT: 2,
    Op.EVICT: 1,
    Op.REPOINT: 5,
    Op.SWAP_OUT: 3,
    Op.SWAP_IN: 4,
}


class Program(NamedTuple):
    """A program, and what the oracle says of it.

    Attributes:
      operations: i32[N, 4].
      texts: i32[texts, T * B].
      statuses: names, N of them.
      states: i32[N, K].
      events: what happened, for tests that ask whether enough did.
    """

    operations: np.ndarray
    texts: np.ndarray
    statuses: list[str]
    states: np.ndarray
    events: collections.Counter


def draw_texts(rng: random.Random, shape: Shape) -> list[list[int]]:
    """Draws texts of two tokens, most of which start as another one does."""
    texts = [[rng.randint(0, 1) for _ in range(shape.capacity)]]
    while len(texts) < shape.num_texts:
        keep = rng.choice([0, *range(shape.capacity)])
        rest = [rng.randint(0, 1) for _ in range(shape.capacity - keep)]
        texts.append(rng.choice(texts)[:keep] + rest)
    return texts


def draw_program(rng: random.Random, length: int, shape: Shape) -> Program:
    """Draws operations of which most can be carried out, and some cannot."""
    texts = draw_texts(rng, shape)
    memory = Memory(
        texts=texts, **{k: v for k, v in shape._asdict().items() if k != "num_texts"}
    )
    codes = rng.choices([*WEIGHTS], weights=[*WEIGHTS.values()], k=length)
    operations, statuses, states = [], [], []
    for code in codes:
        operation = (code, *_draw_arguments(rng, code, memory, shape))
        statuses.append(apply(memory, operation))
        operations.append(operation)
        states.append(_expected(shape, memory))
    for row in memory.tables:
        assert memory.read(row) == memory.texts[row][: memory.length[row]]
    events = collections.Counter(
        f"{op.name} {status}" for op, status in zip(codes, statuses)
    )
    for event in (
        "found",
        "evicted",
        "merged",
        "copied",
        "beams_ended",
        "shared_moves",
    ):
        events[event] = getattr(memory, event)
    return Program(
        np.array(operations, np.int32),
        np.array(texts, np.int32),
        statuses,
        np.array(states, np.int32),
        events,
    )


def _draw_arguments(rng: random.Random, code: Op, memory: Memory, shape: Shape):
    everything = range(-1, shape.num_rows + 2)  # three of these rows do not exist
    within = range(shape.num_rows)
    sensible = rng.random() < 0.9  # rows for which the operation makes sense
    running = [row for row in within if memory.runs(row)]
    vacant = [row for row in within if row not in memory.tables]
    length = memory.length

    def some(rows, share):
        return sum(1 << row for row in rows if rng.random() < share)

    if code in (Op.ALLOCATE, Op.START):
        row = rng.choice(vacant if sensible and vacant else within)
        text = rng.randrange(shape.num_rows + shape.num_texts)
        if code == Op.START:
            return row, rng.randint(1, shape.capacity), text
        if not sensible:
            row = rng.choice(everything)
        return row, rng.randint(not sensible, shape.capacity + (not sensible)), text
    if code == Op.APPEND:
        rows = running if sensible else within
        if sensible or rng.random() < 0.5:
            rows = [row for row in rows if length[row] < shape.capacity]
        return some(rows, 0.7), rng.getrandbits(shape.num_rows), 0
    if code == Op.FILL:
        return some(within, 0.6), rng.randint(1, 2 * shape.block_size + 1), 0
    if code in (Op.FORK, Op.SHARE_PREFIX):
        source = rng.choice(running if sensible and running else everything)
        target = rng.choice(vacant if sensible and vacant else everything)
        tokens = length[source] if source in within else 0
        tokens = rng.randint(not sensible, tokens + (not sensible))
        if shape.caching and source in within:
            # Full blocks are cached, and must not be written: not by `target`, either.
            end = length[source] // shape.block_size * shape.block_size
            tokens -= tokens % shape.block_size if tokens < end else 0
        return source, target, tokens
    if code == Op.COPY_ON_WRITE:
        row = rng.choice(running if sensible and running else everything)
        # Full blocks are cached, and stay those that the cache names.
        first = (
            length[row] // shape.block_size if row in within and shape.caching else 0
        )
        return row, rng.choice([-1, first, first, first + 1]), 0
    if code == Op.RELEASE:
        return (
            rng.choice([*memory.tables] if sensible and memory.tables else everything),
            0,
            0,
        )
    if code == Op.ABORT:
        return some(within, 0.5), 0, 0
    if code == Op.REPOINT:
        # Blocks that were granted ahead of a row's length belong to one row only.
        tables = memory.tables
        beams = [r for r in running if len(tables[r]) == memory.blocks_for(length[r])]
        beams = [row for row in beams if rng.random() < 0.8]
        parents = sum(rng.choice(beams) << 3 * row for row in beams)
        return sum(1 << row for row in beams), parents, 0
    if code == Op.SWAP_OUT:
        return some(running if sensible else within, 0.5), 0, 0
    if code == Op.SWAP_IN:
        rows = sorted(memory.swapped) if sensible else within
        return some(rows, 0.8), rng.choice([0, 0, 1, shape.block_size]), 0
    return rng.randint(0, 4), 0, 0


def check(program: Program, shape: Shape) -> None:
    """Runs a program in JAX, and compares every state with the oracle's."""
    trace = _run(program.operations, program.texts, shape)
    trace = jax.tree.map(np.asarray, trace)

    def where(step):
        code, *arguments = program.operations[step].tolist()
        return f"after operation {step}: {Op(code).name} {arguments}"

    for name, holds in trace.holds.items():
        assert holds.all(), f"{name} is broken {where(np.argmin(holds))}"
    status = np.array([Status[name] for name in program.statuses])
    same = trace.status == status
    assert same.all(), (
        f"{Status(int(trace.status[np.argmin(same)])).name} for "
        f"{program.statuses[np.argmin(same)]} {where(np.argmin(same))}"
    )
    if np.array_equal(trace.states, program.states):
        return
    step = int(np.argmax((trace.states != program.states).any(axis=1)))
    parts = _parts(shape)
    ends = itertools.accumulate(parts.values())
    for (name, count), end in zip(parts.items(), ends, strict=True):
        got, expected = (
            x[step, end - count : end] for x in (trace.states, program.states)
        )
        assert np.array_equal(got, expected), (
            f"{name} {where(step)}: {got.tolist()} for {expected.tolist()}"
        )
    raise AssertionError(f"states of {trace.states.shape[1]} numbers, not {end}")
