"""What the page serves, as a configuration (`configs/visualize.py`)."""

from typing import Any

from ml_collections import ConfigDict

from experiments.command_line import Command
from experiments.errors import UserError
from experiments.visualize.scenes import Size
from paged_jax import EngineConfig
from paged_jax.models.load import DEFAULT_MODEL

# Requests served, by preset.
PRESETS = {"quick": 20, "full": 48}


def page_config(preset: str = "quick") -> ConfigDict:
    """Returns the settings of a page.

    There is room for four requests of the model length: contiguous memory that reserves
    it can serve four at once. Nothing is set aside, so that blocks do run out.

    Args:
      preset: a key of `PRESETS`.
    """
    config: Any = ConfigDict()
    config.name = "visualize"
    config.model = DEFAULT_MODEL  # a known name, a directory or a GGUF file
    config.prompts = ""  # a file of prompts; empty: those that ship

    config.page = ConfigDict()  # `scenes.Size`
    config.page.requests = PRESETS[preset]
    config.page.longest_prompt = 90
    config.page.longest_output = 72
    config.page.sharing_output = 26
    # `paged_jax.EngineConfig`, of the workload and of the scenes of sharing.
    config.page.config = ConfigDict(
        {
            "block_size": 16,
            "num_blocks": 64,
            "max_model_len": 256,
            "max_seqs": 16,
            "max_requests": PRESETS[preset] + 12,
            "max_prefixes": 0,
            "token_budget": 32,
            "min_bucket": 16,
            "watermark": 0.0,
            "spare_blocks": 0,
        }
    )
    config.page.sharing_config = ConfigDict(
        {
            "block_size": 8,
            "num_blocks": 48,
            "max_model_len": 128,
            "max_seqs": 4,
            "max_requests": 4,
            "max_prefixes": 0,
            "max_n": 4,
            "max_beam_width": 4,
            "token_budget": 32,
            "min_bucket": 16,
            "watermark": 0.0,
        }
    )
    return config


def size_of(config: ConfigDict) -> Size:
    """Returns how much a page serves.

    Raises:
      UserError: a number that cannot be.
      paged_jax.config.ConfigError: likewise, of an engine.
    """
    page: Any = config.page
    for name in ("requests", "longest_prompt", "longest_output", "sharing_output"):
        if page[name] < 1:
            raise UserError(f"page.{name} is {page[name]}; it must be 1 or more")
    # The recorder tells sequences apart by their slots, of which none may serve twice.
    slots = page.config.max_requests
    if page.requests > slots:
        raise UserError(
            f"page.requests is {page.requests}, and page.config.max_requests "
            f"{slots}; it must be as many or more"
        )
    settings: dict[str, Any] = dict(page)
    for name in ("config", "sharing_config"):
        settings[name] = EngineConfig(**page[name])
    return Size(**settings)


def refuse_flags(command: Command) -> None:
    """Raises UserError for flags of `experiments.run` that mean nothing for a page."""
    given = {
        "sweep": bool(command.sweep),
        "resume": command.resume,
        "workers": command.workers != 0,
        "launcher": command.launcher != "processes",
    }
    for name in (name for name, is_given in given.items() if is_given):
        raise UserError(f"--{name}: a page is made in one go; leave it out")
