"""What every study's configuration starts from."""

from ml_collections import ConfigDict

from experiments.command_line import flat
from experiments.studies.study import Scale

# Of the paper's traces, an hour each, a tenth; its rates and everything else stay. The
# queue of an overloaded system has less time to grow in a short trace, so that
# capacities come out higher: a claim says which preset it is from.
PRESETS = {
    "quick": {"time_share": 0.1, "tolerance": 0.05, "grid": 0.5},
    "full": {"time_share": 1.0, "tolerance": 0.02, "grid": 1.0},
}


def study_config(preset: str, name: str, studies: tuple[str, ...]) -> ConfigDict:
    """Returns the settings of studies that run together.

    Args:
      preset: a key of `PRESETS`.
      name: of the results folder.
      studies: modules of `experiments.studies`.
    """
    config = ConfigDict()
    config.name = name
    config.studies = studies
    config.num_seeds = 3
    config.update(PRESETS[preset])
    return config


def scale_of(config: ConfigDict) -> Scale:
    """Returns how much is run, from settings with `preset` and `seed`."""
    values, options = flat(config), config.get("options")
    first = values["seed"]
    return Scale(
        values["preset"],
        tuple(range(first, first + values["num_seeds"])),
        values["time_share"],
        values["tolerance"],
        values["grid"],
        flat(options) if isinstance(options, ConfigDict) else {},
    )
