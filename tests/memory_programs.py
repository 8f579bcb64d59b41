"""Programs for the paged memory: arrays of operations, run by JAX and by the oracle.

A program is `i32[N, 4]`: an opcode and three arguments in each row. JAX runs it as one
jitted scan over an empty pool, with a small KV cache to which every operation writes
its tokens, so that one compilation serves any number of programs.
"""

import enum
import functools
import random
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import often
from oracles.block_tables import PagedMemory

from paged_jax import block_tables, invariants
from paged_jax.block_pool import BlockPool, init_block_pool
from paged_jax.block_tables import Status
from paged_jax.kv_cache import KVCache, copy_blocks, init_kv_cache, write_kv
from paged_jax.sequences import Sequences, init_sequences


class Op(enum.IntEnum):
    """Opcodes, with their arguments."""

    NOTHING = 0
    ALLOCATE = 1  # row, tokens
    APPEND = 2  # rows as bits
    FORK = 3  # source, target
    SHARE_PREFIX = 4  # source, target, tokens
    COPY_ON_WRITE = 5  # row, logical block, whose first token is then replaced
    RELEASE = 6  # row


class Shape(NamedTuple):
    """How large the memory is; it is small, so that all of its limits are met."""

    num_blocks: int = 17
    num_rows: int = 6
    table_width: int = 5
    block_size: int = 4

    @property
    def capacity(self):
        """Most tokens of a row."""
        return self.table_width * self.block_size

    def token(self, step, row, position):
        """A token of its own for each write of a program; exact in float32."""
        return (step * self.num_rows + row) * self.capacity + position + 1


class Trace(NamedTuple):
    """The state after each operation, as NumPy arrays with a leading axis N.

    Attributes:
      status: i32[N].
      pool: with free stacks whose entries past `num_free` mean nothing.
      sequences: as they are.
      holds: name of each invariant -> bool[N].
      cache: at the end only; no axis N.
    """

    status: np.ndarray
    pool: BlockPool
    sequences: Sequences
    holds: dict
    cache: KVCache


NUM_LAYERS = 2


@functools.partial(often.jit, static_argnames="shape")
def _run(program, shape):
    size = shape.block_size
    nothing = block_tables.no_copies(shape.num_rows)

    # Each operation: (pool, sequences, a, b, c) -> (pool, sequences, copies, status,
    # bool[S, T * B]: the positions whose tokens it writes).
    position = jnp.arange(shape.capacity)[None, :]
    row = jnp.arange(shape.num_rows)[:, None]
    none_written = jnp.zeros((shape.num_rows, shape.capacity), bool)

    def idle(pool, sequences, a, b, c):
        return pool, sequences, nothing, jnp.int32(Status.OK), none_written

    def allocate(pool, sequences, a, b, c):
        *state, status = block_tables.allocate(pool, sequences, a, b, block_size=size)
        return *state, nothing, status, (row == a) & (position < b)

    def append(pool, sequences, a, b, c):
        appending = (a >> row[:, 0]) & 1 == 1
        written = appending[:, None] & (position == sequences.length[:, None])
        out = block_tables.append(pool, sequences, appending, block_size=size)
        return *out, written

    def fork(pool, sequences, a, b, c):
        *state, status = block_tables.fork(pool, sequences, a, b, block_size=size)
        return *state, nothing, status, none_written

    def share_prefix(pool, sequences, a, b, c):
        *state, status = block_tables.share_prefix(
            pool, sequences, a, b, c, block_size=size
        )
        return *state, nothing, status, none_written

    def copy_on_write(pool, sequences, a, b, c):
        out = block_tables.copy_on_write(pool, sequences, a, b)
        return *out, (row == a) & (position == b * size)

    def release(pool, sequences, a, b, c):
        *state, status = block_tables.release(pool, sequences, a)
        return *state, nothing, status, none_written

    operations = [idle, allocate, append, fork, share_prefix, copy_on_write, release]

    def step(carry, inputs):
        pool, sequences, cache = carry
        index, (code, a, b, c) = inputs
        pool, sequences, copies, status, written = jax.lax.switch(
            code, operations, pool, sequences, a, b, c
        )
        written &= status == Status.OK
        cache = copy_blocks(cache, *copies)
        block = jnp.repeat(sequences.block_table, size, axis=1)
        slots = jnp.where(written, block * size + position % size, 0).ravel()
        token = shape.token(index, row, position).astype(jnp.float32).reshape(-1, 1, 1)
        for layer in range(NUM_LAYERS):
            cache = write_kv(cache, layer, *_kv(token, layer), slots)
        holds = invariants.check_blocks(pool, sequences)
        holds["writes_private"] = invariants.writes_are_private(pool, slots, size)
        return (pool, sequences, cache), (status, pool, sequences, holds)

    pool = init_block_pool(shape.num_blocks)
    sequences = init_sequences(shape.num_rows, shape.table_width)
    cache = init_kv_cache(NUM_LAYERS, shape.num_blocks, size, 1, 1, jnp.float32)
    inputs = (jnp.arange(len(program)), tuple(program.T))
    (_, _, cache), outputs = jax.lax.scan(step, (pool, sequences, cache), inputs)
    return Trace(*outputs, cache)


def _kv(token, layer):
    """The key and the value of a token: different in every layer."""
    return token * NUM_LAYERS + layer, -(token * NUM_LAYERS + layer)


def run(program: np.ndarray, shape: Shape) -> Trace:
    """Runs a program in JAX."""
    return jax.tree.map(np.asarray, _run(jnp.asarray(program, jnp.int32), shape))


def apply(memory: PagedMemory, step: int, operation, shape: Shape) -> str:
    """Carries out one operation in the oracle; returns the name of the status."""
    code, a, b, c = operation
    if code == Op.ALLOCATE:
        length = min(b, shape.capacity + 1)
        return memory.allocate(a, [shape.token(step, a, i) for i in range(length)])
    if code == Op.APPEND:
        rows = [row for row in range(shape.num_rows) if a >> row & 1]
        at = {row: len(memory.tokens.get(row, ())) for row in rows}
        return memory.append({row: shape.token(step, row, at[row]) for row in rows})
    if code == Op.FORK:
        return memory.fork(a, b)
    if code == Op.SHARE_PREFIX:
        return memory.share_prefix(a, b, c)
    if code == Op.COPY_ON_WRITE:
        status = memory.copy_on_write(a, b)
        if status == "OK":
            first = b * shape.block_size
            memory.overwrite(a, first, shape.token(step, a, first))
        return status
    if code == Op.RELEASE:
        return memory.release(a)
    return "OK"


def check(program: np.ndarray, shape: Shape) -> list[str]:
    """Runs a program in both, and compares every state; returns the statuses."""
    trace = run(program, shape)
    for name, holds in trace.holds.items():
        assert holds.all(), _where(f"invariant {name}", ~holds, program)

    statuses = []
    expected = jax.tree.map(np.zeros_like, (trace.pool, trace.sequences))
    pool, sequences = expected
    memory = PagedMemory(*shape)
    for step, operation in enumerate(program.tolist()):
        statuses.append(apply(memory, step, operation, shape))
        pool.num_free[step] = len(memory.free)
        pool.free_stack[step, : len(memory.free)] = memory.free
        pool.ref_count[step, 1:] = list(memory.ref_count.values())
        for row, table in memory.tables.items():
            sequences.block_table[step, row, : len(table)] = table
            sequences.num_blocks[step, row] = len(table)
            sequences.length[step, row] = len(memory.tokens[row])
            sequences.status[step, row] = 1
    codes = np.array([Status[status] for status in statuses])
    assert (trace.status == codes).all(), _where(
        "status", trace.status != codes, program
    )
    free = np.arange(shape.num_blocks + 1) < pool.num_free[:, None]
    got = (
        trace.pool.__class__(
            np.where(free, trace.pool.free_stack, 0),
            trace.pool.num_free,
            trace.pool.ref_count,
        ),
        trace.sequences,
    )
    for (path, ours), theirs in zip(
        jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True
    ):
        wrong = (ours != theirs).reshape(len(program), -1).any(axis=1)
        assert not wrong.any(), _where(jax.tree_util.keystr(path), wrong, program)
    check_content(trace, memory, shape)
    return statuses


def check_content(trace: Trace, memory: PagedMemory, shape: Shape) -> None:
    """Compares what the rows hold at the end, in every layer, looked up by table."""
    for row, tokens in memory.tokens.items():
        assert memory.read(row) == tokens, f"the oracle lost tokens of row {row}"
        table = trace.sequences.block_table[-1, row]
        for layer in range(NUM_LAYERS):
            k = trace.cache.k[layer, table].ravel()[: len(tokens)]
            v = trace.cache.v[layer, table].ravel()[: len(tokens)]
            keys, values = _kv(np.array(tokens), layer)
            np.testing.assert_array_equal(k, keys, f"keys of row {row}, layer {layer}")
            np.testing.assert_array_equal(v, values, f"values of row {row}")


def _where(what, wrong, program):
    step = int(np.argmax(wrong))
    code, *arguments = program[step].tolist()
    return f"{what} differs after operation {step}: {Op(code).name} {arguments}"


def draw_program(rng: random.Random, length: int, shape: Shape) -> np.ndarray:
    """Draws operations of which most can be carried out, and some cannot."""
    memory = PagedMemory(*shape)
    program = []
    for step in range(length):
        code = rng.choices([*Op], weights=[0, 4, 12, 3, 3, 2, 3])[0]
        operation = (code, *_draw_arguments(rng, code, memory, shape))
        apply(memory, step, operation, shape)
        program.append(operation)
    return np.array(program, np.int32)


def _draw_arguments(rng, code, memory, shape):
    rows = range(-1, shape.num_rows + 2)  # three of them do not exist
    live, vacant = [*rows], [*rows]
    if rng.random() < 0.9:  # rows for which the operation makes sense
        live = [*memory.tables] or live
        vacant = [row for row in rows[1:-2] if row not in memory.tables] or vacant
    row = rng.choice(live)
    tokens = len(memory.tokens.get(row, ()))
    if code == Op.ALLOCATE:
        return rng.choice(vacant), rng.randint(0, shape.capacity + 1), 0
    if code == Op.APPEND:
        appending = [row for row in live if row >= 0 and rng.random() < 0.7]
        if rng.random() < 0.9:
            full = shape.capacity
            appending = [r for r in appending if len(memory.tokens.get(r, ())) < full]
        return sum(1 << row for row in appending), 0, 0
    if code in (Op.FORK, Op.SHARE_PREFIX):
        return row, rng.choice(vacant), rng.randint(0, tokens + 1)
    if code == Op.COPY_ON_WRITE:
        return row, rng.randint(-1, tokens // shape.block_size), 0
    return row, 0, 0
