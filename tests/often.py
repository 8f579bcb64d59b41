"""Programs that tests run so often that LLVM's optimisations pay (see `conftest`)."""

import functools

import jax

# As `jax.jit`.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 2})
