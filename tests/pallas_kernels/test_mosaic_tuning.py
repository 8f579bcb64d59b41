"""The numbers that the Hopper kernels run with."""

import jax.numpy as jnp
import pytest

from pallas_kernels import compat, limits

if not compat.has_mosaic():
    pytest.skip("the pallas backend needs jax >= 0.11", allow_module_level=True)

from pallas_kernels.mosaic_tuning import (
    PIECE_BYTES,
    choose_consumers,
    choose_decode_stages,
    choose_mixed_stages,
    choose_piece,
    choose_splits,
    stage_bytes,
)

# Head dim, block size and dtype; decode's stages; consumers and stages of mixed steps.
CHOSEN = [
    (64, 16, jnp.bfloat16, 4, 2, 4),
    (64, 1, jnp.float16, 4, 1, 4),
    (80, 256, jnp.bfloat16, 4, 2, 4),
    (96, 16, jnp.int8, 6, 1, 8),
    (128, 16, jnp.bfloat16, 4, 2, 3),
    (128, 4, jnp.bfloat16, 4, 1, 4),
    (128, 16, jnp.float8_e4m3fn, 6, 1, 8),
    (256, 16, jnp.bfloat16, 3, 1, 3),
    (256, 2, jnp.bfloat16, 2, 1, 2),
    (256, 64, jnp.int8, 4, 1, 4),
]


@pytest.mark.parametrize("head_dim,block_size,dtype,decode,consumers,mixed", CHOSEN)
def test_stages_fill_the_shared_memory(
    head_dim, block_size, dtype, decode, consumers, mixed
):
    shape = head_dim, block_size
    assert choose_decode_stages(*shape, dtype) == decode
    assert choose_consumers(*shape, dtype) == consumers
    assert choose_mixed_stages(*shape, consumers, dtype) == mixed


def test_keys_and_values_are_asked_for_ahead():
    kinds = (1, jnp.bfloat16), (4, jnp.float16), (16, jnp.bfloat16), (16, jnp.int8)
    for head_dim in limits.HEAD_DIMS:
        for block_size, dtype in kinds:
            shape = head_dim, block_size
            consumers = choose_consumers(*shape, dtype)
            for stages in (
                choose_decode_stages(*shape, dtype),
                choose_mixed_stages(*shape, consumers, dtype),
            ):
                assert stages >= 2, (shape, dtype)
                in_flight = stages * stage_bytes(head_dim, dtype)
                assert in_flight >= 32 * 1024, (shape, dtype)


@pytest.mark.parametrize(
    "rows,context,expected",
    [
        (1, 64, 1),  # nothing to split
        (1, 65536, 128),
        (8, 65536, 16),  # 8 * 16 thread blocks fill 132 multiprocessors once
        (48, 4096, 5),  # 2 rounds of 13 tiles; 2 splits would be 1 round of 32
        (132, 4096, 1),
        (768, 1024, 1),
    ],
)
def test_splits_fill_the_multiprocessors(rows, context, expected):
    assert choose_splits(rows, context, 132) == expected


def test_fewer_multiprocessors_want_fewer_splits():
    assert choose_splits(8, 65536, 66) == 8


@pytest.mark.parametrize(
    "block_size,slot_bytes,slots",
    [
        (16, 384, 16),  # a block at a time
        (256, 384, 128),
        (256, 8192, 8),
        (1, 2 * PIECE_BYTES, 1),  # a slot is not cut
    ],
)
def test_a_piece_is_of_as_many_slots_as_have_room(block_size, slot_bytes, slots):
    assert choose_piece(block_size, slot_bytes) == slots
