"""The memory plan: weights, activations and KV blocks, and what fits in a budget."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Where an engine's memory goes, in bytes (paper, figure 1).

    Attributes:
      weights: the model's parameters.
      activations: temporaries of the compiled step.
      block: keys and values of one block, all layers.
      num_blocks: usable KV blocks; the null block is extra.
      block_size: tokens in a block.
      max_model_len: longest sequence in tokens.
      host_blocks: usable KV blocks of the host, for what is swapped out.
    """

    weights: int
    activations: int
    block: int
    num_blocks: int
    block_size: int
    max_model_len: int
    host_blocks: int = 0

    @property
    def kv_cache(self) -> int:
        """Bytes of all blocks, the null block included."""
        return (self.num_blocks + 1) * self.block

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.weights + self.activations + self.kv_cache

    @property
    def blocks_per_request(self) -> int:
        """Blocks of a request of `max_model_len` tokens."""
        return -(-self.max_model_len // self.block_size)

    @property
    def full_length_requests(self) -> int:
        """Requests of `max_model_len` tokens that fit at once, whatever they are."""
        return self.num_blocks // self.blocks_per_request

    def as_rows(self) -> list[tuple[str, str, str]]:
        """Returns the plan as rows of a table: what, how much, how it comes about."""
        slots = self.num_blocks * self.block_size
        rows = [
            ("weights", _mib(self.weights), _share(self.weights, self.total)),
            (
                "activations",
                _mib(self.activations),
                _share(self.activations, self.total),
            ),
            ("KV cache", _mib(self.kv_cache), _share(self.kv_cache, self.total)),
            (
                "KV blocks",
                f"{self.num_blocks}",
                f"{self.block_size} tokens, {self.block / 1024:.0f} KiB each",
            ),
            ("KV slots", f"{slots}", f"{self.block // self.block_size} bytes a token"),
            (
                "full-length requests",
                f"{self.full_length_requests}",
                f"{self.max_model_len} tokens take {self.blocks_per_request} blocks",
            ),
        ]
        if self.host_blocks:
            host = (self.host_blocks + 1) * self.block
            rows.append(("swap space", _mib(host), f"{self.host_blocks} host blocks"))
        return rows


def blocks_that_fit(budget: int, *, weights: int, activations: int, block: int) -> int:
    """Returns how many usable KV blocks a budget leaves room for; 0 if none.

    Args:
      budget: bytes in all.
      weights: bytes of the parameters.
      activations: bytes of the temporaries.
      block: bytes of one block; one more is set aside as the null block.
    """
    return max((budget - weights - activations) // block - 1, 0)


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%"
