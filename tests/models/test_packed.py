from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import SETTINGS, tiny_model
from model_steps import pack, poisoned_cache, run, run_plan

from paged_jax import Engine, EngineConfig, SamplingParams
from paged_jax.models import llama, packed
from paged_jax.models.config import tiny, tiny_qwen2, tiny_qwen3
from paged_jax.models.huggingface import load_config, load_params
from paged_jax.models.load import load_model

GOLDENS = Path(__file__).parents[1] / "goldens"
MODELS = ("llama", "llama_tied", "llama_rope3", "llama_linear", "qwen2", "qwen3")
TOLERANCE = 1e-4

if not packed.can_pack():
    pytest.skip(
        "no AVX2 here, or no llvmlite: weights stay as they are",
        allow_module_level=True,
    )


@pytest.mark.parametrize("name", MODELS)
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


@pytest.mark.parametrize("make", [tiny, tiny_qwen2, tiny_qwen3])
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


def test_a_machine_without_products_keeps_plain_weights(monkeypatch):
    monkeypatch.setattr(packed, "host_target", lambda: None)
    model = tiny_model()
    assert packed.pack_model(model) is model
    with pytest.raises(ValueError, match="no products for packed weights"):
        packed.pack_params(model.config, model.params)
