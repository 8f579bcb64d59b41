"""Writes a model as a Hugging Face directory."""

import json
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file

from experiments.hugging_face_config import hugging_face_config
from paged_jax.models.config import ModelConfig
from paged_jax.models.llama import Params


def save_directory(
    path: Path, config: ModelConfig, params: Params, tokenizer: tokenizers.Tokenizer
) -> None:
    """Writes config.json, model.safetensors and tokenizer.json.

    Args:
      path: an existing folder.
      config: of a plain Llama: no biases, head norms or extended context.
      params: float32, as `llama.init_params` returns.
      tokenizer: text to the model's tokens.

    Raises:
      ValueError: the model is not a plain float32 Llama.
    """
    plain = not (config.qkv_bias or config.qk_norm or config.rope_divisors)
    if not plain or config.dtype != "float32":
        raise ValueError(f"only a plain float32 Llama can be written, not {config}")
    (path / "config.json").write_text(
        json.dumps(hugging_face_config(config), indent=2) + "\n"
    )
    save_file(_tensors(config, params), path / "model.safetensors", {"format": "pt"})
    tokenizer.save(str(path / "tokenizer.json"))


def _tensors(config: ModelConfig, params: Params) -> dict[str, np.ndarray]:
    """Returns the tensors by name, linear weights as [out, in]."""
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    tensors = {
        "model.embed_tokens.weight": params["embedding"],
        "model.norm.weight": params["norm"]["scale"],
    }
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = params["head"]
    for index in range(config.num_layers):
        layer, prefix = params[f"layer_{index}"], f"model.layers.{index}."
        qkv = np.split(layer["qkv"]["kernel"].T, [q_size, q_size + kv_size])
        gate_up = np.split(layer["gate_up"]["kernel"].T, 2)
        tensors |= {
            f"{prefix}input_layernorm.weight": layer["attention_norm"]["scale"],
            f"{prefix}post_attention_layernorm.weight": layer["mlp_norm"]["scale"],
            f"{prefix}self_attn.q_proj.weight": qkv[0],
            f"{prefix}self_attn.k_proj.weight": qkv[1],
            f"{prefix}self_attn.v_proj.weight": qkv[2],
            f"{prefix}self_attn.o_proj.weight": layer["out"]["kernel"].T,
            f"{prefix}mlp.gate_proj.weight": gate_up[0],
            f"{prefix}mlp.up_proj.weight": gate_up[1],
            f"{prefix}mlp.down_proj.weight": layer["down"]["kernel"].T,
        }
    # Contiguous: the file holds a tensor's memory as it lies.
    return {name: np.ascontiguousarray(value) for name, value in tensors.items()}
