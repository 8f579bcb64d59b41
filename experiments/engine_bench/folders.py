"""Files that are made once, and are there whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def appear(path: Path) -> Iterator[Path]:
    """Gives a new folder to fill, which gets its name when it is complete.

    Args:
      path: the name; what is there already is replaced.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
