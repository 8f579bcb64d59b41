import json
import shutil
from pathlib import Path

import chex
import jax
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

from paged_jax.models.checkpoint import CheckpointError
from paged_jax.models.config import tiny, tiny_qwen2
from paged_jax.models.huggingface import load_config, load_directory, load_params
from paged_jax.models.llama import param_shapes
from paged_jax.models.rope import llama3_divisors

GOLDENS = Path(__file__).parents[1] / "goldens"


def edit_json(path: Path, **changes):
    """Changes fields of a JSON file; None drops one."""
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}))


@pytest.fixture
def directory(tmp_path):
    """A whole Llama directory, tokenizer included."""
    path = tmp_path / "llama"
    shutil.copytree(GOLDENS / "llama", path)
    vocab = {f"t{i}": i for i in range(96)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="t0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.save(str(path / "tokenizer.json"))
    return path


@pytest.mark.parametrize(
    "name", ["llama", "llama_tied", "llama_rope3", "llama_linear", "qwen2", "qwen3"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_have_the_announced_shapes(name, dtype):
    config = load_config(GOLDENS / name, dtype)
    params = load_params(GOLDENS / name, config)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    assert shapes == param_shapes(config)


def test_weights_are_fused_and_transposed():
    params = load_params(GOLDENS / "llama", load_config(GOLDENS / "llama"))
    tensors = load_file(GOLDENS / "llama" / "model.safetensors")
    prefix = "model.layers.1."
    qkv = [tensors[f"{prefix}self_attn.{n}_proj.weight"].T for n in "qkv"]
    mlp = [tensors[f"{prefix}mlp.{n}_proj.weight"].T for n in ("gate", "up")]
    layer = params["layer_1"]
    np.testing.assert_array_equal(layer["qkv"]["kernel"], np.hstack(qkv))
    np.testing.assert_array_equal(layer["gate_up"]["kernel"], np.hstack(mlp))
    np.testing.assert_array_equal(params["head"], tensors["lm_head.weight"])


def test_configurations_are_read():
    llama = load_config(GOLDENS / "llama")
    assert llama == tiny(
        vocab_size=96, intermediate_size=48, max_position_embeddings=128
    )
    qwen2 = load_config(GOLDENS / "qwen2", "bfloat16")
    assert qwen2 == tiny_qwen2(
        vocab_size=96,
        intermediate_size=48,
        max_position_embeddings=128,
        rms_norm_eps=1e-6,
        dtype="bfloat16",
    )
    assert load_config(GOLDENS / "qwen3").qk_norm
    assert not load_config(GOLDENS / "qwen3").tie_embeddings


def test_shards_are_found_through_the_index_or_without(tmp_path):
    config = load_config(GOLDENS / "qwen3")
    assert len(list((GOLDENS / "qwen3").glob("*.safetensors"))) > 1
    expected = load_params(GOLDENS / "qwen3", config)
    shutil.copytree(GOLDENS / "qwen3", tmp_path / "m")
    (tmp_path / "m" / "model.safetensors.index.json").unlink()
    chex.assert_trees_all_equal(load_params(tmp_path / "m", config), expected)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_any_float_type_on_disk_is_converted(dtype, directory):
    config = load_config(directory)
    file = directory / "model.safetensors"
    rounded = {name: array.astype(dtype) for name, array in load_file(file).items()}
    save_file({n: a.astype(np.float32) for n, a in rounded.items()}, file)
    expected = load_params(directory, config)
    save_file(rounded, file)
    chex.assert_trees_all_equal(load_params(directory, config), expected)


def test_a_whole_directory(directory):
    template = "{{ bos_token }}|{{ messages[0].content }}"
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template})
    )
    loaded = load_directory(directory)
    assert loaded.config == load_config(directory)
    assert loaded.tokenizer.encode("t5 t7") == [5, 7]
    assert loaded.tokenizer.eos_token_ids == (2,)
    chat = [{"role": "user", "content": "hi"}]
    assert loaded.tokenizer.apply_chat_template(chat) == "t1|hi"


def test_chat_templates_are_found_in_each_place(directory):
    def loaded():
        return load_directory(directory).tokenizer.chat_template

    assert loaded() is None
    named = [{"name": "tool", "template": "a"}, {"name": "default", "template": "b"}]
    config = directory / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": named}))
    assert loaded() == "b"
    (directory / "chat_template.jinja").write_text("c")
    assert loaded() == "c"


def test_what_ends_a_text_comes_from_the_generation_config_first(directory):
    edit_json(directory / "config.json", eos_token_id=[3, 4])
    edit_json(directory / "generation_config.json", eos_token_id=[7, 8])
    assert load_config(directory).eos_token_ids == (7, 8)
    edit_json(directory / "generation_config.json", eos_token_id=None)
    assert load_config(directory).eos_token_ids == (3, 4)
    (directory / "generation_config.json").unlink()
    edit_json(directory / "config.json", eos_token_id=None)
    assert load_config(directory).eos_token_ids == ()


def test_older_files_keep_rope_in_two_fields(directory):
    file = directory / "config.json"
    edit_json(file, rope_parameters=None, rope_theta=5e5)
    assert load_config(directory).rope_theta == 5e5
    edit_json(file, rope_scaling={"type": "linear", "factor": 2})
    assert load_config(directory).rope_divisors == (2.0,) * 4
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    edit_json(file, rope_scaling=scaling | {"rope_type": "llama3"})
    assert load_config(directory).rope_divisors == llama3_divisors(
        8,
        5e5,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_positions=8192,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            "architecture 'GemmaForCausalLM' is not supported; use one of",
        ),
        ({"architectures": None}, "architecture None is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "32"}, "hidden_size must be an integer, got '32'"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer, got True"),
        ({"num_hidden_layers": -1}, "num_layers must be a positive integer, got -1"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number, got 'small'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": ["x"]}, "eos_token_id must be an integer or a list"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object, got"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "rope scaling 'yarn' is not supported; use 'default', 'linear' or",
        ),
        (
            {"rope_parameters": {"rope_type": "linear"}},
            "rope_parameters: factor is missing",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 0}},
            "factor must be a positive number, got 0",
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor other than 1 is not supported",
        ),
        ({"attention_bias": True}, "attention_bias is True; only False is supported"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu' is supported"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is a value; only"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_named(changes, message, directory):
    (directory / "generation_config.json").unlink()
    edit_json(directory / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_config(directory)
    assert str(directory / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["{", "[]", "", "\xff", "[" * 100_000])
def test_malformed_json_is_named(content, directory):
    (directory / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config.json (is not valid|must hold)"):
        load_config(directory)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(name, directory):
    (directory / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        load_directory(directory)


def test_a_malformed_tokenizer_is_named(directory):
    (directory / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(CheckpointError, match=r"tokenizer.json is not a tokenizer"):
        load_directory(directory)


def test_missing_weights_are_named(directory):
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no \*.safetensors file"):
        load_directory(directory)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_truncated_safetensors_file_is_named(keep, directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="cannot read the weights: ") as caught:
        load_directory(directory)
    assert "\n" not in str(caught.value)


def test_a_missing_tensor_is_named(directory):
    file = directory / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)
    message = r"tensor 'model.layers.1.mlp.up_proj.weight' is missing"
    with pytest.raises(CheckpointError, match=message):
        load_directory(directory)


def test_a_tensor_of_the_wrong_shape_is_named(directory):
    edit_json(directory / "config.json", intermediate_size=64)
    message = (
        r"'model.layers.0.mlp.gate_proj.weight' has the shape \(48, 32\); "
        r"the configuration asks for \(64, 32\)"
    )
    with pytest.raises(CheckpointError, match=message):
        load_directory(directory)


def test_a_tensor_of_integers_is_named(directory):
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = np.zeros((96, 32), np.int8)
    save_file(tensors, file)
    message = "'lm_head.weight' is of type I8; use one of"
    with pytest.raises(CheckpointError, match=message):
        load_directory(directory)


def test_an_untied_model_needs_its_head(directory):
    shutil.copy(GOLDENS / "llama_tied" / "model.safetensors", directory)
    shutil.copy(GOLDENS / "llama_tied" / "config.json", directory)
    assert "head" not in load_directory(directory).params
    edit_json(directory / "config.json", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"tensor 'lm_head.weight' is missing"):
        load_directory(directory)


def test_a_missing_shard_and_a_malformed_index_are_named(tmp_path):
    path = tmp_path / "m"
    shutil.copytree(GOLDENS / "qwen3", path)
    config = load_config(path)
    shard = sorted(path.glob("*.safetensors"))[-1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} is missing"):
        load_params(path, config)
    for weight_map in (3, {"lm_head.weight": 1}, {"lm_head.weight": "../x"}):
        edit_json(path / "model.safetensors.index.json", weight_map=weight_map)
        with pytest.raises(CheckpointError, match="weight_map must map"):
            load_params(path, config)
