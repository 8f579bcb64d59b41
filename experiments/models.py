"""Loads the model that an experiment names, and trains the one that can be trained."""

from collections.abc import Callable
from pathlib import Path

import paged_jax
from experiments.errors import UserError
from paged_jax import LoadedModel
from paged_jax.models import smollm2

TINY_LM = "tiny_lm"


def check_model(name: str) -> None:
    """Raises UserError if there is no such model; loads nothing."""
    known = name == TINY_LM or name.lower() == smollm2.NAME
    if known or Path(name).exists():
        return
    raise UserError(
        f"there is no model {name!r}; use {smollm2.NAME!r}, {TINY_LM!r} (trained in "
        "two minutes), a Hugging Face directory or a .gguf file"
    )


def load_model(
    name: str, dtype: str, say: Callable[[str], None] = print
) -> LoadedModel:
    """Loads a model.

    Args:
      name: `tiny_lm`, which is trained on first use, or what `paged_jax.load_model`
        takes.
      dtype: "float32" or "bfloat16", to convert the weights to.
      say: gets lines for the user while a model is trained.

    Raises:
      CheckpointError: there is no such model, or it cannot be used.
      UserError: the trained model cannot be written.
    """
    path: str | Path = name
    if name == TINY_LM:
        # Here, since optax takes half a second to import.
        from experiments.tiny_lm.checkpoint_cache import trained

        path = trained(say=say)
    return paged_jax.load_model(path, dtype)
