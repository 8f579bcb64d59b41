import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import SETTINGS, tiny_model
from model_steps import pack, poisoned_cache, run, run_plan
from pythons import SAME_KIND, newest_but

from paged_jax import ConfigError, Engine, EngineConfig, SamplingParams
from paged_jax.models import llama, packed
from paged_jax.models.config import tiny, tiny_qwen2, tiny_qwen3
from paged_jax.models.huggingface import load_config, load_params
from paged_jax.models.load import load_model

GOLDENS = Path(__file__).parents[1] / "goldens"
MODELS = ("llama", "llama_tied", "llama_rope3", "llama_linear", "qwen2", "qwen3")
TOLERANCE = 1e-4
on_every = functools.partial(
    newest_but, ["llama", "qwen3", tiny], reason="the same parts in other orders"
)

if not packed.can_pack():
    pytest.skip(
        "no AVX2 here, or no llvmlite: weights stay as they are",
        allow_module_level=True,
    )


@pytest.mark.parametrize("name", on_every(MODELS))
def test_logits_are_those_of_transformers(name):
    config = load_config(GOLDENS / name, "float32")
    golden = np.load(GOLDENS / name / "logits.npz")
    params = packed.pack_params(config, load_params(GOLDENS / name, config))
    tokens = golden["tokens"]
    plan = [[18], [1], [1], [9]] + [[1]] * (len(tokens) - 29)
    (logits,) = run_plan(config, params, [tokens], plan, size=20)
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=TOLERANCE)


def test_logits_of_smollm2_are_those_of_transformers():
    golden = np.load(GOLDENS / "smollm2" / "logits.npz")
    tokens, positions = golden["tokens"], golden["positions"]
    model = packed.pack_model(load_model())
    plan = [[16], [1], [16], [len(tokens) - 33]]
    (logits,) = run_plan(
        model.config, model.params, [tokens], plan, block_size=16, size=32
    )
    np.testing.assert_allclose(
        logits[positions], golden["logits"], rtol=0, atol=TOLERANCE
    )


@pytest.mark.parametrize("make", on_every([tiny, tiny_qwen2, tiny_qwen3]))
def test_bfloat16_gives_what_plain_weights_give(make):
    # Sizes that fill no panel.
    config = make(dtype="bfloat16", vocab_size=77, intermediate_size=50)
    plain = llama.init_params(config, jax.random.key(1))
    params = packed.pack_params(config, plain)
    assert params["kernels"]["qkv"].dtype == jnp.bfloat16
    batch = pack([np.arange(10)], [0], [10], np.array([[2, 1, 3]]), 4, 12)
    expected, _ = run(config, plain, batch, poisoned_cache(config, 3, 4), "xla")
    logits, _ = run(config, params, batch, poisoned_cache(config, 3, 4), "xla")
    assert logits.shape == expected.shape and logits.dtype == jnp.float32
    spread = np.std(expected[:10])
    np.testing.assert_allclose(logits[:10], expected[:10], rtol=0, atol=spread / 10)


@pytest.mark.parametrize("name", on_every(MODELS))
def test_logits_of_int8_weights_are_near_those_of_transformers(name):
    config = load_config(GOLDENS / name, "float32")
    golden = np.load(GOLDENS / name / "logits.npz")
    plain = load_params(GOLDENS / name, config)
    params = packed.pack_params(config, plain, "int8")
    assert packed.packed_dtype(params) == "int8"
    tokens = golden["tokens"]
    (logits,) = run_plan(config, params, [tokens], [[len(tokens)]], size=64)
    assert divergence(golden["logits"], logits) < 1e-3


@pytest.mark.newest(reason="the same products, of a larger model")
@pytest.mark.parametrize(
    ("dtype", "weights_dtype", "most"),
    [("bfloat16", None, 1e-3), ("float32", "int8", 2e-2)],
)
def test_smollm2_predicts_as_in_float32(dtype, weights_dtype, most):
    golden = np.load(GOLDENS / "smollm2" / "logits.npz")
    tokens, positions = golden["tokens"], golden["positions"]
    model = packed.pack_model(load_model(dtype=dtype), weights_dtype=weights_dtype)
    (logits,) = run_plan(
        model.config, model.params, [tokens], [[len(tokens)]], block_size=16, size=64
    )
    assert divergence(golden["logits"], logits[positions]) < most


def divergence(expected, logits) -> float:
    """The mean Kullback-Leibler divergence of predictions, in nats."""
    p, q = (jax.nn.log_softmax(jnp.asarray(x, jnp.float32)) for x in (expected, logits))
    return float(jnp.sum(jnp.exp(p) * (p - q), -1).mean())


def test_every_weight_is_packed_once():
    config = tiny(num_layers=3)
    plain = llama.init_params(config, jax.random.key(0))
    params = packed.pack_params(config, plain)
    assert packed.is_packed(params) and not packed.is_packed(plain)
    assert packed.pack_params(config, params) is params
    # What the panels hold beside the weights are zeros.
    for total in (lambda x: (x != 0).sum(), lambda x: np.abs(x).sum()):
        np.testing.assert_allclose(
            sum(float(total(np.asarray(x))) for x in jax.tree.leaves(params)),
            sum(float(total(np.asarray(x))) for x in jax.tree.leaves(plain)),
            rtol=1e-6,
        )


def test_an_engine_packs_unless_told_otherwise():
    model = tiny_model()
    prompt = list(range(3, 20))
    outputs = []
    for products in ("auto", "xla"):
        engine = Engine(model, EngineConfig(**SETTINGS, products=products))
        assert packed.is_packed(engine.model.params) == (products == "auto")
        (result,) = engine.generate([prompt], SamplingParams(max_tokens=20))
        outputs.append(result.outputs[0].token_ids)
    assert outputs[0] == outputs[1]
    assert not packed.is_packed(model.params)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"dtype": "bfloat16"}, id="bfloat16", marks=SAME_KIND),
        pytest.param({"weights_dtype": "int8"}, id="int8"),
    ],
)
def test_tokens_do_not_depend_on_who_else_is_served(settings):
    model = tiny_model(dtype=settings.get("dtype", "float32"))
    config = EngineConfig(**SETTINGS, **settings)
    prompts = [list(range(3 + i, 8 + 5 * i)) for i in range(6)]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    engine = Engine(model, config)
    together = [r.outputs[0].token_ids for r in engine.generate(prompts, params)]
    assert engine.stats.recomputed_tokens > 0  # it was short of blocks
    for prompt, expected in zip(prompts, together, strict=True):
        (alone,) = engine.generate([prompt], params)
        assert alone.outputs[0].token_ids == expected


def test_an_engine_refuses_weights_that_are_packed_otherwise():
    model = packed.pack_model(tiny_model())
    with pytest.raises(ConfigError, match="int8 and the model's weights were packed"):
        Engine(model, EngineConfig(**SETTINGS, weights_dtype="int8"))
    model = packed.pack_model(tiny_model(), weights_dtype="int8")
    with pytest.raises(ConfigError, match="is None and .* packed as int8; pack them"):
        Engine(model, EngineConfig(**SETTINGS))


def test_a_machine_without_products_keeps_plain_weights(monkeypatch):
    monkeypatch.setattr(packed, "host_target", lambda: None)
    model = tiny_model()
    assert packed.pack_model(model) is model
    with pytest.raises(ConfigError, match="weights_dtype is int8, which needs an x86"):
        Engine(model, EngineConfig(**SETTINGS, weights_dtype="int8"))
    with pytest.raises(ValueError, match="no products for packed weights"):
        packed.pack_params(model.config, model.params)
