"""Loads a GGUF file: configuration, weights and tokenizer in one."""

from pathlib import Path

import numpy as np

from paged_jax.models.checkpoint import CheckpointError, LoadedModel, check_shape
from paged_jax.models.config import ModelConfig
from paged_jax.models.fields import Fields
from paged_jax.models.gguf_file import GGUFFile
from paged_jax.models.gguf_tokenizer import build_tokenizer
from paged_jax.models.llama import Params
from paged_jax.models.rope import linear_divisors
from paged_jax.models.weights import assemble_params

ARCHITECTURES = ("llama", "qwen2", "qwen3")

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def load_gguf(path: str | Path, dtype: str = "float32") -> LoadedModel:
    """Loads a model from one GGUF file.

    Args:
        path: the file.
        dtype: "float32" or "bfloat16", to convert the weights to.

    Raises:
        CheckpointError: the file is missing, truncated or malformed, a tensor is
            missing or of the wrong shape, or the model is one that this library does
            not run.
    """
    file = GGUFFile(path)
    config = read_config(file, dtype)
    tokenizer = build_tokenizer(file, config)
    return LoadedModel(config, read_params(file, config), tokenizer)


def read_config(file: GGUFFile, dtype: str = "float32") -> ModelConfig:
    """Reads the model's shape from a file's metadata.

    Raises:
        CheckpointError: a value is missing or malformed, or asks for something that
            this library does not run.
    """
    fields = Fields(str(file.path), file.metadata)
    arch = fields.string("general.architecture")
    if arch not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: the architecture {arch!r} is not supported; "
            f"use one of {ARCHITECTURES}."
        )
    if fields.integer("split.count", 1) > 1:
        raise CheckpointError(
            f"{file.path} is one part of a split GGUF; merge the parts first."
        )
    if fields.integer(f"{arch}.expert_count", 0):
        raise CheckpointError(f"{file.path}: mixtures of experts are not supported.")
    hidden = fields.integer(f"{arch}.embedding_length")
    heads = fields.integer(f"{arch}.attention.head_count")
    head_dim = fields.integer(f"{arch}.attention.key_length", hidden // max(heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        value = fields.integer(f"{arch}.{name}", head_dim)
        if value != head_dim:
            raise CheckpointError(
                f"{file.path}: {arch}.{name} is {value}; "
                f"only the head dim, {head_dim}, is supported."
            )
    eos = [
        fields.integer(f"tokenizer.ggml.{name}_token_id", None)
        for name in ("eos", "eot", "eom")
    ]
    return fields.build(
        vocab_size=_vocab_size(file, fields, arch),
        hidden_size=hidden,
        num_layers=fields.integer(f"{arch}.block_count"),
        num_heads=heads,
        num_kv_heads=fields.integer(f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=fields.integer(f"{arch}.feed_forward_length"),
        rope_theta=fields.number(f"{arch}.rope.freq_base", 10000.0),
        rope_divisors=_rope_divisors(file, fields, arch, head_dim),
        rms_norm_eps=fields.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm=arch == "qwen3",
        max_position_embeddings=fields.integer(f"{arch}.context_length", 2048),
        dtype=dtype,
        eos_token_ids=tuple(dict.fromkeys(id_ for id_ in eos if id_ is not None)),
        bos_token_id=fields.integer("tokenizer.ggml.bos_token_id", None),
    )


def read_params(file: GGUFFile, config: ModelConfig) -> Params:
    """Reads the weights, dequantised, with the rows of Q and K in the HF order.

    Args:
        file: the open file.
        config: from `read_config`.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """
    permuted = file.metadata.get("general.architecture") == "llama"
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}

    def read(name: str, shape: tuple[int, ...]) -> np.ndarray:
        gguf_name = _gguf_name(name)
        array = file.read(gguf_name)
        check_shape(f"{file.path}: the tensor {gguf_name!r}", array, shape)
        projection = name.split(".")[-2]
        if permuted and projection in heads:
            return unpermute(array, heads[projection])
        return array

    return assemble_params(config, read)


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes llama.cpp's order of the rows of a llama's Q or K projection.

    There, the two elements of a rotary pair are neighbours; here, as in
    `transformers`, they are half a head apart.

    Args:
        rows: dtype[heads * D, ...], weight or bias.
        num_heads: number of heads in it.

    Returns:
        An array of the same shape.
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _gguf_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, _, index, rest = name.split(".", 3)
    module, _, kind = rest.rpartition(".")
    return f"blk.{index}.{_LAYER_NAMES[module]}.{kind}"


def _vocab_size(file: GGUFFile, fields: Fields, arch: str) -> int:
    size = fields.integer(f"{arch}.vocab_size", None)
    if size is None and "token_embd.weight" in file.tensors:
        size = file.tensors["token_embd.weight"].shape[0]
    if size is None:
        raise CheckpointError(
            f"{file.path}: the tensor 'token_embd.weight' is missing."
        )
    return size


def _rope_divisors(
    file: GGUFFile, fields: Fields, arch: str, head_dim: int
) -> tuple[float, ...]:
    # Llama 3's scaling comes as a table, made when the file was converted.
    if "rope_freqs.weight" in file.tensors:
        return tuple(file.read("rope_freqs.weight").astype(np.float64).tolist())
    kind = fields.string(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return ()
    if kind == "linear":
        factor = fields.positive(f"{arch}.rope.scaling.factor")
        return linear_divisors(head_dim, factor)
    raise CheckpointError(
        f"{file.path}: the rope scaling {kind!r} is not supported; "
        "use 'none', 'linear' or a rope_freqs.weight tensor."
    )
