"""Trained models on disk: made once, found again by all that decides the weights."""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from experiments.errors import UserError
from experiments.tiny_lm.run import train_and_save
from experiments.tiny_lm.settings import Settings

REPORT = "training.json"  # written last: a folder that has it is complete


def trained(
    settings: Settings | None = None,
    folder: Path | None = None,
    *,
    force: bool = False,
    say: Callable[[str], None] = print,
) -> Path:
    """Returns the folder of a trained model, which is trained first if need be.

    One process at a time trains for a folder; the others wait, and find it done.

    Args:
      settings: how to train; None for the defaults.
      folder: where the model goes; None for its place in the cache.
      force: whether to train anew what is there, and to replace another tiny model.
      say: gets lines for the user while it trains.

    Returns:
      A folder for `paged_jax.load_model`, with `loss_curve.csv`, `loss_curve.png` and
      `training.json` beside the checkpoint.

    Raises:
      UserError: the folder holds something else, or cannot be written.
    """
    settings = settings or Settings()
    path = folder or cache_folder() / settings.key()
    path = Path(os.path.abspath(path))
    if not force and is_trained(path, settings):
        return path
    with _write_errors(path), _lock(path):
        if not force and is_trained(path, settings):
            return path
        _check_replaceable(path, force)
        with _new_folder(path) as new:
            report = train_and_save(new, settings, say)
            report_text = json.dumps(report | settings.describe(), indent=2)
            (new / REPORT).write_text(report_text + "\n")
    return path


def read_report(path: Path) -> dict[str, Any]:
    """Returns what `training.json` says; nothing of a folder that has none."""
    try:
        return json.loads((path / REPORT).read_text("utf-8"))
    except (OSError, ValueError):
        return {}


def is_trained(path: Path, settings: Settings) -> bool:
    """Whether a folder has the model of these settings, versions and code."""
    report = read_report(path)
    return bool(report) and settings.describe().items() <= report.items()


def cache_folder() -> Path:
    """Returns `.cache/tiny_lm` of the source tree, or one in the user's cache.

    Raises:
      UserError: neither can be written.
    """
    source_tree = Path(__file__).resolve().parents[2]
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    choices = [Path(user) / "paged-jax" / "tiny_lm"]
    if (source_tree / "setup.py").exists():
        choices.insert(0, source_tree / ".cache" / "tiny_lm")
    for path in choices:
        with contextlib.suppress(OSError):
            path.mkdir(parents=True, exist_ok=True)
            if os.access(path, os.W_OK | os.X_OK):
                return path
    names = " and ".join(map(str, choices))
    raise UserError(f"{names} cannot be written; name a folder with --out")


def _check_replaceable(path: Path, force: bool) -> None:
    """Raises UserError unless the place is free, or a tiny model that may go."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not read_report(path):
        raise UserError(f"{path} holds something else; name a new folder with --out")
    if not force:
        raise UserError(
            f"{path} holds a model of other settings, versions or code; replace it "
            "with --force, or name a new folder with --out"
        )


@contextlib.contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(f"{path} cannot be written: {reason}") from None


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Holds a lock beside the folder, which a process that dies lets go of."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / f".{path.name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """Yields a folder that takes the path's place if all goes well, else goes."""
    new = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield new
        new.chmod(0o755)
        if path.exists():
            path.rename(new / "replaced")
        new.rename(path)
        shutil.rmtree(path / "replaced", ignore_errors=True)
    finally:
        shutil.rmtree(new, ignore_errors=True)
