"""Loads a model by name or path."""

from pathlib import Path

from paged_jax.models import smollm2
from paged_jax.models.checkpoint import CheckpointError, LoadedModel
from paged_jax.models.config import DTYPES

DEFAULT_MODEL = smollm2.NAME


def load_model(
    name_or_path: str | Path = DEFAULT_MODEL, dtype: str = "float32"
) -> LoadedModel:
    """Loads weights, configuration and tokenizer.

    Args:
        name_or_path: "smollm2-135m", a Hugging Face directory, or a .gguf file.
        dtype: "float32" or "bfloat16", to convert the weights to.

    Raises:
        CheckpointError: there is no such model, or it cannot be used.
        ValueError: an unknown dtype.
    """
    if dtype not in DTYPES:
        raise ValueError(f"Unknown model dtype {dtype!r}; use one of {DTYPES}.")
    # Imported late: who brings a model of their own needs no packages for files.
    from paged_jax.models.gguf import load_gguf
    from paged_jax.models.huggingface import load_directory

    if str(name_or_path).lower() == smollm2.NAME:
        return load_gguf(smollm2.find_gguf(), dtype)
    path = Path(name_or_path)
    if path.is_dir():
        return load_directory(path, dtype)
    if path.is_file():
        return load_gguf(path, dtype)
    raise CheckpointError(
        f"There is no model {str(name_or_path)!r}: use {smollm2.NAME!r}, "
        "a Hugging Face directory or a .gguf file."
    )
