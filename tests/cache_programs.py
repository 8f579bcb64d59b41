"""Programs for the prefix cache: arrays of operations, run by JAX and by the oracle.

A program is `i32[N, 4]`: an opcode and three arguments in each row. JAX runs it as one
jitted scan over an empty pool.
"""

import collections
import enum
import functools
import random
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import often
from oracles.prefix_cache import CachedMemory

from paged_jax import invariants, prefix_cache
from paged_jax.block_pool import BlockPool, evict, init_block_pool
from paged_jax.block_tables import Status, grant_row, release_row
from paged_jax.cached_blocks import cache_full_blocks
from paged_jax.config import EngineConfig
from paged_jax.memory_managers import MANAGERS
from paged_jax.sequences import Sequences, blocks_for
from paged_jax.submit import init_scheduler


class Op(enum.IntEnum):
    """Opcodes, with their arguments."""

    NOTHING = 0
    START = 1  # row, text, tokens
    SHARE = 2  # source, target, tokens
    FILL = 3  # rows as bits, tokens
    END = 4  # row
    EVICT = 5  # blocks


class Shape(NamedTuple):
    """How large the memory is; it is small, so that all of its limits are met."""

    num_blocks: int = 13
    num_rows: int = 5
    table_width: int = 5
    block_size: int = 4
    num_texts: int = 12
    equal_keys: bool = False  # only tokens and parents tell blocks apart
    homes: int = 0  # at most so many places where runs start, around the table's end

    @property
    def capacity(self):
        """Tokens of a text."""
        return self.table_width * self.block_size


class Trace(NamedTuple):
    """The state after each operation, as NumPy arrays with a leading axis N."""

    status: np.ndarray
    pool: BlockPool
    sequences: Sequences
    holds: dict


@functools.partial(often.jit, static_argnames="shape")
def _run(program, texts, shape):
    size = shape.block_size
    config = EngineConfig(
        block_size=size,
        num_blocks=shape.num_blocks,
        max_model_len=shape.capacity,
        max_seqs=shape.num_rows,
        max_requests=shape.num_texts,
        max_prefixes=0,
    )
    state = init_scheduler(config.step_config(), MANAGERS["paged"], False)
    requests = state.requests
    tokens = requests.tokens.at[: shape.num_texts].set(texts)
    state = state.__class__(
        **{
            **vars(state),
            "pool": init_block_pool(shape.num_blocks, cached_block_size=size),
            "requests": requests.__class__(**{**vars(requests), "tokens": tokens}),
        }
    )

    def replaced(state, pool, sequences):
        parts = {"pool": pool, "sequences": sequences}
        return state.__class__(**{**vars(state), **parts})

    def of_text(sequences, row, text, ok):
        request = sequences.request
        request = request.at[row].set(jnp.where(ok, text, request[row]))
        return sequences.__class__(**{**vars(sequences), "request": request})

    def grant(state, row, text, need, blocks, count, failed):
        """Grants shared blocks and new ones, unless a check has failed."""
        ok = failed == Status.OK
        pool, sequences = grant_row(
            state.pool,
            state.sequences,
            row,
            need,
            count * size,
            ok,
            shared_blocks=blocks,
            num_shared=count,
        )
        sequences = of_text(sequences, row, text, ok)
        return replaced(state, pool, sequences), failed

    def nothing(state, a, b, c):
        return state, jnp.int32(Status.OK)

    def start(state, row, text, tokens):
        pool = state.pool
        blocks, count = prefix_cache.find_run(
            pool.prefix_cache,
            state.requests.tokens,
            text,
            (tokens - 1) // size,
            shape.table_width,
        )
        found = jnp.arange(shape.table_width) < count
        idle = jnp.sum(found & (pool.ref_count[blocks] == 0))
        need = blocks_for(tokens, size)
        failed = jnp.where(
            need - count + idle > pool.num_available, Status.OUT_OF_BLOCKS, Status.OK
        )
        taken = state.sequences.status[row] != 0
        failed = jnp.where(taken, Status.ROW_IN_USE, failed)
        return grant(state, row, text, need, blocks, count, failed)

    def share(state, source, target, tokens):
        sequences = state.sequences
        count = sequences.length[source] // size
        need = jnp.maximum(blocks_for(tokens, size), count)
        short = need - count > state.pool.num_available
        failed = jnp.where(short, Status.OUT_OF_BLOCKS, Status.OK)
        taken = sequences.status[target] != 0
        failed = jnp.where(taken, Status.ROW_IN_USE, failed)
        failed = jnp.where(sequences.status[source] == 0, Status.NOT_LIVE, failed)
        text = sequences.request[source]
        blocks = sequences.block_table[source]
        return grant(state, target, text, need, blocks, count, failed)

    def fill(state, rows, tokens, c):
        sequences = state.sequences
        before = sequences.length
        filling = (rows >> jnp.arange(shape.num_rows)) & 1 == 1
        after = jnp.minimum(before + tokens, sequences.num_blocks * size)
        length = jnp.where(filling, after, before)
        sequences = sequences.__class__(**{**vars(sequences), "length": length})
        state = cache_full_blocks(replaced(state, state.pool, sequences), before)
        return state, jnp.int32(Status.OK)

    def end(state, row, b, c):
        live = state.sequences.status[row] != 0
        pool, sequences = release_row(state.pool, state.sequences, row, live)
        status = jnp.where(live, Status.OK, Status.NOT_LIVE)
        return replaced(state, pool, sequences), status

    def evict_some(state, count, b, c):
        pool = state.pool
        pool = evict(pool, jnp.minimum(count, pool.prefix_cache.idle.count))
        return replaced(state, pool, state.sequences), jnp.int32(Status.OK)

    operations = [nothing, start, share, fill, end, evict_some]

    def step(state, operation):
        code, a, b, c = operation
        state, status = jax.lax.switch(code, operations, state, a, b, c)
        holds = invariants.check_blocks(state.pool, state.sequences)
        status = status.astype(jnp.int32)
        return state, (status, state.pool, state.sequences, holds)

    mix, home = prefix_cache._mix, prefix_cache._home

    def mix_of_shape(x):
        return jnp.zeros_like(x) if shape.equal_keys else mix(x)

    def home_of_shape(key, last):
        if not shape.homes:
            return home(key, last)
        return (home(key, last) % shape.homes - shape.homes // 2) & last

    with (
        mock.patch.object(prefix_cache, "_mix", mix_of_shape),
        mock.patch.object(prefix_cache, "_home", home_of_shape),
    ):
        _, outputs = jax.lax.scan(step, state, tuple(program.T))
    return Trace(*outputs)


def run(program: np.ndarray, texts: np.ndarray, shape: Shape) -> Trace:
    """Runs a program in JAX."""
    trace = _run(jnp.asarray(program, jnp.int32), jnp.asarray(texts), shape)
    return jax.tree.map(np.asarray, trace)


def apply(memory: CachedMemory, operation) -> str:
    """Carries out one operation in the oracle; returns the name of the status."""
    code, a, b, c = operation
    if code == Op.START:
        return memory.start(a, b, c)
    if code == Op.SHARE:
        return memory.share(a, b, c)
    if code == Op.FILL:
        return memory.fill([r for r in range(memory.num_rows) if a >> r & 1], b)
    if code == Op.END:
        return memory.end(a)
    if code == Op.EVICT:
        return memory.evict(a)
    return "OK"


def check(program, texts, shape: Shape) -> collections.Counter:
    """Runs a program in both, and compares every state; returns what happened."""
    trace = run(program, texts, shape)
    for name, holds in trace.holds.items():
        assert holds.all(), _where(f"invariant {name}", ~holds, program)
    memory = CachedMemory(
        shape.num_blocks, shape.num_rows, shape.block_size, np.array(texts).tolist()
    )
    seen = collections.Counter()
    for step, operation in enumerate(program.tolist()):
        cached = set(memory.cached.values())
        tables = {row: list(table) for row, table in memory.tables.items()}
        status = apply(memory, operation)
        expected, got = _summary(memory), _read(trace, step)
        for name, value in expected.items():
            assert got[name] == value, (
                f"{name} after operation {step}, {Op(operation[0]).name} "
                f"{operation[1:]}: {got[name]} for {value}"
            )
        assert trace.status[step] == Status[status], f"{status} for operation {step}"
        seen[f"{Op(operation[0]).name} {status}"] += 1
        if operation[0] == Op.FILL:
            seen["merged"] += sum(tables[r] != t for r, t in memory.tables.items())
        else:
            seen["evicted"] += len(cached - set(memory.cached.values()))
            if operation[0] == Op.START and status == "OK":
                seen["found"] += memory.length[operation[1]] > 0
    return seen


def _summary(memory):
    """What the oracle says, in plain values."""
    return {
        "free list": memory.free,
        "ref counts": list(memory.ref_count.values()),
        "tables": memory.tables,
        "lengths": memory.length,
        "idle blocks": memory.idle,
        "last tokens of cached blocks": {
            block: list(chain[-memory.block_size :])
            for chain, block in memory.cached.items()
        },
    }


def _read(trace, step):
    """The same, read from arrays."""
    pool, cache, rows = trace.pool, trace.pool.prefix_cache, trace.sequences
    links, idle, at = cache.idle.next[step], [], cache.idle.first[step]
    while at and len(idle) < len(links):
        idle.append(int(at))
        at = links[at]
    tables, sizes = rows.block_table[step].tolist(), rows.num_blocks[step].tolist()
    live = np.flatnonzero(rows.status[step]).tolist()
    return {
        "free list": pool.free_stack[step][: pool.num_free[step]].tolist(),
        "ref counts": pool.ref_count[step][1:].tolist(),
        "tables": {row: tables[row][: sizes[row]] for row in live},
        "lengths": {row: int(rows.length[step, row]) for row in live},
        "idle blocks": idle,
        "last tokens of cached blocks": {
            block: cache.tokens[step, block].tolist()
            for block in np.flatnonzero(cache.parent[step] >= 0).tolist()
        },
    }


def _where(what, wrong, program):
    step = int(np.argmax(wrong))
    code, *arguments = program[step].tolist()
    return f"{what} is broken after operation {step}: {Op(code).name} {arguments}"


def draw_texts(rng: random.Random, shape: Shape) -> np.ndarray:
    """Draws texts of two tokens, most of which start as another one does."""
    texts = [[rng.randint(0, 1) for _ in range(shape.capacity)]]
    while len(texts) < shape.num_texts:
        keep = rng.choice([0, *range(shape.capacity)])
        rest = [rng.randint(0, 1) for _ in range(shape.capacity - keep)]
        texts.append(rng.choice(texts)[:keep] + rest)
    return np.array(texts, np.int32)


def draw_program(rng: random.Random, length: int, shape: Shape) -> np.ndarray:
    """Draws operations."""
    rows = range(shape.num_rows)
    program = []
    for _ in range(length):
        code = rng.choices([*Op], weights=[0, 6, 2, 8, 4, 1])[0]
        a, b, c = rng.choice(rows), 0, 0
        if code == Op.START:
            b, c = rng.randrange(shape.num_texts), rng.randint(1, shape.capacity)
        elif code == Op.SHARE:
            b, c = rng.choice(rows), rng.randint(1, shape.capacity)
        elif code == Op.FILL:
            a, b = rng.randrange(1 << shape.num_rows), rng.randint(1, 9)
        elif code == Op.EVICT:
            a = rng.randint(0, 4)
        program.append((code, a, b, c))
    return np.array(program, np.int32)
