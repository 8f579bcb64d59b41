"""The Hopper kernels that write to the cache, in the interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat

if not compat.has_mosaic():
    pytest.skip("the pallas backend needs jax >= 0.11", allow_module_level=True)

from pallas_kernels import mosaic_blocks, mosaic_tuning
from pallas_kernels.mosaic_blocks import (
    copy_blocks_mosaic,
    gather_blocks_mosaic,
    scatter_blocks_mosaic,
    write_kv_mosaic,
)
from pallas_kernels.quantised_kv import scale_shape

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
    """Returns what the arrays of a cache hold, and the arrays."""
    shape = (LAYERS, blocks, block_size, HEADS, DIM)
    if dtype == jnp.int8:
        k, of_k = filled(*shape) % 100, filled(*scale_shape(shape), first=7)
        expected = [k, -k, of_k, -of_k]
    else:
        expected = [filled(*shape), -filled(*shape)]
    dtypes = (dtype, dtype, jnp.float32, jnp.float32)
    return expected, [jnp.asarray(x, kind) for x, kind in zip(expected, dtypes)]


def same(got, expected):
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected):
        np.testing.assert_array_equal(np.asarray(ours, np.float32), theirs)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.int8])
def test_write_goes_to_the_slots_of_one_layer(dtype):
    expected, cache = caches(dtype)
    # Block 3 offset 1, block 1 offset 0, block 5 offset 3; padding between them.
    slots = np.array([13, 0, 4, 23, 0], np.int32)
    k = filled(5, HEADS, DIM, first=100) % 50
    new = [k, 2 * k, k[..., 0] / 8, k[..., 1] / 4][: len(cache)]
    out = jax.jit(write_kv_mosaic)(
        cache, [jnp.asarray(x) for x in new], jnp.int32(1), slots
    )
    for token, (block, offset) in {0: (3, 1), 2: (1, 0), 3: (5, 3)}.items():
        for array, values in zip(expected, new):
            if array.ndim == 5:
                array[1, block, offset] = values[token]
            else:
                array[1, block, :, offset] = values[token]
    assert [x.dtype for x in out] == [x.dtype for x in cache]
    same(out, expected)


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
def test_copy_makes_the_first_count_copies_in_every_layer(count, dtype, monkeypatch):
    monkeypatch.setattr(mosaic_tuning, "LANES", 2)  # one lane has two copies to make
    expected, cache = caches(dtype)
    source, target = np.array([1, 1, 5]), np.array([4, 2, 3])
    out = jax.jit(copy_blocks_mosaic)(
        cache, jnp.asarray(source), jnp.asarray(target), jnp.int32(count)
    )
    for array in expected:
        array[:, target[:count]] = array[:, source[:count]]
    same(out, expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
def test_a_large_block_goes_in_pieces(dtype, monkeypatch):
    monkeypatch.setattr(mosaic_tuning, "PIECE_BYTES", 128)
    expected, cache = caches(dtype, blocks=3, block_size=8)
    one = jnp.ones(1, jnp.int32)
    out = jax.jit(copy_blocks_mosaic)(cache, one, 2 * one, jnp.int32(1))
    for array in expected:
        array[:, 2] = array[:, 1]
    same(out, expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
def test_gather_and_scatter_bring_blocks_to_other_places(dtype):
    expected, cache = caches(dtype)
    out_of, into = np.array([5, 2, 1]), np.array([3, 4, 0])
    count = jnp.int32(2)
    staged = jax.jit(gather_blocks_mosaic)(cache, jnp.asarray(out_of), count)
    assert staged[0].shape == (LAYERS, 3, BLOCK_SIZE, HEADS, DIM)
    same([x[:, :2] for x in staged], [x[:, out_of[:2]] for x in expected])
    back = jax.jit(scatter_blocks_mosaic)(cache, staged, jnp.asarray(into), count)
    for array in expected:
        array[:, into[:2]] = array[:, out_of[:2]]
    same(back, expected)


def followed(function):
    """A kernel whose reads and writes of shared memory the interpreter follows."""
    interpret = compat.interpret_params(True, detect_races=True)
    # A new function each time, so that nothing is traced before the planted bug.
    return jax.jit(lambda *args: function(*args, interpret=interpret))


def write_with_races_followed(dtype):
    expected, cache = caches(dtype)
    k = filled(2, HEADS, DIM, first=100) % 50
    new = [k, 2 * k, k[..., 0], k[..., 1]][: len(cache)]
    args = [jnp.asarray(x) for x in new], jnp.int32(1), jnp.array([13, 4])
    out = followed(write_kv_mosaic)(cache, *args)
    for array, values in zip(expected, new):
        lines = array if array.ndim == 5 else array.swapaxes(2, 3)
        lines[1, [3, 1], [1, 0]] = values
    return out, expected


def copy_with_races_followed(dtype):
    expected, cache = caches(dtype)
    source, target = jnp.array([1, 5]), jnp.array([4, 2])
    out = followed(copy_blocks_mosaic)(cache, source, target, jnp.int32(2))
    for array in expected:
        array[:, [4, 2]] = array[:, [1, 5]]
    return out, expected


def gather_with_races_followed(dtype):
    expected, cache = caches(dtype)
    out = followed(gather_blocks_mosaic)(cache, jnp.array([5, 2]), jnp.int32(2))
    return out, [array[:, [5, 2]] for array in expected]


def scatter_with_races_followed(dtype):
    expected, cache = caches(dtype)
    staged = [array[:, [1, 4]] for array in cache]
    blocks = jnp.array([3, 5])
    out = followed(scatter_blocks_mosaic)(cache, staged, blocks, jnp.int32(2))
    for array in expected:
        array[:, [3, 5]] = array[:, [1, 4]]
    return out, expected


KERNELS = {
    "write": write_with_races_followed,
    "copy": copy_with_races_followed,
    "gather": gather_with_races_followed,
    "scatter": scatter_with_races_followed,
}


def check_races(kernel, dtype=jnp.bfloat16):
    """Runs a kernel with the detector; its one lane uses its buffers twice."""
    out, expected = jax.block_until_ready(KERNELS[kernel](dtype))
    assert not compat.races_found(), "data race"
    same(out, expected)


@pytest.fixture
def one_lane(monkeypatch):
    monkeypatch.setattr(mosaic_tuning, "LANES", 1)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_race(kernel, dtype, one_lane):
    check_races(kernel, dtype)


# The drain of `write` keeps its buffers from the next thread block, which in the
# interpreter has its own.
@pytest.mark.parametrize(
    "kernel,step",
    [
        ("write", "_await"),
        ("copy", "_await"),
        ("copy", "_drain"),
        ("gather", "_await"),
        ("gather", "_drain"),
        ("scatter", "_await"),
        ("scatter", "_drain"),
    ],
)
def test_a_missing_step_is_noticed(monkeypatch, capfd, one_lane, kernel, step):
    """Without the wait for what comes, or for what goes, a buffer is used too early."""
    monkeypatch.setattr(mosaic_blocks, step, lambda *barrier: None)
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)) as error:
        check_races(kernel)
    printed = capfd.readouterr()
    assert "race" in f"{error.value}{printed.out}{printed.err}".lower()


def test_a_row_that_the_tma_unit_cannot_copy_is_named():
    cache = [jnp.zeros((1, 2, 4, 1, 4), jnp.bfloat16)] * 2
    slots = jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match="Head dim 4 of bfloat16 is no multiple of 16"):
        write_kv_mosaic(cache, [jnp.zeros((1, 1, 4))] * 2, 0, slots)
    with pytest.raises(ValueError, match=r"must be \[N, 1, 4\].*got \[N, 2, 4\]"):
        write_kv_mosaic(cache, [jnp.zeros((1, 2, 4))] * 2, 0, slots)


def test_scales_that_the_tma_unit_cannot_copy_are_named():
    _, cache = caches(jnp.int8, block_size=1)
    ids = jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match="scales of 1 slots of 2 KV heads are no mult"):
        copy_blocks_mosaic(cache, ids, ids, jnp.int32(1))
