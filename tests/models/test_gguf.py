import dataclasses
import struct

import chex
import gguf
import jax
import numpy as np
import pytest
from gguf_files import gguf_name, random_tensors, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from model_steps import run_plan

from paged_jax.models.checkpoint import CheckpointError
from paged_jax.models.config import ModelConfig
from paged_jax.models.gguf import load_gguf
from paged_jax.models.gguf_file import GGUFFile
from paged_jax.models.weights import assemble_params

pytestmark = pytest.mark.newest(
    reason="reads files with numpy; what is read is served the same"
)

Kind = gguf.GGMLQuantizationType
# Every row is a whole number of quantisation blocks of 32.
CONFIG = ModelConfig(
    vocab_size=320,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=96,
    rope_theta=50000.0,
    rms_norm_eps=2.0**-17,
    max_position_embeddings=512,
    eos_token_ids=(2,),
    bos_token_id=1,
)
TIED = dataclasses.replace(CONFIG, tie_embeddings=True)
ARCHITECTURES = {
    "llama": CONFIG,
    "qwen2": dataclasses.replace(TIED, qkv_bias=True),
    "qwen3": dataclasses.replace(CONFIG, qk_norm=True),
}


def assemble(config, tensors):
    return assemble_params(config, lambda name, shape: tensors[name])


@pytest.fixture(scope="module")
def tensors():
    return random_tensors(CONFIG)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_an_architecture_comes_back_whole(arch, tmp_path):
    config = ARCHITECTURES[arch]
    tensors = random_tensors(config)
    loaded = load_gguf(write_gguf(tmp_path / "m.gguf", config, tensors, arch))
    assert loaded.config == config
    chex.assert_trees_all_equal(loaded.params, assemble(config, tensors))


def test_llama_rows_of_q_and_k_are_put_back_in_order(tmp_path, tensors):
    """The file holds them permuted: the first rows of a head are 0, D / 2, 1, ..."""
    path = write_gguf(tmp_path / "m.gguf", CONFIG, tensors)
    by_name = {t.name: t.data for t in gguf.GGUFReader(path).tensors}
    q = tensors["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(by_name["blk.0.attn_q.weight"][:4], q[[0, 16, 1, 17]])
    kernel = load_gguf(path).params["layer_0"]["qkv"]["kernel"]
    np.testing.assert_array_equal(kernel[:, :128], q.T)


def test_a_gguf_and_its_tensors_give_the_same_logits(tmp_path, tensors):
    loaded = load_gguf(write_gguf(tmp_path / "m.gguf", CONFIG, tensors))
    tokens = np.arange(24) * 13 % CONFIG.vocab_size
    expected = run_plan(CONFIG, assemble(CONFIG, tensors), [tokens], [[24]])
    actual = run_plan(loaded.config, loaded.params, [tokens], [[24]])
    chex.assert_trees_all_equal(actual, expected)


def dequantize(raw: np.ndarray, kind: Kind) -> np.ndarray:
    """The quantisations with one scale, in plain numpy, from a row's bytes."""
    block = gguf.GGML_QUANT_SIZES[kind][1]
    rows = raw.reshape(raw.shape[0], -1, block)

    def half(start):
        return np.ascontiguousarray(rows[..., start : start + 2]).view(np.float16)

    def nibbles(start):
        packed = rows[..., start:]
        return np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.float32)

    scale = half(0).astype(np.float32)
    if kind == Kind.Q8_0:
        values = scale * rows[..., 2:].view(np.int8)
    elif kind == Kind.Q4_0:
        values = scale * (nibbles(2) - 8)
    else:
        values = scale * nibbles(4) + half(2).astype(np.float32)
    return values.reshape(raw.shape[0], -1)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_quantised_blocks_are_read_by_the_book(kind, tmp_path, tensors):
    path = write_gguf(tmp_path / "m.gguf", CONFIG, tensors, kind=kind)
    array = tensors["model.embed_tokens.weight"]
    expected = dequantize(gguf.quants.quantize(array, kind), kind)
    actual = GGUFFile(path).read("token_embd.weight")
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)
    assert 0 < np.abs(actual - array).max() < 0.6


@pytest.mark.parametrize(
    "kind",
    [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1],
    ids=lambda kind: kind.name,
)
def test_every_quantisation_loads_as_its_dequantised_weights(kind, tmp_path, tensors):
    loaded = load_gguf(write_gguf(tmp_path / "m.gguf", CONFIG, tensors, kind=kind))

    def rounded(name, array):
        if array.ndim == 1:
            return array
        # Rounding works along rows, so it may come before or after their permutation.
        return gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)

    expected = {name: rounded(name, array) for name, array in tensors.items()}
    chex.assert_trees_all_equal(loaded.params, assemble(CONFIG, expected))


def test_weights_are_converted_to_the_wanted_dtype(tmp_path, tensors):
    path = write_gguf(tmp_path / "m.gguf", CONFIG, tensors, kind=Kind.Q8_0)
    full, half = load_gguf(path, "float32"), load_gguf(path, "bfloat16")
    assert half.config == dataclasses.replace(full.config, dtype="bfloat16")
    expected = jax.tree.map(lambda x: x.astype("bfloat16"), full.params)
    chex.assert_trees_all_equal(half.params, expected)


def test_tokenizer_and_template_come_along(tmp_path, tensors):
    tokenizer = load_gguf(write_gguf(tmp_path / "m.gguf", CONFIG, tensors)).tokenizer
    ids = tokenizer.encode("hello world<end>")
    assert [tokenizer.backend.id_to_token(i) for i in ids] == [
        *("hello", "Ġwor", "l", "d", "<end>"),
    ]
    assert tokenizer.decode(ids) == "hello world"
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.vocab_size == CONFIG.vocab_size
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert chat == "[user] hi"


def test_what_ends_a_text_includes_the_end_of_a_turn(tmp_path, tensors):
    changes = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2}
    path = write_gguf(tmp_path / "m.gguf", CONFIG, tensors, changes=changes)
    assert load_gguf(path).config.eos_token_ids == (2, 7)


def test_rope_scaling_is_read(tmp_path, tensors):
    def divisors(changes):
        path = write_gguf(tmp_path / "m.gguf", CONFIG, tensors, changes=changes)
        return load_gguf(path).config.rope_divisors

    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert divisors(linear) == (4.0,) * 16
    table = np.linspace(1, 8, 16, dtype=np.float32)
    assert divisors({"rope_freqs.weight": table}) == tuple(table.tolist())
    assert divisors({"llama.rope.scaling.type": "none"}) == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blk.1.ffn_up.weight": None}, "tensor 'blk.1.ffn_up.weight' is missing"),
        (
            {"blk.1.ffn_up.weight": np.zeros((96, 32), np.float32)},
            r"'blk.1.ffn_up.weight' has the shape \(96, 32\); .* asks for \(96, 64\)",
        ),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": 3}, "tensor 'blk.2.attn_q.weight' is missing"),
        ({"llama.block_count": "2"}, "llama.block_count must be an integer, got '2'"),
        (
            {"llama.attention.head_count": [4, 4]},
            "llama.attention.head_count must be an integer, got",
        ),
        (
            {"llama.attention.head_count": 0},
            "num_heads must be a positive integer, got 0",
        ),
        ({"llama.attention.head_count_kv": 3}, "must be a multiple of num_kv_heads 3"),
        ({"llama.attention.value_length": 16}, "value_length is 16; only .* 32"),
        ({"llama.rope.dimension_count": 16}, "rope.dimension_count is 16"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn' is not supported"),
        ({"llama.expert_count": 8}, "mixtures of experts are not supported"),
        ({"split.count": 2}, "one part of a split GGUF; merge the parts first"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer 'bert' is not supported"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken' is not supported"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer.ggml.merges": ["x zz"]}, "merges do not fit the tokens"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "token_type must have one value per"),
        ({"tokenizer.ggml.model": "llama"}, "scores must have one value per token"),
    ],
)
def test_what_cannot_be_used_is_named(changes, message, tmp_path, tensors):
    path = tmp_path / "m.gguf"
    known = {gguf_name(name): array for name, array in tensors.items()}
    dropped = {name for name, value in changes.items() if value is None}
    kept = {k: v for k, v in tensors.items() if gguf_name(k) not in dropped}
    replaced = {k for k in kept if gguf_name(k) in changes}
    assert dropped & known.keys() or replaced or not changes.keys() & known.keys()
    write_gguf(path, CONFIG, kept, changes=changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_gguf(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_architecture_is_named(tmp_path, tensors):
    path = write_gguf(tmp_path / "m.gguf", CONFIG, tensors, arch="gemma")
    with pytest.raises(CheckpointError, match="architecture 'gemma' is not supported"):
        load_gguf(path)


def test_a_file_that_is_no_gguf_is_named(tmp_path):
    path = tmp_path / "m.gguf"
    with pytest.raises(CheckpointError, match="No such file"):
        load_gguf(path)
    for content in (b"", b"GGU", b"PK\x03\x04 and more"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="is not a GGUF file"):
            load_gguf(path)
    path.write_bytes(b"GGUF" + struct.pack("<I", 1) + bytes(100))
    with pytest.raises(CheckpointError, match="GGUF version 1; only"):
        load_gguf(path)


@pytest.fixture(scope="module")
def small(tmp_path_factory, tensors):
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return write_gguf(path, CONFIG, tensors, kind=Kind.Q8_0)


@given(data=st.data())
def test_a_truncated_file_is_an_error(data, small):
    content = small.read_bytes()
    # Half of the cuts inside the metadata, where the structure is.
    end = data.draw(st.sampled_from([8192, len(content)]))
    path = small.with_name("cut.gguf")
    path.write_bytes(content[: data.draw(st.integers(4, end - 1))])
    with pytest.raises(CheckpointError, match="is truncated or malformed"):
        GGUFFile(path)


@settings(max_examples=300)
@given(
    edits=st.lists(
        st.tuples(st.integers(4, 12000), st.integers(0, 255)), min_size=1, max_size=4
    )
)
def test_a_damaged_file_is_an_error_or_a_file(edits, small):
    damaged = bytearray(small.read_bytes())
    for position, value in edits:
        damaged[position] = value
    path = small.with_name("damaged.gguf")
    path.write_bytes(damaged)
    try:
        load_gguf(path)
    except CheckpointError as error:
        assert "\n" not in str(error)
