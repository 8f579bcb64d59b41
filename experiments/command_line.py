"""The command line: flags, configurations, overrides, and errors of one line."""

import dataclasses
import difflib
import importlib.util
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from experiments.base_config import PRESETS
from experiments.errors import UserError
from experiments.workers import LAUNCHERS
from paged_jax.engine import MAX_SEED

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
DEFAULT_CONFIG = "headline"

_FLAGS = ("sweep", "out", "seed", "resume", "workers", "launcher", "list")
_OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]+)(=|$)")


@dataclasses.dataclass(frozen=True)
class Command:
    """What the user asked for.

    Attributes:
      config: settings, overrides applied, the seed among them.
      config_path: the file they came from.
      preset: which preset of it.
      sweep: lines of `--sweep`, each `key=value,value,...`.
      overridden: keys that were given as `--config.KEY=...`.
      out: results folder; None for a new one with a default name.
      resume: whether to go on with a results folder.
      workers: processes of a study; 0: as many as there are cores.
      launcher: where a study runs.
      list_configs: whether to list the configurations and do nothing else.
      argv: the command as it was typed, without the program.
    """

    config: ConfigDict
    config_path: Path
    preset: str
    sweep: tuple[str, ...]
    overridden: tuple[str, ...]
    out: Path | None
    resume: bool
    workers: int
    launcher: str
    list_configs: bool
    argv: tuple[str, ...]

    @property
    def again(self) -> str:
        """The command that runs the same once more."""
        return command_of(self.argv)


def parse(argv: list[str]) -> Command:
    """Reads a command line.

    Args:
      argv: arguments, without the program's name.

    Raises:
      UserError: a flag, a configuration, a key or a value is wrong.
      SystemExit: help was asked for, and printed.
    """
    words = _join_values(argv)
    chosen, words = _take(words, "config", DEFAULT_CONFIG)
    path = _find_config(chosen)
    preset, words = _take(words, "preset", "quick")
    if preset not in PRESETS:
        raise UserError(f"--preset={preset}: {_did_you_mean(preset, PRESETS)}")

    config = load_config(path, preset)
    overridden = [m[1] for m in map(_OVERRIDE.match, words) if m]
    for key in overridden:
        check_key(config, key)
    values = flags.FlagValues()
    _define(values)
    if any(re.fullmatch(r"--?(help|helpfull|helpshort|h)", word) for word in words):
        print(_help(values))
        raise SystemExit(0)
    words = ["experiments.run", *words]
    try:
        config_flags.DEFINE_config_dict(
            "config", config, sys_argv=words, flag_values=values
        )
        rest = values(words)
        config = values.config
    except (flags.Error, ValueError, TypeError, AttributeError) as error:
        raise UserError(_one_line(str(error))) from None
    if len(rest) > 1:
        raise UserError(
            f"unexpected argument {rest[1]!r}; write flags as --name=value (see --help)"
        )
    with config.unlocked():
        config.seed = values.seed
        config.preset = preset
    return Command(
        config=config,
        config_path=path,
        preset=preset,
        sweep=tuple(values.sweep),
        overridden=tuple(overridden),
        out=Path(values.out) if values.out else None,
        resume=values.resume,
        workers=values.workers,
        launcher=values.launcher,
        list_configs=values.list,
        argv=tuple(argv),
    )


# Of the command line, what changes nothing of the results.
_ASIDE = ("out", "workers", "launcher")


def command_of(words: Iterable[str]) -> str:
    """Returns the command with these words, without what does not change its results.

    That is the results folder, and how simulations are spread over processes.
    """
    kept: list[str] = []
    skip = False
    for word in words:
        name = word.lstrip("-").split("=")[0] if word.startswith("-") else ""
        if not skip and name not in (*_ASIDE, "resume", "noresume"):
            kept.append(word)
        skip = name in _ASIDE and "=" not in word
    return shlex.join(["python", "-m", "experiments.run", *kept])


def load_config(path: Path, preset: str) -> ConfigDict:
    """Returns `get_config(preset)` of a configuration file.

    Raises:
      UserError: the file cannot be run, or has no such function.
    """
    spec = importlib.util.spec_from_file_location(f"configs.{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"--config={path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        config = module.get_config(preset)
    except Exception as error:
        reason = _one_line(f"{type(error).__name__}: {error}")
        raise UserError(f"--config={path}: {reason}") from None
    if not isinstance(config, ConfigDict):
        raise UserError(f"--config={path}: get_config() must return a ConfigDict")
    return config


def config_files() -> dict[str, Path]:
    """Returns the configurations that ship with the project, by name."""
    return {p.stem: p for p in sorted(CONFIGS.glob("*.py")) if p.stem != "__init__"}


def first_line(path: Path) -> str:
    """Returns the first line of a configuration's docstring."""
    match = re.match(r'\s*"""(.*?)(?:"""|\n|$)', path.read_text("utf-8"))
    return match[1].strip() if match else ""


def flat(config: ConfigDict, prefix: str = "") -> dict[str, Any]:
    """Returns the settings with dotted keys."""
    items: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            items |= flat(value, f"{prefix}{key}.")
        else:
            items[f"{prefix}{key}"] = value
    return items


def check_key(config: ConfigDict, key: str) -> None:
    """Raises UserError, with near matches, if a dotted key is not in the settings."""
    keys = flat(config)
    if key not in keys:
        raise UserError(f"unknown config key {key!r}: {_did_you_mean(key, keys)}")


def _define(values: flags.FlagValues) -> None:
    flags.DEFINE_multi_string(
        "sweep",
        [],
        "KEY=VALUE,VALUE,...: run the cells for each value; may be repeated (product).",
        flag_values=values,
    )
    flags.DEFINE_string(
        "out", "", "Results folder; default results/NAME-TIME.", flag_values=values
    )
    flags.DEFINE_integer(
        "seed",
        0,
        "Decides lengths, texts and arrivals.",
        lower_bound=0,
        upper_bound=MAX_SEED,
        flag_values=values,
    )
    flags.DEFINE_bool(
        "resume",
        False,
        "Go on with the folder --out, or the newest one of this experiment.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "workers",
        0,
        "Processes that simulate side by side; default one for each core.",
        lower_bound=0,
        flag_values=values,
    )
    flags.DEFINE_enum(
        "launcher",
        "processes",
        LAUNCHERS,
        "Where simulations run: processes here, or ray (its cluster, or a local one).",
        flag_values=values,
    )
    flags.DEFINE_bool("list", False, "List the configurations.", flag_values=values)


def _help(values: flags.FlagValues) -> str:
    return (
        "python -m experiments.run [flags]\n\n"
        "  --config: configs/NAME.py or NAME; default headline.\n"
        "  --config.KEY=VALUE: a setting, such as --config.engine.block_size=32.\n"
        f"  --preset: {' or '.join(PRESETS)}; default quick.\n"
        + "\n".join(f"  --{name}: {values[name].help}" for name in _FLAGS)
    )


def _join_values(argv: list[str]) -> list[str]:
    """Writes `--config X` and `--preset X` as one word, like `--config=X`."""
    words: list[str] = []
    for word in argv:
        if words and re.fullmatch(r"--?(config|preset)", words[-1]):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def _take(words: list[str], name: str, default: str) -> tuple[str, list[str]]:
    """Takes `--name=value` out of the words; the last one counts."""
    pattern = re.compile(rf"--?{name}(?:=(.*))?", re.DOTALL)
    found = [m for m in map(pattern.fullmatch, words) if m]
    if any(m[1] is None for m in found):
        raise UserError(f"--{name} needs a value")
    rest = [word for word in words if not pattern.fullmatch(word)]
    return (found[-1][1] if found else default), rest


def _find_config(given: str) -> Path:
    """Returns the file of a configuration that was given by name or by path."""
    known = config_files()
    if given in known:
        return known[given]
    path = Path(given)
    for candidate in (path, CONFIGS.parent / path):
        if candidate.is_file():
            return candidate.resolve()
    hint = _did_you_mean(path.stem, known)
    raise UserError(f"--config={given}: no such configuration; {hint} (see --list)")


def _did_you_mean(given: str, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(given, known, n=3, cutoff=0.6)
    if not near:
        # A key typed without its group is near in its last part only.
        last = given.rsplit(".", 1)[-1]
        parts = {key: key.rsplit(".", 1)[-1] for key in known}
        close = difflib.get_close_matches(last, list(parts.values()), n=3, cutoff=0.6)
        near = [key for key, part in parts.items() if part in close]
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"there is {', '.join(known)}"


def _one_line(text: str) -> str:
    return " ".join(text.split())
