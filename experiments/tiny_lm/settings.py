"""What is trained and how; a run's key in the cache."""

import ast
import dataclasses
import hashlib
import json
import platform
from importlib import metadata
from pathlib import Path

from experiments.errors import UserError
from experiments.tiny_lm.corpus import PACKAGES
from experiments.tiny_lm.tokens import END_OF_TEXT, VOCAB_SIZE
from paged_jax.models import llama, rope
from paged_jax.models.config import ModelConfig

# Two wide layers: a step takes four fifths of the time of three narrower ones.
MODEL = ModelConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=384,
    tie_embeddings=True,
    max_position_embeddings=256,
    eos_token_ids=(END_OF_TEXT,),
    bos_token_id=END_OF_TEXT,
)

_CODE = ("checkpoint", "corpus", "dense_forward", "settings", "tokens", "training")
_VERSIONS = (*PACKAGES, "jaxlib", "safetensors", "tokenizers")


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to train.

    Attributes:
      steps: optimiser steps.
      seed: of the first weights and of the order of the text.
      windows: pieces of text in a step.
      window: tokens in a piece.
      muon_rate: highest learning rate of the kernels.
      adam_rate: highest learning rate of the embedding and the norms.
    """

    steps: int = 300
    seed: int = 0
    windows: int = 8
    window: int = MODEL.max_position_embeddings
    muon_rate: float = 0.02
    adam_rate: float = 0.01

    def __post_init__(self):
        """Raises UserError for a setting that is out of range."""
        if self.steps < 1:
            raise UserError(f"--steps is {self.steps}; it must be 1 or more")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"--seed is {self.seed}; it must be from 0 to 2**32 - 1")

    def describe(self) -> dict:
        """Returns, as JSON, all that decides the weights but for the machine."""
        return {
            "settings": dataclasses.asdict(self),
            "model": json.loads(json.dumps(dataclasses.asdict(MODEL))),
            "versions": {name: metadata.version(name) for name in _VERSIONS}
            | {"python": platform.python_version()},
            "code": _code_digest(),
        }

    def key(self) -> str:
        """Returns a name for the run in the cache."""
        text = json.dumps(self.describe(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _code_digest() -> str:
    """Returns a digest of the code that decides the weights and the checkpoint."""
    files = [Path(__file__).with_name(f"{name}.py") for name in _CODE]
    files += [Path(str(module.__file__)) for module in (llama, rope)]
    digest = hashlib.sha256()
    for file in files:
        # Without comments and layout.
        digest.update(ast.dump(ast.parse(file.read_text("utf-8"))).encode())
    return digest.hexdigest()[:16]
