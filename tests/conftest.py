"""What all tests share: the CPU, the compilation cache, hypothesis, a trained model."""

import os
import signal
from pathlib import Path

# Before anything imports JAX, which reads it once.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests compile more than they compute: LLVM's optimisations of what XLA hands it cost
# more time than they save. What XLA itself does (fusion, aliasing) is unchanged.
# Flags of the environment come later, and win.
os.environ["XLA_FLAGS"] = " ".join(
    ("--xla_backend_optimization_level=0", os.environ.get("XLA_FLAGS", ""))
)

# Interpreted kernels have up to three warpgroups, each on a thread of XLA's while it
# waits: with two cores, and as many threads, one of them may never start.
os.environ.setdefault("NPROC", str(max(os.cpu_count() or 1, 6)))

import hypothesis
import mappings
import pytest

from paged_jax import LoadedModel, compilation_cache, load_model

compilation_cache.enable()

# A run in the background may ignore Ctrl-C, and so would the processes tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Examples are the same in every run in CI, so that a failure there is the change's own.
# Elsewhere they vary, and a failure prints the line that repeats it.
hypothesis.settings.register_profile("local", deadline=None, print_blob=True)
hypothesis.settings.register_profile(
    "ci", deadline=None, print_blob=True, derandomize=True, database=None
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True, scope="module")
def _give_mappings_back():
    """Forgets compiled programs between files of tests, if there are many."""
    yield
    mappings.give_back()


@pytest.fixture(scope="session")
def tiny_lm_folder() -> Path:
    """The checkpoint of a small trained model; the first use takes two minutes."""
    # Here, since few tests want it.
    from experiments.tiny_lm.checkpoint_cache import trained

    return trained()


@pytest.fixture(scope="session")
def tiny_lm(tiny_lm_folder) -> LoadedModel:
    """A small trained model, whose tokens are bytes; see `experiments/tiny_lm`."""
    return load_model(tiny_lm_folder)
