"""Checks that an engine's settings go with a model, before anything is compiled."""

from paged_jax.config import ConfigError, EngineConfig
from paged_jax.models.checkpoint import LoadedModel
from paged_jax.models.packed import can_pack, is_packed, packed_dtype
from pallas_kernels.cpu.attention import obstacle
from pallas_kernels.limits import check_pallas


def check_model(config: EngineConfig, loaded: LoadedModel) -> None:
    """Raises ConfigError, with one line, for a setting that the model does not allow.

    Args:
      config: the engine's settings.
      loaded: the model.
    """
    model = loaded.config
    if config.dtype != model.dtype:
        raise ConfigError(
            f"dtype is {config.dtype} and the model was loaded as {model.dtype}; load "
            "it with that dtype"
        )
    if config.weights_dtype is not None and not can_pack():
        raise ConfigError(
            f"weights_dtype is {config.weights_dtype}, which needs an x86 CPU with "
            "AVX2 and the package llvmlite, and jax on that CPU; set it to None"
        )
    if is_packed(loaded.params):
        packed_as, asked = packed_dtype(loaded.params), config.weights_dtype
        if packed_as != (asked or config.dtype):
            raise ConfigError(
                f"weights_dtype is {asked} and the model's weights were packed as "
                f"{packed_as}; pack them with that dtype"
            )
    if config.max_model_len > model.context_length:
        raise ConfigError(
            f"max_model_len is {config.max_model_len} and the model was made for "
            f"{model.context_length} tokens; lower max_model_len"
        )
    if config.attention_backend == "pallas":
        try:
            check_pallas(
                num_heads=model.num_heads,
                kv_heads=model.num_kv_heads,
                head_dim=model.head_dim,
                block_size=config.block_size,
                kv_dtype=config.kv_dtype or model.dtype,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None


def choose_backend(
    backend: str, head_dim: int, kv_dtype: str, cascade: bool = False
) -> str:
    """Returns the attention backend that `auto` stands for; others as they are.

    Args:
      backend: of `EngineConfig`.
      head_dim: D.
      kv_dtype: dtype of the cache.
      cascade: whether shared prefixes are to be read together.

    Raises:
      ConfigError: `cpu` is asked for, and does not take such a cache here.
    """
    if backend not in ("auto", "cpu"):
        return backend
    if cascade:  # `cpu` with it is refused by `EngineConfig`
        return "xla"
    why_not = obstacle(head_dim, kv_dtype)
    if why_not is None:
        return "cpu"
    if backend == "cpu":
        raise ConfigError(f"attention_backend is cpu, which {why_not}; use xla")
    return "xla"
