"""Keeps a process that compiles many programs below Linux's limit on mappings."""

from pathlib import Path

import jax

from paged_jax import programs

# Compiled programs take mappings of memory, of which Linux gives a process 65,530.
# Who compiles hundreds of engines would pass that, and crash. An engine takes a
# thousand, and a file of tests has a dozen.
_MANY = 40_000


def give_back() -> None:
    """Forgets compiled programs if there are many."""
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MANY:
        programs._compile.cache_clear()
        jax.clear_caches()
