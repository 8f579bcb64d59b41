"""What every checkpoint format shares: its error, and what loading returns."""

from typing import NamedTuple

import numpy as np

from paged_jax.models.config import ModelConfig
from paged_jax.models.decoder import Params
from paged_jax.tokenizer import Tokenizer


class CheckpointError(ValueError):
    """A checkpoint is missing, malformed or unsupported; the message is one line."""


class LoadedModel(NamedTuple):
    """A checkpoint in memory.

    Attributes:
        config: the model's shape.
        params: the weights, in the tree that `llama.param_shapes(config)` describes, or
            packed from it (`packed.pack_model`).
        tokenizer: the checkpoint's own tokenizer.
    """

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer


def check_shape(where: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    """Checks a tensor against the shape that the configuration implies.

    Args:
        where: names the file and the tensor, for the message.
        array: the tensor.
        shape: what it must be.

    Raises:
        CheckpointError: the shapes differ.
    """
    if array.shape != shape:
        raise CheckpointError(
            f"{where} has the shape {array.shape}; the configuration asks for {shape}."
        )
