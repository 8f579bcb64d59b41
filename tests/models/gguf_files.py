"""Writes small GGUF files from Hugging Face tensors, as llama.cpp's converter would."""

import functools
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from paged_jax.models.config import ModelConfig

F32 = gguf.GGMLQuantizationType.F32
CHAT_TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"

LAYER_NAMES = (
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.o_proj", "attn_output"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
)


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under their Hugging Face names."""
    rng = np.random.default_rng(seed)
    c, d = config, config.head_dim

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    tensors = {
        "model.embed_tokens.weight": normal(c.vocab_size, c.hidden_size),
        "model.norm.weight": normal(c.hidden_size),
    }
    if not c.tie_embeddings:
        tensors["lm_head.weight"] = normal(c.vocab_size, c.hidden_size)
    for i in range(c.num_layers):
        layer = {
            "input_layernorm.weight": normal(c.hidden_size),
            "post_attention_layernorm.weight": normal(c.hidden_size),
            "self_attn.o_proj.weight": normal(c.hidden_size, c.num_heads * d),
            "mlp.gate_proj.weight": normal(c.intermediate_size, c.hidden_size),
            "mlp.up_proj.weight": normal(c.intermediate_size, c.hidden_size),
            "mlp.down_proj.weight": normal(c.hidden_size, c.intermediate_size),
        }
        for name, heads in (
            ("q", c.num_heads),
            ("k", c.num_kv_heads),
            ("v", c.num_kv_heads),
        ):
            layer[f"self_attn.{name}_proj.weight"] = normal(heads * d, c.hidden_size)
            if c.qkv_bias:
                layer[f"self_attn.{name}_proj.bias"] = normal(heads * d)
        if c.qk_norm:
            layer["self_attn.q_norm.weight"] = normal(d)
            layer["self_attn.k_norm.weight"] = normal(d)
        tensors |= {f"model.layers.{i}.{k}": v for k, v in layer.items()}
    return tensors


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor."""
    for hf, short in (
        ("model.embed_tokens.", "token_embd."),
        ("model.norm.", "output_norm."),
        ("lm_head.", "output."),
        ("model.layers.", "blk."),
        *((f".{hf}.", f".{short}.") for hf, short in LAYER_NAMES),
    ):
        name = name.replace(hf, short)
    return name


def permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Interleaves the halves of each head: 0, D / 2, 1, D / 2 + 1, ..."""
    dim = len(rows) // num_heads
    order = np.arange(dim).reshape(2, dim // 2).T.ravel()
    whole = np.concatenate([order + head * dim for head in range(num_heads)])
    return rows[whole]


@functools.cache
def byte_stand_ins() -> list[str]:
    """The printable stand-in of each byte in a byte-level vocabulary."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(b if b in printable else next(others)) for b in range(256)]


def metadata(config: ModelConfig, arch: str) -> dict[str, Any]:
    """The keys of a file of this architecture, with a byte-level tokenizer."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or"]
    tokens = ["<pad>", "<s>", "<end>"] + byte_stand_ins()
    tokens += [merge.replace(" ", "") for merge in merges]
    kinds = [gguf.TokenType.CONTROL] * 3
    kinds += [gguf.TokenType.NORMAL] * (len(tokens) - 3)
    unused = config.vocab_size - len(tokens)
    return {
        f"{arch}.block_count": config.num_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_heads,
        f"{arch}.attention.head_count_kv": config.num_kv_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": config.rope_theta,
        f"{arch}.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens + [f"<unused{i}>" for i in range(unused)],
        "tokenizer.ggml.token_type": [int(k) for k in kinds]
        + [int(gguf.TokenType.UNUSED)] * unused,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: dict[str, np.ndarray],
    arch: str = "llama",
    kind: gguf.GGMLQuantizationType = F32,
    changes: dict[str, Any] | None = None,
) -> Path:
    """Writes a file; matrices in the format `kind`, vectors in float32.

    `changes` replaces keys of the metadata, or drops those that are None. It may name
    tensors too, by their GGUF names.
    """
    changes = changes or {}
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (metadata(config, arch) | changes).items():
        if isinstance(value, np.ndarray) or value is None:
            continue
        add_value(writer, key, value)
    arrays = {gguf_name(name): array for name, array in tensors.items()}
    for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
        for key in arrays:
            if arch == "llama" and f"attn_{name}." in key:
                arrays[key] = permute(arrays[key], heads)
    for name, array in (arrays | changes).items():
        if not isinstance(array, np.ndarray):
            continue
        if array.ndim == 1:
            writer.add_tensor(name, array.astype(np.float32))
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Adds a value in the type that llama.cpp would use."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
