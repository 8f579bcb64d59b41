"""The models as files: what each form holds is what the others hold."""

import dataclasses
import json
import subprocess

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from experiments.engine_bench import gguf_export, models
from experiments.engine_bench.folders import appear
from experiments.engine_bench.random_llama import SHAPES, write_random_llama
from paged_jax import load_model
from paged_jax.models.gguf import load_gguf

MICRO = dataclasses.replace(
    SHAPES["tiny"],
    vocab_size=320,
    hidden_size=32,
    num_layers=11,  # names of ten and more are not in the order of numbers
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "micro"
    write_random_llama(folder, MICRO)
    return folder


def same(one, other):
    return jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), one, other))


def test_the_engine_loads_what_is_written(folder):
    loaded = load_model(folder)
    assert loaded.config == MICRO
    tokens = loaded.tokenizer.encode("t7 t8", add_special_tokens=False)
    assert tokens == [7, 8]


def test_weights_are_drawn_in_the_order_of_names(folder):
    tensors = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(0)
    head = rng.standard_normal((320, 32), dtype=np.float32) / np.float32(np.sqrt(32))
    head[:3] = 0  # tokens that greedy decoding never takes
    np.testing.assert_array_equal(tensors["lm_head.weight"], head)
    embedding = rng.standard_normal((320, 32), dtype=np.float32)
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], embedding)
    # Layer 10 comes before layer 2.
    order = sorted(tensors)
    assert order.index("model.layers.10.mlp.up_proj.weight") < order.index(
        "model.layers.2.mlp.up_proj.weight"
    )
    first = order[2]
    assert first == "model.layers.0.input_layernorm.weight"
    scale = 1 + np.float32(0.1) * rng.standard_normal(32, dtype=np.float32)
    np.testing.assert_array_equal(tensors[first], scale)


def test_another_seed_gives_other_weights(folder, tmp_path):
    write_random_llama(tmp_path / "other", MICRO, seed=1)
    assert not same(load_model(folder).params, load_model(tmp_path / "other").params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gguf_holds_the_same_model(folder, tmp_path, dtype):
    path = tmp_path / "model.gguf"
    gguf_export.write_gguf(folder, MICRO, path, dtype)
    loaded, expected = load_gguf(path, dtype), load_model(folder, dtype)
    # The file has this number in float32.
    assert loaded.config.rms_norm_eps == pytest.approx(MICRO.rms_norm_eps)
    config = dataclasses.replace(loaded.config, rms_norm_eps=MICRO.rms_norm_eps)
    assert config == expected.config
    assert same(loaded.params, expected.params)


def test_a_model_is_made_once(home):
    model = models.Model("tiny")
    path = model.path("directory", "float32")
    (home / "models/tiny/directory/config.json").write_text("{}")
    assert models.Model("tiny").path("any", "float32") == path
    assert json.loads((home / "models/tiny/directory/config.json").read_text()) == {}


@pytest.mark.long
def test_smollm2_is_dequantised(home):
    model = models.Model("smollm2")
    written = load_model(model.path("directory", "float32"))
    original = load_model(model.path("any", "float32"))
    assert same(written.params, original.params)
    assert written.config == dataclasses.replace(
        original.config, eos_token_ids=written.config.eos_token_ids
    )
    text = "Paged attention, in blocks of 16."
    assert written.tokenizer.encode(text) == original.tokenizer.encode(text)


def test_a_conversion_that_fails_says_why_and_leaves_nothing(home, monkeypatch):
    def run(*args, **kwargs):
        return subprocess.CompletedProcess(args, 1, "", "noise\nno such exporter\n")

    monkeypatch.setattr(models.subprocess, "run", run)
    with pytest.raises(models.FormError, match="converted: no such exporter"):
        models.Model("tiny").path("openvino", "float32")
    assert not (home / "models/tiny/openvino").exists()


def test_a_folder_appears_when_it_is_complete(tmp_path):
    place = tmp_path / "folder"
    with pytest.raises(RuntimeError), appear(place) as partial:
        (partial / "half").touch()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    for name in ("first", "second"):
        with appear(place) as partial:
            (partial / name).touch()
            assert partial != place
    assert [path.name for path in place.iterdir()] == ["second"]
