"""The numbers that the Hopper kernels run with, chosen from the shapes of a step."""

from typing import Any

from pallas_kernels.mosaic_ring import KV_TILE, MAX_COLUMNS, MIN_TILED_UNIT
from pallas_kernels.mosaic_softmax import ROWS
from pallas_kernels.quantised_kv import bytes_per_vector, is_quantised

# Shared memory of a thread block, less what barriers and alignment may take.
SMEM_BYTES = 232448 - 2048

# Decode. The least tiles of a split; below, it costs more than it gains.
MIN_SPLIT_TILES = 4
MAX_SPLITS = 128
# What a thread block does once, whatever its share of the context, as tiles: it waits
# for the first copies, and stores its partial results.
ONCE_TILES = 3
# Registers of each thread. A multiprocessor has 65,536; two warpgroups come nowhere
# near that.
DECODE_PRODUCER_REGISTERS = 96
DECODE_CONSUMER_REGISTERS = 240
# What goes through registers as 8 bits, and leaves as 16, takes some more.
QUANTISED_DECODE_CONSUMER_REGISTERS = 248

# Mixed. The most stages of 16-bit keys and values.
MAX_MIXED_STAGES = 4
# Registers of each thread, by the number of consumers. Three warpgroups start with 168
# for each thread, and share those; two have as many as they can use.
MIXED_PRODUCER_REGISTERS = {1: 240, 2: 40}
MIXED_CONSUMER_REGISTERS = {1: 248, 2: 232}

# Copies of blocks. Thread blocks that share those of a step, for each layer and piece
# of a block: more would mostly be launched for nothing, few steps copy more than some
# blocks.
LANES = 8
# Bytes of keys, and as many of values, that a thread block copies at a time: twice what
# must be in flight to keep the memory busy.
PIECE_BYTES = 64 * 1024


def choose_decode_stages(head_dim: int, block_size: int, kv_dtype: Any) -> int:
    """Returns the stages of decode's ring that fit in shared memory beside the rest.

    With 8 bits as many as bring the same bytes, but for the tiles that take their room.
    """
    if is_quantised(kv_dtype):
        return 8 if head_dim <= 80 else 6 if head_dim <= 128 else 4
    if head_dim <= 128:
        return 4
    return 2 if block_size < MIN_TILED_UNIT else 3


def choose_splits(rows: int, context: int, multiprocessors: int) -> int:
    """Returns into how many splits a context of a step is best cut.

    A multiprocessor runs one thread block at a time. What takes least time is the
    number of rounds, times what a thread block takes: its tiles and what comes once.

    Args:
        rows: thread blocks without splits.
        context: the longest that the step's shapes allow, in tokens.
        multiprocessors: of the GPU.
    """
    tiles = -(-context // KV_TILE)
    most = min(MAX_SPLITS, max(1, tiles // MIN_SPLIT_TILES))

    def time(splits: int) -> int:
        rounds = -(-rows * splits // multiprocessors)
        return rounds * (-(-tiles // splits) + ONCE_TILES)

    return min(range(1, most + 1), key=time)


def decode_consumer_registers(kv_dtype: Any) -> int:
    """Returns the registers of each thread of decode's consumer."""
    if is_quantised(kv_dtype):
        return QUANTISED_DECODE_CONSUMER_REGISTERS
    return DECODE_CONSUMER_REGISTERS


def choose_consumers(head_dim: int, block_size: int, kv_dtype: Any) -> int:
    """Returns how many of the mixed kernel's consumer warpgroups share the stages.

    One where a second has no room: in shared memory, for a head dim of 256; in
    registers, for small blocks and 8 bits, which each consumer takes through those.
    """
    narrow = block_size < MIN_TILED_UNIT or is_quantised(kv_dtype)
    return 1 if narrow or head_dim > MAX_COLUMNS else 2


def choose_mixed_stages(
    head_dim: int, block_size: int, consumers: int, kv_dtype: Any
) -> int:
    """Returns the stages of the mixed kernel's ring that fit beside the rest."""
    columns = min(head_dim, MAX_COLUMNS)
    each = 2 * ROWS * (head_dim + KV_TILE)  # queries and weights
    narrow = is_quantised(kv_dtype)
    if block_size < MIN_TILED_UNIT or narrow:
        each += 2 * KV_TILE * (head_dim + columns)
    each += ROWS * (columns + 2) * 4  # results
    left = SMEM_BYTES - consumers * each
    # In 8 bits twice as many bring as many bytes.
    return min(MAX_MIXED_STAGES * (1 + narrow), left // stage_bytes(head_dim, kv_dtype))


def stage_bytes(head_dim: int, kv_dtype: Any) -> int:
    """Returns the bytes of keys and values in a stage of a ring."""
    columns = head_dim, min(head_dim, MAX_COLUMNS)
    return KV_TILE * sum(bytes_per_vector(count, kv_dtype) for count in columns)


def choose_piece(block_size: int, slot_bytes: int) -> int:
    """Returns how many slots of a block are copied at a time.

    Args:
        block_size: B, slots in a block; a power of two.
        slot_bytes: of the keys of a slot, in one layer.
    """
    slots = block_size
    while slots > 1 and slots * slot_bytes > PIECE_BYTES:
        slots //= 2
    return slots


def choose_lanes(num_pairs: int) -> int:
    """Returns how many thread blocks share the copies of a step, by their most."""
    return min(LANES, num_pairs)
