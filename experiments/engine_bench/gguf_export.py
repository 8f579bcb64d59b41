"""Writes a random Llama as GGUF, for llama.cpp."""

from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np
import safetensors

from experiments.engine_bench.random_llama import SPECIAL
from paged_jax.models.config import ModelConfig

KINDS = {"float32": "f32", "bfloat16": "bf16"}
_BYTES = 256  # tokens that llama.cpp expects of a vocabulary such as Llama's

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def write_gguf(folder: Path, config: ModelConfig, path: Path, dtype: str) -> None:
    """Converts a Hugging Face directory of a plain float32 Llama.

    Args:
      folder: with model.safetensors.
      config: of the model.
      path: the file; it appears when it is complete.
      dtype: of the matrices; vectors stay float32, as llama.cpp wants them.
    """
    partial = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    _write_config(writer, config, dtype)
    _write_vocabulary(writer, config)
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    with safetensors.safe_open(folder / "model.safetensors", "np") as tensors:
        for name in tensors.keys():
            value = tensors.get_tensor(name)
            module = name.removesuffix(".weight")
            projection = module.rpartition(".")[2]
            if projection in heads:
                value = permute(value, heads[projection])
            _write_tensor(writer, gguf_name(module), value, dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)


def gguf_name(module: str) -> str:
    """Returns llama.cpp's name of the weight of a Hugging Face module."""
    if module in _NAMES:
        return f"{_NAMES[module]}.weight"
    _, _, index, rest = module.split(".", 3)
    return f"blk.{index}.{_LAYER_NAMES[rest]}.weight"


def permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Makes neighbours of the two elements of each rotary pair, as llama.cpp has them.

    Args:
      rows: dtype[heads * D, ...], of a Q or K projection.
      num_heads: heads in it.

    Returns:
      An array of the same shape.
    """
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def _write_config(writer: gguf.GGUFWriter, config: ModelConfig, dtype: str) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    kinds = gguf.LlamaFileType
    writer.add_file_type(kinds.MOSTLY_BF16 if dtype == "bfloat16" else kinds.ALL_F32)


def _write_vocabulary(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    """Writes words that nobody will read: prompts and outputs are ids."""
    kinds = gguf.TokenType
    words = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(_BYTES))]
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * _BYTES]
    words += [f"t{index}" for index in range(len(words), config.vocab_size)]
    types += [kinds.NORMAL] * (config.vocab_size - len(types))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types(types)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(config.bos_token_id or 0)
    writer.add_eos_token_id(config.eos_token_ids[0])
    writer.add_add_bos_token(False)


def _write_tensor(
    writer: gguf.GGUFWriter, name: str, value: np.ndarray, dtype: str
) -> None:
    if dtype == "bfloat16" and value.ndim == 2:
        raw = value.astype(jnp.dtype("bfloat16")).view(np.uint8)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, value)
