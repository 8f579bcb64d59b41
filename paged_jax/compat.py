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


def compiler_options(prefix_caching: bool) -> dict[str, str]:
    """Returns the options for a serving loop, with or without a prefix cache.

    XLA of jax 0.10 cannot compile all loops with a prefix cache if the barriers stay;
    without them it makes copies of the pool's arrays (not of keys and values).
    """
    return {} if prefix_caching else COMPILER_OPTIONS


def to_memory_of(goal: jax.Array, x: jax.Array) -> jax.Array:
    """Returns `x` in the kind of memory that `goal` is in, under `jit`."""
    space = jax.typeof(goal).memory_space
    return x if jax.typeof(x).memory_space == space else jax.device_put(x, space)
