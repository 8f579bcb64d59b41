"""The shape of a decoder of the Llama family."""

import dataclasses
from typing import Any

from pallas_kernels.quantised_kv import bytes_per_vector

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything that decides the model's program, but no weights. Hashable.

    Attributes:
        vocab_size: V, rows of the embedding and of the head.
        hidden_size: width of the residual stream.
        num_layers: L.
        num_heads: H, query heads.
        num_kv_heads: K, key and value heads; divides H.
        head_dim: D, even.
        intermediate_size: width of the gated MLP.
        rope_theta: base of the rotary embedding's frequencies.
        rope_divisors: D / 2 divisors of the rotary frequencies, for a model whose
            context was extended (see `rope.py`); empty for none.
        rms_norm_eps: added to the mean square in every RMSNorm.
        tie_embeddings: whether the head is the embedding.
        qkv_bias: whether queries, keys and values have a bias (Qwen2).
        qk_norm: whether each query and key head is normalised (Qwen3).
        max_position_embeddings: tokens that the model was trained to see.
        dtype: "float32" or "bfloat16", of the weights and activations. Norms, softmax
            and logits are float32 in both.
        eos_token_ids: tokens that end a sequence.
        bos_token_id: token that starts a sequence; None where the model has none.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 10000.0
    rope_divisors: tuple[float, ...] = ()
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    max_position_embeddings: int = 2048
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self):
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} must be a multiple of num_kv_heads "
                f"{self.num_kv_heads}."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim must be even for the rotary embedding, got {self.head_dim}."
            )
        for name in ("rope_theta", "rms_norm_eps"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a positive number, got {value!r}.")
        if len(self.rope_divisors) not in (0, self.head_dim // 2):
            raise ValueError(
                f"rope_divisors must have head_dim / 2 = {self.head_dim // 2} values, "
                f"got {len(self.rope_divisors)}."
            )
        if self.dtype not in DTYPES:
            raise ValueError(
                f"Unknown model dtype {self.dtype!r}; use one of {DTYPES}."
            )

    @property
    def qkv_size(self) -> int:
        """Columns of the fused query, key and value projection: (H + 2 K) * D."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def context_length(self) -> int:
        """Tokens that the model can see.

        A linear scaling of the rotary embedding stretches the positions that it was
        trained on by its factor, which is then every divisor; other scalings keep their
        fastest frequencies, and state the longer context themselves.
        """
        stretch = min(self.rope_divisors, default=1.0)
        return int(self.max_position_embeddings * stretch)

    @property
    def num_params(self) -> int:
        """Number of weights; a tied head counts once."""
        layer = (
            2 * self.hidden_size
            + self.hidden_size * self.qkv_size
            + self.num_heads * self.head_dim * self.hidden_size
            + 3 * self.hidden_size * self.intermediate_size
        )
        if self.qkv_bias:
            layer += self.qkv_size
        if self.qk_norm:
            layer += 2 * self.head_dim
        tables = 1 if self.tie_embeddings else 2
        return (
            self.num_layers * layer
            + tables * self.vocab_size * self.hidden_size
            + self.hidden_size
        )

    def kv_bytes_per_token(self, dtype: Any = None) -> int:
        """Bytes of one token's keys and values in all layers.

        Args:
            dtype: of the cache; None for the model's own. Those of 8 bits have scales.
        """
        vector = bytes_per_vector(self.head_dim, self.dtype if dtype is None else dtype)
        return 2 * self.num_layers * self.num_kv_heads * vector


def tiny(**changes: Any) -> ModelConfig:
    """Returns a two-layer Llama for tests, with fields replaced by `changes`."""
    config = ModelConfig(
        vocab_size=128,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=64,
        max_position_embeddings=256,
        eos_token_ids=(2,),
        bos_token_id=1,
    )
    return dataclasses.replace(config, **changes)


def tiny_qwen2(**changes: Any) -> ModelConfig:
    """Returns `tiny` with what Qwen2 has: biases, a tied head, a larger rope base."""
    return tiny(
        **{"qkv_bias": True, "tie_embeddings": True, "rope_theta": 1e6} | changes
    )


def tiny_qwen3(**changes: Any) -> ModelConfig:
    """Returns `tiny` with what Qwen3 has: head norms, heads wider than the stream."""
    return tiny(**{"qk_norm": True, "head_dim": 16, "rope_theta": 1e6} | changes)
