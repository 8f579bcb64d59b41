"""What differs between the versions of JAX that are supported, in one place."""

import jax

# For `jax.jit(..., compiler_options=...)` and `lowered.compile(...)` of programs that
# hold a `BuddyPool`. XLA of jax 0.10 drops optimization barriers before it fuses, and
# then copies the allocator's arrays, which only the barriers keep in place.
COMPILER_OPTIONS: dict[str, str] = (
    {}
    if jax.__version_info__ >= (0, 11)
    else {"xla_disable_hlo_passes": "cse_barrier_expander"}
)
