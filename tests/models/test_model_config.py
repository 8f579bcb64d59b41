import dataclasses

import jax
import pytest

from experiments.smollm2_shape import SMOLLM2
from paged_jax.models.config import tiny, tiny_qwen2, tiny_qwen3
from paged_jax.models.llama import init_params, param_shapes

PRESETS = {
    "tiny": tiny(),
    "tied": tiny(tie_embeddings=True),
    "qwen2": tiny_qwen2(),
    "qwen3": tiny_qwen3(),
}


@pytest.mark.parametrize("config", PRESETS.values(), ids=PRESETS)
def test_num_params_is_the_size_of_the_parameter_tree(config):
    shapes = jax.tree.leaves(param_shapes(config))
    assert config.num_params == sum(s.size for s in shapes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_parameters_have_the_announced_shapes_and_dtype(dtype):
    config = tiny_qwen3(dtype=dtype)
    params = init_params(config, jax.random.key(0))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    assert shapes == param_shapes(config)
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {dtype}


def test_kv_bytes_of_a_token():
    config = tiny(num_layers=3, num_kv_heads=2, head_dim=8)
    assert config.kv_bytes_per_token() == 2 * 3 * 2 * 8 * 4
    assert config.kv_bytes_per_token("bfloat16") == 2 * 3 * 2 * 8 * 2
    assert tiny(dtype="bfloat16").kv_bytes_per_token() == 2 * 2 * 2 * 8 * 2


def test_config_is_a_static_argument():
    assert hash(tiny()) == hash(tiny())
    assert tiny() == tiny() != tiny(num_layers=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny().num_layers = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be a positive integer, got 0"),
        ({"vocab_size": 1.5}, "vocab_size must be a positive integer, got 1.5"),
        ({"hidden_size": True}, "hidden_size must be a positive integer, got True"),
        ({"num_kv_heads": 3}, "num_heads 4 must be a multiple of num_kv_heads 3"),
        ({"head_dim": 7}, "head_dim must be even .* got 7"),
        ({"rope_theta": -1.0}, "rope_theta must be a positive number, got -1.0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        ({"rope_divisors": (1.0,)}, "must have head_dim / 2 = 4 values, got 1"),
        ({"dtype": "float16"}, "Unknown model dtype 'float16'; use one of"),
    ],
)
def test_an_impossible_shape_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny(**changes)


def test_smollm2_has_135_million_parameters():
    config = dataclasses.replace(SMOLLM2, dtype="float32")
    assert config.num_params == 134_515_008
    assert config.kv_bytes_per_token() == 46_080
