"""Lets this process compile for NVIDIA GPUs on a machine that has none."""

import os
import sys
import tempfile
from pathlib import Path

from experiments.errors import UserError

# Where `scripts/setup_aot` puts jax's CUDA plugin and NVIDIA's compiler.
FOLDER = Path(__file__).resolve().parents[2] / ".cache/aot" / "%d.%d"


def enter() -> Path:
    """Makes the compiler known to jax, and has it write down what it does.

    Call it before jax is imported, which reads all of this once.

    Returns:
        The folder that the compiler will write to.

    Raises:
        UserError: the environment is not there, or jax is imported already.
    """
    folder = Path(str(FOLDER) % sys.version_info[:2])
    binaries = list(folder.glob("nvidia/*/bin/ptxas"))
    if not binaries:
        raise UserError(
            f"{folder} has no compiler for GPUs; start ./scripts/aot_report, which "
            "makes it"
        )
    if "jax" in sys.modules:
        raise UserError("jax is imported already; compile in a process of its own")
    dump = Path(tempfile.mkdtemp(prefix="paged-jax-aot-"))
    sys.path.append(str(folder))
    path = os.environ.get("PATH", "")
    os.environ["PATH"] = f"{binaries[0].parent}{os.pathsep}{path}"
    # No client of CUDA is made: its libraries (cuDNN and others) need not be there.
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ["JAX_PLATFORMS"] = "cpu"
    for what in ("PTXAS", "SASS"):
        os.environ[f"MOSAIC_GPU_DUMP_{what}"] = "1"
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(dump)
    return dump
