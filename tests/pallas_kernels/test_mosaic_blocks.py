"""The Hopper kernels that write to the cache, in the interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat

if not compat.has_mosaic():
    pytest.skip("the pallas backend needs jax >= 0.11", allow_module_level=True)

from pallas_kernels import mosaic_blocks
from pallas_kernels.mosaic_blocks import (
    copy_blocks_mosaic,
    gather_blocks_mosaic,
    scatter_blocks_mosaic,
    write_kv_mosaic,
)

LAYERS, BLOCKS, BLOCK_SIZE, HEADS, DIM = 2, 6, 4, 2, 16


@pytest.fixture(autouse=True)
def clean_interpreter():
    yield
    compat.reset_interpreter()


def filled(*shape, first=0):
    """Values that bfloat16 and float32 hold exactly, and that mostly differ."""
    values = (np.arange(np.prod(shape)) + first) % 251
    return np.asarray(values, np.float32).reshape(shape)


def caches(dtype=jnp.bfloat16, blocks=BLOCKS, block_size=BLOCK_SIZE):
    shape = (LAYERS, blocks, block_size, HEADS, DIM)
    k = filled(*shape)
    return k, -k, jnp.asarray(k, dtype), jnp.asarray(-k, dtype)


def same(got, expected):
    np.testing.assert_array_equal(np.asarray(got, np.float32), expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_write_goes_to_the_slots_of_one_layer(dtype):
    k, v, k_cache, v_cache = caches(dtype)
    # Block 3 offset 1, block 1 offset 0, block 5 offset 3; padding between them.
    slots = np.array([13, 0, 4, 23, 0], np.int32)
    new = filled(5, HEADS, DIM, first=100)
    out = jax.jit(write_kv_mosaic)(
        k_cache, v_cache, jnp.int32(1), jnp.asarray(new), jnp.asarray(2 * new), slots
    )
    for token, (block, offset) in {0: (3, 1), 2: (1, 0), 3: (5, 3)}.items():
        k[1, block, offset], v[1, block, offset] = new[token], 2 * new[token]
    assert out[0].dtype == dtype
    expected = np.asarray(jnp.asarray(v, dtype), np.float32)
    same(out[0], k)
    same(out[1], expected)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_copy_makes_the_first_count_copies_in_every_layer(count, monkeypatch):
    monkeypatch.setattr(mosaic_blocks, "LANES", 2)  # one lane has two copies to make
    k, v, k_cache, v_cache = caches()
    source, target = np.array([1, 1, 5]), np.array([4, 2, 3])
    out = jax.jit(copy_blocks_mosaic)(
        k_cache, v_cache, jnp.asarray(source), jnp.asarray(target), jnp.int32(count)
    )
    for array, got in ((k, out[0]), (v, out[1])):
        array[:, target[:count]] = array[:, source[:count]]
        same(got, array)


def test_a_large_block_goes_in_pieces(monkeypatch):
    monkeypatch.setattr(mosaic_blocks, "PIECE_BYTES", 2 * HEADS * DIM * 2)
    k, _, k_cache, v_cache = caches(blocks=3, block_size=8)
    one = jnp.ones(1, jnp.int32)
    out = jax.jit(copy_blocks_mosaic)(k_cache, v_cache, one, 2 * one, jnp.int32(1))
    k[:, 2] = k[:, 1]
    same(out[0], k)


def test_gather_and_scatter_bring_blocks_to_other_places():
    k, v, k_cache, v_cache = caches()
    out_of, into = np.array([5, 2, 1]), np.array([3, 4, 0])
    count = jnp.int32(2)
    staged = jax.jit(gather_blocks_mosaic)(k_cache, v_cache, jnp.asarray(out_of), count)
    assert staged[0].shape == (LAYERS, 3, BLOCK_SIZE, HEADS, DIM)
    same(staged[0][:, :2], k[:, out_of[:2]])
    same(staged[1][:, :2], v[:, out_of[:2]])
    back = jax.jit(scatter_blocks_mosaic)(
        k_cache, v_cache, *staged, jnp.asarray(into), count
    )
    for array, got in ((k, back[0]), (v, back[1])):
        array[:, into[:2]] = array[:, out_of[:2]]
        same(got, array)


def copied_with_races_followed():
    k, _, k_cache, v_cache = caches()
    source, target = jnp.array([1, 5]), jnp.array([4, 2])
    out = jax.jit(
        lambda *args: copy_blocks_mosaic(
            *args, interpret=compat.interpret_params(True, detect_races=True)
        )
    )(k_cache, v_cache, source, target, jnp.int32(2))
    got = np.asarray(out[0], np.float32)
    assert not compat.races_found(), "data race"
    k[:, [4, 2]] = k[:, [1, 5]]
    same(got, k)


def test_no_race(monkeypatch):
    monkeypatch.setattr(mosaic_blocks, "LANES", 1)
    copied_with_races_followed()


@pytest.mark.parametrize("step", ["_await", "_drain"])
def test_a_missing_step_is_noticed(monkeypatch, capfd, step):
    """Without the wait for what comes, or for what goes, a buffer is used too early."""
    monkeypatch.setattr(mosaic_blocks, "LANES", 1)
    monkeypatch.setattr(mosaic_blocks, step, lambda *barrier: None)
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)) as error:
        copied_with_races_followed()
    printed = capfd.readouterr()
    assert "race" in f"{error.value}{printed.out}{printed.err}".lower()


def test_a_row_that_the_tma_unit_cannot_copy_is_named():
    k, v = (jnp.zeros((1, 2, 4, 1, 4), jnp.bfloat16) for _ in "kv")
    new = jnp.zeros((1, 1, 4))
    with pytest.raises(ValueError, match="Head dim 4 of bfloat16 is no multiple of 16"):
        write_kv_mosaic(k, v, 0, new, new, jnp.zeros(1, jnp.int32))
    with pytest.raises(ValueError, match=r"must be \[N, 1, 4\].*got \[N, 2, 4\]"):
        write_kv_mosaic(k, v, 0, *(jnp.zeros((1, 2, 4)),) * 2, jnp.zeros(1, jnp.int32))
