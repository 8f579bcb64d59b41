"""The persistent compilation cache: what one process compiled, the next one loads."""

import os
import time
import warnings
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache

# Environment variables that name the directory; the first one that is set counts.
VARIABLES = ("PAGED_JAX_CACHE", "JAX_COMPILATION_CACHE_DIR")

# An empty entry this old is what a killed process left, not one being written.
_TORN_AFTER_S = 60.0


def enable(directory: str | os.PathLike[str] | None = None) -> Path | None:
    """Keeps every compiled program on disk, however fast it compiled.

    Call it before or after the first compilation, any number of times. Processes may
    share a directory at the same time: a program that two of them compile is written
    twice with the same content, and an entry read while it is being written costs a
    warning and one more compilation, never a wrong program. JAX's key holds its
    version, its flags and the features of the processor, so versions and machines may
    share it too. Nothing is evicted: delete the directory to reclaim its space.

    Args:
      directory: Where the cache is. By default the first of these that is set or can
        be written: `$PAGED_JAX_CACHE`, `$JAX_COMPILATION_CACHE_DIR`, `.cache/jax` of
        the source tree, `paged-jax` in the user's cache directory.

    Returns:
      The directory in use, or None (with a warning) if no default can be written.

    Raises:
      ValueError: A directory that was named, here or by a variable, cannot be written.
    """
    named = directory or next(filter(None, map(os.environ.get, VARIABLES)), None)
    if named is not None:
        path = Path(named).expanduser().absolute()
        reason = _why_not_writable(path)
        if reason is not None:
            raise ValueError(
                f"compilation cache {path} cannot be written ({reason}); "
                f"name another directory with {VARIABLES[0]}"
            )
    else:
        choices = _default_directories()
        path = next((p for p in choices if _why_not_writable(p) is None), None)
        if path is None:
            warnings.warn(
                f"no compilation cache: none of {', '.join(map(str, choices))} can be "
                f"written; name a directory with {VARIABLES[0]}",
                stacklevel=2,
            )
            return None
    _remove_torn_entries(path)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # JAX decides at its first compilation whether there is a cache, and remembers.
    jax_cache.reset_cache()
    return path


def _default_directories() -> list[Path]:
    """Returns the directories to try when none is named, best first."""
    source_tree = Path(__file__).resolve().parent.parent
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    choices = [Path(user) / "paged-jax"]
    if (source_tree / "setup.py").exists():
        choices.insert(0, source_tree / ".cache" / "jax")
    return choices


def _why_not_writable(path: Path) -> str | None:
    """Makes the directory; returns why it can't be used, or None if it can."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error.strerror or type(error).__name__
    return None if os.access(path, os.W_OK | os.X_OK) else "Permission denied"


def _remove_torn_entries(path: Path) -> None:
    """Removes entries that a killed process left empty.

    JAX never overwrites an entry, so each would cost a warning and a compilation in
    every later process.
    """
    too_old = time.time() - _TORN_AFTER_S
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_file() and entry.stat().st_size == 0:
                if entry.stat().st_mtime < too_old:
                    Path(entry.path).unlink(missing_ok=True)
