"""The models, in every form that an engine wants; made once, and kept."""

import os
import subprocess
from pathlib import Path

from experiments.engine_bench import engines, workload
from experiments.engine_bench.folders import appear
from experiments.engine_bench.gguf_export import KINDS, write_gguf
from experiments.engine_bench.random_llama import (
    SHAPES,
    config_for_all,
    write_json,
    write_random_llama,
)
from experiments.tiny_lm.checkpoint import save_directory
from paged_jax.models import smollm2
from paged_jax.models.config import ModelConfig
from paged_jax.models.gguf import read_config
from paged_jax.models.gguf_file import GGUFFile
from paged_jax.models.gguf_tokenizer import build_tokenizer
from paged_jax.models.load import load_model
from paged_jax.tokenizer import Tokenizer

NAMES = ("small", "tiny", "smollm2")


class FormError(Exception):
    """A model cannot be had in a form; the message is one line."""


class Model:
    """One of the models that engines are compared with.

    Attributes:
      name: one of `NAMES`.
      home: folder of what is made of it.
    """

    def __init__(self, name: str):
        """Makes nothing yet."""
        self.name = name
        self.home = engines.HOME / "models" / name

    def path(self, form: str, dtype: str) -> str:
        """Returns where the model is in a form, which is made if it is not there.

        Args:
          form: as in `engines.Engine`.
          dtype: of the weights, where the form depends on it.

        Raises:
          FormError: it cannot be converted.
        """
        if form == "any":
            return smollm2.NAME if self.name == "smollm2" else str(self.directory())
        if form == "directory":
            return str(self.directory())
        if form == "gguf":
            return str(self._gguf(dtype))
        return str(self._openvino())

    def requests(self, count: int) -> list[workload.Request]:
        """Returns what is asked of this model."""
        if self.name == "smollm2":
            return workload.real_requests(_smollm2_tokenizer(), count)
        return workload.random_requests(SHAPES[self.name].vocab_size, count)

    def config(self) -> ModelConfig:
        """Returns the model's shape."""
        if self.name == "smollm2":
            return read_config(GGUFFile(smollm2.find_gguf()))
        return SHAPES[self.name]

    def stop_ids(self) -> tuple[int, ...]:
        """Returns the tokens that end a text of this model, if it may generate them."""
        if self.name == "smollm2":
            return _smollm2_tokenizer().eos_token_ids
        return ()

    def directory(self) -> Path:
        """Returns the Hugging Face directory; of SmolLM2's the weights are float32."""
        folder = self.home / "directory"
        if not folder.exists():
            if self.name == "smollm2":
                _dequantise(folder)
            else:
                write_random_llama(folder, SHAPES[self.name])
        return folder

    def _gguf(self, dtype: str) -> Path:
        if self.name == "smollm2":
            return smollm2.find_gguf()
        path = self.home / f"{KINDS[dtype]}.gguf"
        if not path.exists():
            write_gguf(self.directory(), SHAPES[self.name], path, dtype)
        return path

    def _openvino(self) -> Path:
        folder = self.home / "openvino"
        if folder.exists():
            return folder
        exporter = engines.HOME / "openvino/export/bin/optimum-cli"
        # fmt: off
        command = [
            exporter, "export", "openvino", "--model", self.directory(),
            "--task", "text-generation-with-past", "--weight-format", "fp32",
        ]
        # fmt: on
        with appear(folder) as partial:
            done = subprocess.run(
                [*command, partial],
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
                capture_output=True,
                text=True,
            )
            if done.returncode:
                lines = done.stderr.strip().splitlines() or ["no message"]
                raise FormError(f"the model could not be converted: {lines[-1]}")
        return folder


def _smollm2_tokenizer() -> Tokenizer:
    """Reads it without the weights."""
    file = GGUFFile(smollm2.find_gguf())
    return build_tokenizer(file, read_config(file))


def _dequantise(folder: Path) -> None:
    """Writes SmolLM2 as a Hugging Face directory."""
    model = load_model(smollm2.NAME)
    with appear(folder) as partial:
        tokenizer = model.tokenizer.backend
        save_directory(partial, model.config, model.params, tokenizer)
        write_json(partial / "config.json", config_for_all(model.config))
        write_json(
            partial / "tokenizer_config.json",
            {"tokenizer_class": "PreTrainedTokenizerFast"},
        )
