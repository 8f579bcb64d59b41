"""What all tests share: the CPU, the compilation cache, hypothesis, a trained model."""

import functools
import gc
import os
import signal
from pathlib import Path

# Before anything imports JAX, which reads it once.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests compile more than they compute: LLVM's optimisations of what XLA hands it cost
# more time than they save, and so does cutting that into parts for many cores. What XLA
# itself does (fusion, aliasing) is unchanged. Flags of the environment come later, and
# win.
os.environ["XLA_FLAGS"] = " ".join(
    (
        "--xla_backend_optimization_level=0",
        "--xla_cpu_parallel_codegen_split_count=1",
        os.environ.get("XLA_FLAGS", ""),
    )
)
# Where in Python each operation comes from costs time in every stage of a compilation.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

# Interpreted kernels have up to three warpgroups, each on a thread of XLA's while it
# waits: with two cores, and as many threads, one of them may never start.
os.environ.setdefault("NPROC", str(max(os.cpu_count() or 1, 6)))

import hypothesis
import mappings
import pytest

from paged_jax import LoadedModel, compilation_cache, load_model, programs

compilation_cache.enable()

# Tracing makes objects that live long, and compiled programs keep theirs: Python's
# garbage collector looks through all of them time and again, and finds little.
gc.freeze()
gc.set_threshold(50_000, 20, 100)

# An engine keeps the programs of the last few; here, those of every engine are kept,
# since tests of many files serve with the same settings. See `mappings`.
programs._compile = functools.lru_cache(maxsize=None)(programs._compile.__wrapped__)

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


def pytest_addoption(parser):
    """Adds the option with which CI tests the oldest Python."""
    parser.addoption(
        "--one-of-each",
        action="store_true",
        help="of each parametrised test the first case alone",
    )


@pytest.hookimpl(trylast=True)  # After marks have had their say.
def pytest_collection_modifyitems(config, items):
    """Keeps one case of each test if so asked."""
    if not config.getoption("--one-of-each"):
        return
    firsts, others = {}, []
    for item in items:
        name = item.nodeid.partition("[")[0]
        if firsts.setdefault(name, item) is not item:
            others.append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = firsts.values()


@pytest.hookimpl(trylast=True)
def pytest_itemcollected(item):
    """Refuses a `newest` that does not say why the oldest Python need not run it."""
    for mark in item.iter_markers("newest"):
        if not mark.kwargs.get("reason"):
            raise pytest.UsageError(f"{item.nodeid}: newest(reason=...) has no reason")


@pytest.fixture(autouse=True, scope="module")
def _give_mappings_back():
    """Forgets compiled programs between files of tests, if there are many."""
    yield
    mappings.give_back()


@pytest.fixture(scope="session")
def tiny_lm_folder() -> Path:
    """The checkpoint of a small trained model; the first use takes a minute."""
    # Here, since few tests want it.
    from experiments.tiny_lm.checkpoint_cache import trained
    from experiments.tiny_lm.settings import Settings

    # Two thirds of the default: enough for all that tests look for.
    return trained(Settings(steps=200))


@pytest.fixture(scope="session")
def tiny_lm(tiny_lm_folder) -> LoadedModel:
    """A small trained model, whose tokens are bytes; see `experiments/tiny_lm`."""
    return load_model(tiny_lm_folder)
