import functools
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_steps import pack, poisoned_cache, run, run_plan
from pythons import newest_but

from paged_jax.models import llama
from paged_jax.models.config import tiny, tiny_qwen2, tiny_qwen3
from paged_jax.models.huggingface import load_config, load_params

GOLDENS = Path(__file__).parents[1] / "goldens"
MODELS = ("llama", "llama_tied", "llama_rope3", "llama_linear", "qwen2", "qwen3")
TOLERANCE = 1e-4
# A plain model, and the one with the most of its own.
on_every = functools.partial(
    newest_but, ["llama", "qwen3", tiny], reason="the same parts in other orders"
)


def load_golden(name, dtype="float32"):
    config = load_config(GOLDENS / name, dtype)
    golden = np.load(GOLDENS / name / "logits.npz")
    params = load_params(GOLDENS / name, config)
    return config, params, golden["tokens"], golden["logits"]


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("name", on_every(MODELS))
def test_one_prefill_gives_the_logits_of_transformers(name, backend):
    config, params, tokens, expected = load_golden(name)
    (logits,) = run_plan(config, params, [tokens], [[len(tokens)]], backend=backend)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", on_every(MODELS))
def test_chunks_and_decode_steps_give_the_same_logits(name):
    config, params, tokens, expected = load_golden(name)
    plan = [[18], [1], [1], [9]] + [[1]] * (len(tokens) - 29)
    # Each of two sizes with every other model: what blocks hold is the attention's.
    seed = MODELS.index(name) % 2
    (logits,) = run_plan(
        config, params, [tokens], plan, block_size=(1, 16)[seed], seed=seed, size=20
    )
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)


def test_sequences_in_one_batch_do_not_see_each_other():
    config, params, tokens, expected = load_golden("qwen3")
    sequences = [tokens, tokens[:13], tokens[:30]]
    plan = [[20, 0, 2], [1, 5, 26], [0, 8, 1], [20, 0, 1]]
    for seed in range(3):
        for logits, sequence in zip(
            run_plan(config, params, sequences, plan, seed=seed),
            sequences,
            strict=True,
        ):
            np.testing.assert_allclose(
                logits, expected[: len(sequence)], rtol=0, atol=TOLERANCE
            )


@pytest.mark.parametrize("name", on_every(["llama", "qwen2", "qwen3"]))
def test_bfloat16_stays_close_and_gives_float32_logits(name):
    config, params, tokens, expected = load_golden(name, "bfloat16")
    (logits,) = run_plan(config, params, [tokens], [[len(tokens)]])
    assert logits.dtype == np.float32
    error = np.abs(logits - expected)
    spread = expected.std()
    # bfloat16 has 8 bits: errors of a percent or two of the spread, but errors there
    # are, or it was not bfloat16 that ran.
    assert 1e-3 * spread < error.mean() < 0.03 * spread
    assert error.max() < 0.2 * spread


@pytest.mark.parametrize("make", on_every([tiny, tiny_qwen2, tiny_qwen3]))
def test_only_the_sampled_rows_go_through_the_head(make):
    config = make()
    params = llama.init_params(config, jax.random.key(1))
    tokens = np.arange(10) * 7 % config.vocab_size
    tables = np.array([[2, 1, 3]])
    batch = pack([tokens], [0], [10], tables, 4, 12)
    every, _ = run(config, params, batch, poisoned_cache(config, 3, 4), "xla")
    some = batch._replace(sample_index=jnp.array([9, 4], jnp.int32))
    logits, _ = run(config, params, some, poisoned_cache(config, 3, 4), "xla")
    chex.assert_shape(logits, (2, config.vocab_size))
    np.testing.assert_allclose(logits, every[jnp.array([9, 4])], atol=1e-5)


def test_keys_and_values_go_to_their_slots_and_nowhere_else():
    config = tiny()
    params = llama.init_params(config, jax.random.key(0))
    batch = pack([np.arange(6)], [0], [6], np.array([[3, 1]]), 4, 8)
    _, cache = run(config, params, batch, poisoned_cache(config, 4, 4), "xla")
    written = np.isfinite(np.asarray(cache.k)).all((0, 3, 4))
    expected = np.zeros((5, 4), bool)
    expected[3] = True
    expected[1, :2] = True
    expected[0, 0] = True  # the padding's slot, in the null block
    np.testing.assert_array_equal(written, expected)
    np.testing.assert_array_equal(np.isfinite(cache.v).all((0, 3, 4)), expected)


def test_layers_of_a_random_model_differ():
    params = llama.init_params(tiny(), jax.random.key(0))
    for name in ("qkv", "out", "gate_up", "down"):
        first, second = (params[f"layer_{i}"][name]["kernel"] for i in (0, 1))
        assert not (first == second).any()


@pytest.mark.newest(reason="what weights are drawn, and not what is made of them")
@pytest.mark.parametrize("make", [tiny, tiny_qwen2, tiny_qwen3])
def test_random_models_have_opinions(make):
    config = make()
    params = llama.init_params(config, jax.random.key(3))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 64)
    (logits,) = run_plan(config, params, [tokens], [[64]])
    first, second = np.sort(logits, axis=-1)[:, :-3:-1].T
    assert np.median(first - second) > 0.3
    # The choice depends on more than the last token, and is not that token again.
    assert len(set(logits.argmax(-1))) > 16
    assert (logits.argmax(-1) == tokens).mean() < 0.5


def test_only_the_products_are_repeated_for_each_layer():
    config = tiny(num_layers=6)
    shapes = llama.param_shapes(config)
    batch = pack([np.arange(4)], [0], [4], np.array([[1]]), 4, 4)
    text = run.lower(
        config, shapes, batch, poisoned_cache(config, 1, 4), "reference"
    ).as_text()
    # Four products in each layer, two in the attention, one for the head.
    assert text.count("dot_general") == 4 * config.num_layers + 2 + 1


@pytest.mark.parametrize("make", on_every([tiny, tiny_qwen2, tiny_qwen3]))
def test_unrolled_layers_give_the_same_logits(make):
    config = make()
    params = llama.init_params(config, jax.random.key(2))
    batch = pack([np.arange(10)], [0], [10], np.array([[2, 1, 3]]), 4, 12)
    looped, unrolled = (
        run(config, params, batch, poisoned_cache(config, 3, 4), "xla", unroll)
        for unroll in (False, True)
    )
    chex.assert_trees_all_close(looped, unrolled, atol=1e-5)


def test_the_cache_is_written_in_place():
    config = tiny()
    batch = pack([np.arange(4)], [0], [4], np.array([[1]]), 4, 4)

    def memory(num_blocks):
        cache = poisoned_cache(config, num_blocks, 16)
        shapes = llama.param_shapes(config)
        compiled = run.lower(config, shapes, batch, cache, "xla").compile()
        return cache.nbytes, compiled.memory_analysis()

    size, small = memory(1000)
    larger_size, large = memory(4000)
    assert small.alias_size_in_bytes == size
    assert large.alias_size_in_bytes == larger_size
    assert small.temp_size_in_bytes == large.temp_size_in_bytes < size / 20
