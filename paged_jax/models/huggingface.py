"""Loads a Hugging Face directory: config.json, *.safetensors, tokenizer.json."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import tokenizers

from paged_jax.models.checkpoint import CheckpointError, LoadedModel, check_shape
from paged_jax.models.config import ModelConfig
from paged_jax.models.fields import Fields
from paged_jax.models.llama import Params
from paged_jax.models.rope import linear_divisors, llama3_divisors
from paged_jax.models.weights import assemble_params
from paged_jax.tokenizer import Tokenizer

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
FLOAT_TYPES = ("F32", "F16", "BF16", "F64")


def load_directory(path: str | Path, dtype: str = "float32") -> LoadedModel:
    """Loads a model directory as `transformers` writes it.

    Args:
        path: the directory.
        dtype: "float32" or "bfloat16", to convert the weights to.

    Raises:
        CheckpointError: a file or tensor is missing, malformed or of the wrong shape,
            or the model is one that this library does not run.
    """
    path = Path(path)
    config = load_config(path, dtype)
    tokenizer = load_tokenizer(path, config)
    return LoadedModel(config, load_params(path, config), tokenizer)


def load_config(path: str | Path, dtype: str = "float32") -> ModelConfig:
    """Reads config.json, and the ids that end a text from generation_config.json.

    Raises:
        CheckpointError: the file is missing or malformed, or asks for something that
            this library does not run.
    """
    path = Path(path)
    fields = Fields(f"{path / 'config.json'}", _read_json(path / "config.json"))
    architecture = _architecture(fields)
    _refuse_unsupported(fields)
    heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", None)
    if head_dim is None:
        head_dim = 128 if architecture.startswith("Qwen3") else 0
        head_dim = head_dim or fields.integer("hidden_size") // max(heads, 1)
    theta, divisors = _rope(fields, head_dim)
    return fields.build(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        rope_theta=theta,
        rope_divisors=divisors,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        qkv_bias=architecture.startswith("Qwen2"),
        qk_norm=architecture.startswith("Qwen3"),
        max_position_embeddings=fields.integer("max_position_embeddings", 2048),
        dtype=dtype,
        eos_token_ids=_eos_token_ids(path, fields),
        bos_token_id=fields.integer("bos_token_id", None),
    )


def load_params(path: str | Path, config: ModelConfig) -> Params:
    """Reads the weights of a directory.

    Args:
        path: the directory, with one or more *.safetensors files.
        config: from `load_config`.

    Raises:
        CheckpointError: no file, a malformed file, or a tensor that is missing or has
            another shape than the configuration asks for.
    """
    path = Path(path)
    files: dict[Path, Any] = {}

    def open_file(file: Path) -> Any:
        if file not in files:
            if not file.is_file():
                raise CheckpointError(f"{file} is missing.")
            files[file] = safetensors.safe_open(file, "np")
        return files[file]

    try:
        where = _locate_tensors(path, open_file)

        def read(name: str, shape: tuple[int, ...]) -> np.ndarray:
            if name not in where:
                raise CheckpointError(f"{path}: the tensor {name!r} is missing.")
            file = where[name]
            kind = open_file(file).get_slice(name).get_dtype()
            if kind not in FLOAT_TYPES:
                raise CheckpointError(
                    f"{file}: the tensor {name!r} is of type {kind}; "
                    f"use one of {FLOAT_TYPES}."
                )
            array = open_file(file).get_tensor(name)
            check_shape(f"{file}: the tensor {name!r}", array, shape)
            return array

        return assemble_params(config, read)
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: cannot read the weights: {' '.join(str(error).split())}"
        ) from error


def load_tokenizer(path: str | Path, config: ModelConfig) -> Tokenizer:
    """Reads tokenizer.json, and the chat template where the directory has one.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    path = Path(path)
    file = path / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{file} is missing.")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # `tokenizers` raises bare Exception
        raise CheckpointError(
            f"{file} is not a tokenizer: {' '.join(str(error).split())}"
        ) from error
    return Tokenizer(
        tokenizer,
        eos_token_ids=config.eos_token_ids,
        bos_token_id=config.bos_token_id,
        chat_template=_chat_template(path),
    )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object.")
    return value


def _architecture(fields: Fields) -> str:
    names = fields.values.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{fields.where}: the architecture {name!r} is not supported; "
            f"use one of {ARCHITECTURES}."
        )
    return name


def _refuse_unsupported(fields: Fields) -> None:
    for name, wanted in (
        ("attention_bias", False),
        ("mlp_bias", False),
        ("use_sliding_window", False),
        ("hidden_act", "silu"),
        ("quantization_config", None),
    ):
        value = fields.values.get(name, wanted)
        if value is not None and value != wanted:
            shown = "a value" if isinstance(value, dict) else repr(value)
            raise CheckpointError(
                f"{fields.where}: {name} is {shown}; only {wanted!r} is supported."
            )


def _rope(fields: Fields, head_dim: int) -> tuple[float, tuple[float, ...]]:
    # Newer files keep all of it in `rope_parameters`, older ones in two fields.
    scaling = fields.section("rope_parameters") or fields.section("rope_scaling")
    theta = fields.number("rope_theta", 10000.0)
    if scaling is None:
        return theta, ()
    theta = scaling.number("rope_theta", theta)
    if scaling.number("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(
            f"{fields.where}: a partial_rotary_factor other than 1 is not supported."
        )
    kind = scaling.values.get("rope_type", scaling.values.get("type", "default"))
    if kind == "default":
        return theta, ()
    if kind == "linear":
        return theta, linear_divisors(head_dim, scaling.positive("factor"))
    if kind == "llama3":
        return theta, llama3_divisors(
            head_dim,
            theta,
            factor=scaling.positive("factor"),
            low_freq_factor=scaling.positive("low_freq_factor"),
            high_freq_factor=scaling.positive("high_freq_factor"),
            original_max_positions=scaling.integer("original_max_position_embeddings"),
        )
    raise CheckpointError(
        f"{fields.where}: the rope scaling {kind!r} is not supported; "
        "use 'default', 'linear' or 'llama3'."
    )


def _eos_token_ids(path: Path, fields: Fields) -> tuple[int, ...]:
    file = path / "generation_config.json"
    if file.is_file():
        ids = Fields(str(file), _read_json(file)).integers("eos_token_id")
        if ids:
            return ids
    return fields.integers("eos_token_id")


def _locate_tensors(path: Path, open_file: Callable[[Path], Any]) -> dict[str, Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = _read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(
            isinstance(name, str) and Path(name).name == name for name in names.values()
        ):
            raise CheckpointError(
                f"{index}: weight_map must map tensor names to file names."
            )
        return {name: path / file for name, file in names.items()}
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path} has no *.safetensors file.")
    return {name: file for file in files for name in open_file(file).keys()}


def _chat_template(path: Path) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    file = path / "tokenizer_config.json"
    if not file.is_file():
        return None
    template = _read_json(file).get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
