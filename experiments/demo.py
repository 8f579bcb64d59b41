"""The life of a few sequences in a pool of 100 blocks, step by step.

    python -m experiments.demo

This is the functional API of the paged memory by example. State goes in, state comes
out, with a status that says whether the operation could be carried out:

    pool, sequences, status = allocate(pool, sequences, row, 32, block_size=16)

Requests 1 to 4 come and go: two with prompts of their own, one that shares blocks with
the first until it writes (copy-on-write), and one that is admitted once it is known to
fit. Then a request of 35 tokens shows how few slots are left unused, and a block table
how a position becomes a slot. `run` returns what `main` prints.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from paged_jax.block_pool import BlockPool, init_block_pool
from paged_jax.block_tables import (
    Status,
    allocate,
    copy_on_write,
    release,
    share_prefix,
)
from paged_jax.sequences import Sequences, blocks_for, init_sequences, slots_of

NUM_BLOCKS = 100
BLOCK_SIZE = 16
NUM_ROWS = 8
TABLE_WIDTH = 8


class Step(NamedTuple):
    """One line of the demo.

    Attributes:
      what: the operation, in words.
      status: how it ended.
      table: blocks of the row that it concerns, after it.
      free: number of free blocks, after it.
      note: what to see.
    """

    what: str
    status: Status
    table: list[int]
    free: int
    note: str = ""


class Demo(NamedTuple):
    """All that the demo shows.

    Attributes:
      steps: the operations, in order.
      fill: tokens in each block of the request of 35 tokens.
      lookup_table: block table of the translated position.
      lookup: the position and its block, offset and slot.
    """

    steps: list[Step]
    fill: list[int]
    lookup_table: list[int]
    lookup: tuple[int, int, int, int]


def table_of(sequences: Sequences, row: int) -> list[int]:
    """Returns the blocks of a row, without the unused tail of its table."""
    return sequences.block_table[row, : int(sequences.num_blocks[row])].tolist()


def fits(pool: BlockPool, num_tokens: int) -> bool:
    """Whether the pool has the blocks that a sequence of `num_tokens` needs."""
    need = blocks_for(jnp.int32(num_tokens), BLOCK_SIZE)
    return bool(need <= pool.num_free)


def run() -> Demo:
    """Carries out the demo's operations.

    Returns:
      The steps and what the two examples at the end show.

    Raises:
      RuntimeError: an operation was refused; the message names it and its status.
    """
    pool = init_block_pool(NUM_BLOCKS)
    sequences = init_sequences(NUM_ROWS, TABLE_WIDTH)
    steps = []

    def show(what: str, row: int, status: jax.Array, note: str = "") -> None:
        step = Step(
            what,
            Status(int(status)),
            table_of(sequences, row),
            int(pool.num_free),
            note,
        )
        if step.status != Status.OK:
            raise RuntimeError(f"{what}: {step.status.name}, {step.free} blocks free")
        steps.append(step)

    # Two requests with prompts of their own.
    for row, num_tokens in ((1, 32), (2, 48)):
        pool, sequences, status = allocate(
            pool, sequences, row, num_tokens, block_size=BLOCK_SIZE
        )
        show(f"request {row}: allocate {num_tokens} tokens", row, status)

    # One that begins as the first does: no block is taken, two are referred to twice.
    pool, sequences, status = share_prefix(
        pool, sequences, 1, 3, 2 * BLOCK_SIZE, block_size=BLOCK_SIZE
    )
    references = pool.ref_count[jnp.array(table_of(sequences, 3))].tolist()
    show(
        "request 3: share 2 blocks of request 1",
        3,
        status,
        f"reference counts {references}",
    )

    # It is about to write into block 1, which it does not own: it gets a copy.
    pool, sequences, copies, status = copy_on_write(pool, sequences, 3, 1)
    show(
        "request 3: write to its block 1",
        3,
        status,
        f"copy block {copies.source[0]} to {copies.target[0]}",
    )

    # A request is admitted only if its blocks fit.
    admitted = fits(pool, 64)
    note = "admitted: 4 blocks fit" if admitted else "refused: 4 blocks do not fit"
    pool, sequences, status = allocate(pool, sequences, 4, 64, block_size=BLOCK_SIZE)
    show("request 4: allocate 64 tokens", 4, status, note)

    # A block that two requests refer to becomes free when the second one leaves.
    for row in (1, 2, 3):
        pool, sequences, status = release(pool, sequences, row)
        show(f"request {row}: release", row, status)

    # How full the blocks are: only the last one can have empty slots.
    pool, sequences, status = allocate(pool, sequences, 5, 35, block_size=BLOCK_SIZE)
    show("request 5: allocate 35 tokens", 5, status)
    slots = slots_of(sequences, jnp.full(35, 5), jnp.arange(35), BLOCK_SIZE)
    blocks = (slots // BLOCK_SIZE).tolist()
    fill = [blocks.count(block) for block in table_of(sequences, 5)]

    return Demo(steps, fill, *translate([3, 7, 12], 20))


def translate(
    table: list[int], position: int
) -> tuple[list[int], tuple[int, int, int, int]]:
    """Looks a position up in a block table.

    Args:
      table: physical blocks of a sequence.
      position: a token's place in the sequence.

    Returns:
      The table, and (position, block, offset in the block, slot).
    """
    sequences = Sequences(
        block_table=jnp.array([table], jnp.int32),
        num_blocks=jnp.array([len(table)], jnp.int32),
        length=jnp.array([len(table) * BLOCK_SIZE], jnp.int32),
        request=jnp.zeros(1, jnp.int32),
        status=jnp.ones(1, jnp.int32),
    )
    slot = int(
        slots_of(sequences, jnp.array([0]), jnp.array([position]), BLOCK_SIZE)[0]
    )
    return table, (position, slot // BLOCK_SIZE, slot % BLOCK_SIZE, slot)


def main() -> None:
    """Prints the demo."""
    demo = run()
    console = Console()
    table = Table(title=f"{NUM_BLOCKS} blocks of {BLOCK_SIZE} tokens")
    table.add_column("operation")
    table.add_column("its block table")
    table.add_column("free", justify="right")
    table.add_column("note")
    for step in demo.steps:
        blocks = ", ".join(map(str, step.table)) or "-"
        table.add_row(step.what, blocks, str(step.free), step.note)
    console.print(table)

    tokens = sum(demo.fill)
    console.print(
        f"{tokens} tokens take {len(demo.fill)} blocks, filled with "
        f"{', '.join(map(str, demo.fill))}: "
        f"{len(demo.fill) * BLOCK_SIZE - tokens} slots are unused."
    )
    position, block, offset, slot = demo.lookup
    console.print(
        f"Block table {demo.lookup_table}: position {position} is in block {block} at "
        f"offset {offset}, slot {block} x {BLOCK_SIZE} + {offset} = {slot}.",
        markup=False,
    )


if __name__ == "__main__":
    main()
