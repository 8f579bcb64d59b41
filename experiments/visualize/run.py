"""Makes the page: serves its workload, and writes the file."""

import os
import shlex
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ml_collections import ConfigDict
from rich.console import Console

from experiments import environment
from experiments.command_line import Command, flat
from experiments.errors import UserError
from experiments.interrupts import Interrupts
from experiments.models import load_model
from experiments.prompts import read_prompts
from experiments.visualize import page
from experiments.visualize.scenes import serve_all
from experiments.visualize.settings import refuse_flags, size_of
from paged_jax import CheckpointError, compilation_cache

FILE = "visualize.html"


def make_page(config: ConfigDict, command: str, say: Callable[[str], None]) -> str:
    """Serves the workload, and returns the page.

    Args:
      config: settings as of `settings.page_config`, with `seed`.
      command: what makes the same page again.
      say: gets a line for the user now and then.

    Raises:
      UserError: the prompts or the model cannot be used.
      paged_jax.config.ConfigError: settings of an engine cannot be.
    """
    size, settings = size_of(config), flat(config)
    try:
        prompts = read_prompts(settings["prompts"] or None)
        model = load_model(settings["model"], "float32", say)
    except (ValueError, CheckpointError) as error:
        raise UserError(str(error)) from None
    if model.tokenizer is None:
        raise UserError(
            f"{settings['model']} has no tokenizer, and the page shows texts"
        )
    data = serve_all(model, prompts.prompts, settings["seed"], size, say)
    about = {
        "model": settings["model"],
        "seed": settings["seed"],
        "command": command,
        "longest_output": size.longest_output,
        "environment": environment.describe(),
    }
    return page.render(
        {
            "format": page.FORMAT,
            "about": about,
            **data,
            "simulations": page.simulations(),
        }
    )


def write(path: Path, text: str) -> None:
    """Writes the file whole or not at all.

    Raises:
      UserError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".html")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:
        raise UserError(f"--out={path}: {error.strerror}; name another file") from None


def enable_compilation_cache() -> None:
    """Keeps what is compiled, for the next page.

    Raises:
      UserError: the cache's folder cannot be used.
    """
    try:
        compilation_cache.enable()
    except ValueError as error:
        raise UserError(str(error)) from None


class PageExperiment:
    """The page as `experiments.run --config=visualize` makes it.

    Attributes:
      cells: none: a page is made in one go.
      folder: None: there is nothing to resume.
    """

    cells: Sequence[object] = ()
    folder = None

    def __init__(self, command: Command, console: Console, interrupts: Interrupts):
        """Checks all settings; loads nothing yet.

        Raises:
          UserError, ConfigError: a setting that cannot be used.
        """
        refuse_flags(command)
        size_of(command.config)
        self._command, self._console = command, console
        self._interrupts = interrupts
        self._path = (command.out or Path("results")) / FILE

    def run(self) -> None:
        """Serves the workload, and writes the file."""
        enable_compilation_cache()
        command = self._command
        text = make_page(command.config, command.again, self._say)
        write(self._path, text)
        self._say(f"page: {shlex.quote(str(self._path))}")

    def _say(self, text: str) -> None:
        self._interrupts.check()
        self._console.print(text, markup=False, soft_wrap=True)
