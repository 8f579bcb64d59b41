"""Random Llama models that every engine can load, from shapes and a seed alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import models, pre_tokenizers

from experiments.engine_bench.folders import appear
from experiments.hugging_face_config import hugging_face_config
from paged_jax.models.config import ModelConfig

UNKNOWN, START, END = "<unk>", "<s>", "</s>"
SPECIAL = (UNKNOWN, START, END)

SHAPES = {
    "tiny": ModelConfig(
        vocab_size=4096,
        hidden_size=256,
        num_layers=4,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        intermediate_size=704,
        max_position_embeddings=1024,
        eos_token_ids=(SPECIAL.index(END),),
        bos_token_id=SPECIAL.index(START),
    ),
    "small": ModelConfig(
        vocab_size=32000,
        hidden_size=768,
        num_layers=12,
        num_heads=12,
        num_kv_heads=4,
        head_dim=64,
        intermediate_size=2048,
        max_position_embeddings=1024,
        eos_token_ids=(SPECIAL.index(END),),
        bos_token_id=SPECIAL.index(START),
    ),
}


def write_random_llama(folder: Path, config: ModelConfig, seed: int = 0) -> None:
    """Writes a model as a Hugging Face directory; what is there is replaced.

    Matrices have a deviation of 1 / sqrt(inputs), so that attention prefers some
    positions, and a wrong attention shows in the tokens. The head's rows of the special
    tokens are zero: greedy decoding never takes one, and it does not matter what an
    engine means by going on past the end of a text.

    Args:
      folder: where; it appears when it is complete.
      config: a plain float32 Llama with a head of its own.
      seed: of the weights, which are drawn in the order of the tensors' names.
    """
    with appear(folder) as partial:
        tensors = _tensors(config, np.random.default_rng(seed))
        save_file(tensors, partial / "model.safetensors", {"format": "pt"})
        write_json(partial / "config.json", config_for_all(config))
        word_tokenizer(config.vocab_size).save(str(partial / "tokenizer.json"))
        write_json(
            partial / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "unk_token": UNKNOWN,
                "bos_token": START,
                "eos_token": END,
                "pad_token": UNKNOWN,
            },
        )


def config_for_all(config: ModelConfig) -> dict[str, Any]:
    """Returns config.json of a plain float32 Llama, for readers of any age.

    Some want other names of a setting, or one number where others take a list.
    """
    return hugging_face_config(config) | {
        "attention_bias": False,
        "mlp_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "eos_token_id": config.eos_token_ids[0],
        "pad_token_id": 0,
        "torch_dtype": config.dtype,
    }


def word_tokenizer(vocab_size: int) -> tokenizers.Tokenizer:
    """Returns a tokenizer whose words are `t3`, `t4` and so on; prompts are ids."""
    words = {word: index for index, word in enumerate(SPECIAL)}
    words |= {f"t{index}": index for index in range(len(SPECIAL), vocab_size)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(words, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def write_json(path: Path, value: dict) -> None:
    """Writes JSON for people, too."""
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def _tensors(config: ModelConfig, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Draws all tensors; linear weights are [out, in]."""
    tensors = {}
    for name, shape in sorted(_shapes(config).items()):
        value = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            value = np.float32(1) + np.float32(0.1) * value
        elif "embed_tokens" not in name:
            value /= np.float32(np.sqrt(shape[1]))
        if name == "lm_head.weight":
            value[: len(SPECIAL)] = 0
        tensors[name] = value
    return tensors


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config.vocab_size, hidden),
    }
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            f"{prefix}self_attn.q_proj.weight": (q_size, hidden),
            f"{prefix}self_attn.k_proj.weight": (kv_size, hidden),
            f"{prefix}self_attn.v_proj.weight": (kv_size, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, q_size),
            f"{prefix}mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}mlp.up_proj.weight": (inner, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, inner),
        }
    return shapes
