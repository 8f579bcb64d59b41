"""What holds for every test: the CPU, the compilation cache, hypothesis's settings."""

import os

# Before anything imports JAX, which reads it once.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis

from paged_jax import compilation_cache

compilation_cache.enable()

# Examples are the same in every run in CI, so that a failure there is the change's own.
# Elsewhere they vary, and a failure prints the line that repeats it.
hypothesis.settings.register_profile("local", deadline=None, print_blob=True)
hypothesis.settings.register_profile(
    "ci", deadline=None, print_blob=True, derandomize=True, database=None
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")
