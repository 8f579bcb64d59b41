"""What differs between the supported versions of jax, for the kernels."""

import jax

JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])
# Pallas's Mosaic GPU names and its interpreter are usable from here on.
MOSAIC_JAX_VERSION = (0, 11)


def require_mosaic() -> None:
    """Raises where this jax is too old for the `pallas` backend.

    Raises:
        ValueError: jax is older than 0.11.
    """
    if JAX_VERSION < MOSAIC_JAX_VERSION:
        raise ValueError(
            f"The pallas attention backend needs jax >= 0.11, this is "
            f'{jax.__version__}; use backend="xla".'
        )
