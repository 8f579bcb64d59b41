"""Random programs against the plain-Python oracle, state for state and bit for bit.

Every state of every program is compared: block tables, reference counts, the free list
in its order, statuses, and the invariants of `paged_jax.invariants`. At the end, what
each live row reads through its table, in every layer, is compared with its tokens.
"""

import collections
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_programs import Op, Shape, check, draw_program

LENGTH = 150  # operations in a program: one compilation serves all of one shape


def padded(operations):
    program = np.zeros((LENGTH, 4), np.int32)
    program[: len(operations)] = np.array(operations).reshape(-1, 4)
    return program


@pytest.mark.parametrize(
    "block_size, programs",
    [
        (4, 400),
        pytest.param(
            1, 100, marks=pytest.mark.newest(reason="the same program, of another size")
        ),
    ],
)
def test_random_programs(block_size, programs):
    shape = Shape(block_size=block_size)
    seen = collections.Counter()
    for seed in range(programs):
        program = draw_program(random.Random(seed), LENGTH, shape)
        statuses = check(program, shape)
        seen.update(zip(map(Op, program[:, 0].tolist()), statuses, strict=True))
    # The programs are worth little if they seldom get anywhere.
    for op in list(Op)[1:]:
        assert seen[op, "OK"] > 2 * programs
    for failure in ("OUT_OF_BLOCKS", "TABLE_OVERFLOW"):
        assert seen[Op.APPEND, failure] > programs


ROW = st.integers(-1, 7)  # of six: three of these do not exist
OPERATION = st.one_of(
    st.tuples(st.just(Op.ALLOCATE), ROW, st.integers(-1, 22), st.just(0)),
    st.tuples(st.just(Op.APPEND), st.integers(0, 63), st.just(0), st.just(0)),
    st.tuples(st.just(Op.FORK), ROW, ROW, st.just(0)),
    st.tuples(st.just(Op.SHARE_PREFIX), ROW, ROW, st.integers(-1, 22)),
    st.tuples(st.just(Op.COPY_ON_WRITE), ROW, st.integers(-1, 6), st.just(0)),
    st.tuples(st.just(Op.RELEASE), ROW, st.just(0), st.just(0)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(OPERATION, max_size=LENGTH))
def test_any_program(operations):
    check(padded(operations), Shape())


def test_the_last_of_n_sharers_writes_in_place():
    # Row 0 has 2 tokens in a block of 4; rows 1 to 4 share it; all five append at once.
    shape = Shape(num_blocks=5)
    forks = [(Op.FORK, 0, row, 0) for row in range(1, 5)]
    program = [(Op.ALLOCATE, 0, 2, 0), *forks, (Op.APPEND, 0b011111, 0, 0)]
    assert set(check(padded(program), shape)) == {"OK"}
    # With one block less, one of them cannot have its copy, and none of them appends.
    program.insert(0, (Op.ALLOCATE, 5, 1, 0))
    statuses = check(padded(program), shape)
    assert statuses[: len(program)] == ["OK"] * 6 + ["OUT_OF_BLOCKS"]
