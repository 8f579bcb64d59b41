"""All operations on the block memory in random interleavings, against the oracle.

Allocation, the prefix cache, forks, copy on write, beams that change places, swapping
out and in, eviction, and requests that end all at once happen in one program, over one
pool. Every state is compared in every place: free lists in their order, reference
counts, tables, idle blocks, what is cached; and every row reads its own tokens.
"""

import collections
import random

import pytest
from all_operations import Op, Shape, check, draw_program

LENGTH = 200  # operations in a program: one compilation serves all of one shape

SHAPES = {
    "with a prefix cache": (2000, Shape()),
    "without one": (200, Shape(block_size=2, caching=False)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", SHAPES)
def test_random_programs(name):
    programs, shape = SHAPES[name]
    seen = collections.Counter()
    for seed in range(programs):
        program = draw_program(random.Random(f"{name} {seed}"), LENGTH, shape)
        check(program, shape)
        seen += program.events
    # The programs are worth little if they seldom get anywhere.
    for op in list(Op)[1:]:
        assert seen[f"{op.name} OK"] >= programs, op
    for op in (Op.APPEND, Op.START, Op.SWAP_IN, Op.SWAP_OUT):
        assert seen[f"{op.name} OUT_OF_BLOCKS"] > programs / 2, op
    events = ["copied", "beams_ended", "shared_moves"]
    events += ["found", "evicted", "merged"] if shape.caching else []
    for event in events:
        assert seen[event] > 3 * programs, event
