"""Settings of the engine, and the part of them that is compiled into a step."""

import dataclasses
import math

from paged_jax.field_types import check_types
from paged_jax.kv_cache import write_backend
from pallas_kernels import BACKENDS

# The names in `memory_managers.MANAGERS`, which imports this module.
MEMORY_MANAGERS = ("paged", "max", "pow2", "oracle")
BATCHING = ("continuous", "static")
PREEMPTION = ("auto", "recompute", "swap")
ATTENTION_BACKENDS = ("auto", *BACKENDS)
PRODUCTS = ("auto", "xla")
DTYPES = ("float32", "bfloat16")
WEIGHTS_DTYPES = ("int8",)
KV_DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")
MAX_BEAM_WIDTH = 16


class ConfigError(ValueError):
    """A setting that cannot be honoured; the message is one line for the user."""


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How an engine divides its memory and batches its requests.

    Attributes:
      block_size: tokens in a block; a power of two, 1 to 256.
      num_blocks: KV blocks, the null block not counted. None: enough for
        `full_length_requests` requests of `max_model_len` tokens.
      full_length_requests: the KV budget if `num_blocks` is None.
      max_model_len: longest sequence, prompt and output together, in tokens; no more
        than the model was made for.
      max_seqs: most sequences that run at once.
      max_requests: requests that the device holds at once, waiting ones included. More
        may be submitted; they wait on the host.
      max_prefixes: prefixes that can be registered at once.
      max_n: most sequences that one request may ask for (`SamplingParams.n`, or
        `best_of`); each is one of `max_seqs` and of `max_requests`.
      max_beam_width: most beams of a beam search (`SamplingParams.beam_width`), 1 to
        16; each is one of `max_seqs` and of `max_requests`. 1: no beam search.
      token_budget: most tokens computed in one step.
      min_bucket: least tokens that a step is padded to. A program is compiled for each
        size from here to the token budget (see `token_buckets`): with a larger one, an
        engine starts sooner, and small steps may take longer.
      chunked_prefill: whether a prompt may be computed over several steps, so that it
        never keeps the decoding sequences waiting. If not, prompts longer than the
        token budget are refused.
      watermark: share of the blocks that admission leaves free, so that the running
        sequences do not run out at once (vLLM uses 0.01).
      spare_blocks: blocks that it leaves free besides for each running sequence, so
        that one grows on before another must go; 0 is vLLM's rule.
      memory: `paged`, or a contiguous reservation made at admission: `max` (the model
        length), `pow2` (next power of two of the output), `oracle` (the true output).
      batching: `continuous` (sequences join and leave at every step) or `static` (a
        batch runs until its longest member ends).
      sharing: whether blocks are shared: those of registered prefixes, and a prompt's
        among the sequences of its request; paged memory only.
      prefix_caching: whether full blocks are kept after their last user and found
        again by the tokens of later prompts; paged memory with sharing only.
      preemption: what happens to the latest-arrived request when blocks run out, with
        paged memory and continuous batching: `recompute` (its blocks are released, and
        it computes its tokens again), `swap` (its blocks are copied to the host, and
        back later), or `auto`, the paper's rule: swap for several sequences, recompute
        for one.
      host_blocks: KV blocks of the host, for what is swapped out; None: as many as the
        device has. What does not fit is recomputed. Allocated only if something may be
        swapped.
      attention_backend: `reference`, `xla`, `cpu` (x86), `pallas` (NVIDIA Hopper GPUs,
        jax >= 0.11, a `kv_dtype` of 16 or 8 bits; interpreted, and very slow, without a
        GPU), or `auto`: `cpu` where it takes the model and the cache, else `xla`.
      cascade: whether decoding sequences that share their first blocks read those
        together (see docs/kernels.md); paged memory with sharing only, and not with
        the attention backend `cpu`. Their sums are in another order then.
      products: what multiplies with the weights: `auto`, which packs them for our own
        code on CPUs that it is for, or `xla`.
      dtype: dtype of weights and activations: `float32` or `bfloat16`. Products of our
        own keep activations in float32, and round them only to multiply.
      weights_dtype: `int8` rounds the weights to that, with a scale for each 32 inputs
        of an output, and the inputs likewise where the processor multiplies int8;
        needs products of our own. None: as `dtype` says.
      kv_dtype: dtype of the KV cache: `float32`, `bfloat16`, `float16`, or 8 bits with
        a float32 scale for each slot and KV head, `int8` or `float8_e4m3fn`. None: that
        of the weights.
      steps_per_sync: most steps the device runs before the host looks, while tokens are
        streamed or looked through for stop strings, and where requests may arrive.
      steps_per_sync_offline: the same where nothing of that is: in `generate`.
      max_stop_ids: stop token ids that a request can have, end-of-text included.
      max_logprobs: most alternatives that `SamplingParams.logprobs` may ask for.
      record: whether each step writes a row of the log (memory use, batch, events).
      debug: whether the invariants of the state are checked after every step (slow).
    """

    block_size: int = 16
    num_blocks: int | None = None
    full_length_requests: float = 8
    max_model_len: int = 1024
    max_seqs: int = 64
    max_requests: int = 256
    max_prefixes: int = 2
    max_n: int = 1
    max_beam_width: int = 1
    token_budget: int = 128
    min_bucket: int = 8
    chunked_prefill: bool = True
    watermark: float = 0.01
    spare_blocks: int = 1
    memory: str = "paged"
    batching: str = "continuous"
    sharing: bool = True
    prefix_caching: bool = False
    preemption: str = "auto"
    host_blocks: int | None = None
    attention_backend: str = "auto"
    cascade: bool = False
    products: str = "auto"
    dtype: str = "float32"
    weights_dtype: str | None = None
    kv_dtype: str | None = None
    steps_per_sync: int = 16
    steps_per_sync_offline: int = 256
    max_stop_ids: int = 8
    max_logprobs: int = 0
    record: bool = True
    debug: bool = False

    def __post_init__(self):
        """Raises ConfigError for a setting of the wrong type or out of range."""
        check_types(self, ConfigError)
        _check_choice("memory", self.memory, MEMORY_MANAGERS)
        _check_choice("batching", self.batching, BATCHING)
        _check_choice("preemption", self.preemption, PREEMPTION)
        _check_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        _check_choice("products", self.products, PRODUCTS)
        _check_choice("dtype", self.dtype, DTYPES)
        if self.weights_dtype is not None:
            _check_choice("weights_dtype", self.weights_dtype, WEIGHTS_DTYPES)
            if self.products == "xla":
                raise ConfigError(
                    f"weights_dtype is {self.weights_dtype} and products is xla, which "
                    "multiplies in dtype only; set products to auto or weights_dtype "
                    "to None"
                )
        if self.kv_dtype is not None:
            _check_choice("kv_dtype", self.kv_dtype, KV_DTYPES)
        size = self.block_size
        if size not in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            raise ConfigError(
                f"block_size is {size}; it must be a power of two from 1 to 256"
            )
        for name in (
            "max_model_len",
            "max_seqs",
            "max_requests",
            "token_budget",
            "min_bucket",
            "steps_per_sync",
            "steps_per_sync_offline",
            "max_stop_ids",
            "max_n",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; it must be 1 or more"
                )
        if not math.isfinite(self.full_length_requests):
            raise ConfigError(
                f"full_length_requests is {self.full_length_requests}; it must be "
                "finite"
            )
        if not 0 <= self.watermark < 1:
            raise ConfigError(
                f"watermark is {self.watermark}; it must be from 0 to below 1"
            )
        for name in ("max_logprobs", "max_prefixes", "spare_blocks"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; it must be 0 or more"
                )
        if self.host_blocks is not None and self.host_blocks < 0:
            raise ConfigError(
                f"host_blocks is {self.host_blocks}; it must be 0 or more, or None"
            )
        if self.prefix_caching and not (self.memory == "paged" and self.sharing):
            raise ConfigError(
                f"prefix_caching is True with memory {self.memory!r} and sharing "
                f"{self.sharing}; it needs memory 'paged' and sharing True: change "
                "them or turn it off"
            )
        if self.cascade and not (self.memory == "paged" and self.sharing):
            raise ConfigError(
                f"cascade is True with memory {self.memory!r} and sharing "
                f"{self.sharing}; it needs memory 'paged' and sharing True: change "
                "them or turn it off"
            )
        if self.cascade and self.attention_backend == "cpu":
            raise ConfigError(
                "cascade is True and attention_backend cpu, which reads every context "
                "by itself; use xla or turn it off"
            )
        if self.token_budget < self.max_seqs:
            raise ConfigError(
                f"token_budget is {self.token_budget} and max_seqs {self.max_seqs}; a "
                "step must have room for one token of each sequence: raise token_budget"
            )
        if not 1 <= self.max_beam_width <= MAX_BEAM_WIDTH:
            raise ConfigError(
                f"max_beam_width is {self.max_beam_width}; it must be from 1 to "
                f"{MAX_BEAM_WIDTH}"
            )
        for most in ("max_n", "max_beam_width"):
            for name in ("max_seqs", "max_requests"):
                if getattr(self, most) > getattr(self, name):
                    raise ConfigError(
                        f"{most} is {getattr(self, most)} and {name} "
                        f"{getattr(self, name)}; the sequences of a request run at "
                        f"once: lower {most} or raise {name}"
                    )
        if self.total_blocks < self.blocks_per_request:
            raise ConfigError(
                f"the KV budget is {self.total_blocks} blocks, and one request of "
                f"max_model_len {self.max_model_len} takes {self.blocks_per_request}; "
                "raise num_blocks or lower max_model_len"
            )

    @property
    def blocks_per_request(self) -> int:
        """Blocks that a full-length request takes under this memory manager."""
        blocks = -(-self.max_model_len // self.block_size)
        return blocks if self.memory == "paged" else _next_power_of_two(blocks)

    @property
    def total_blocks(self) -> int:
        """KV blocks, the null block not counted."""
        if self.num_blocks is not None:
            return self.num_blocks
        per_request = -(-self.max_model_len // self.block_size)
        return int(self.full_length_requests * per_request)

    @property
    def most_steps(self) -> int:
        """Most steps the device runs before the host looks, whatever is served."""
        return max(self.steps_per_sync, self.steps_per_sync_offline)

    def step_config(self) -> "StepConfig":
        """Returns the part of the settings that is compiled into the step."""
        paged = self.memory == "paged"
        num_prefixes = self.max_prefixes if paged and self.sharing else 0
        several = self.max_n > 1 or self.max_beam_width > 1
        sharing = paged and self.sharing and (num_prefixes > 0 or several)
        # A static batch is not admitted unless it fits to its end.
        paged_on_demand = paged and self.batching == "continuous"
        swaps_single = paged_on_demand and self.preemption == "swap"
        swaps_groups = paged_on_demand and sharing and several
        swaps_groups &= self.preemption == "auto"
        host_blocks = 0
        if swaps_single or swaps_groups:
            host_blocks = self.host_blocks
            host_blocks = self.total_blocks if host_blocks is None else host_blocks
        return StepConfig(
            block_size=self.block_size,
            num_blocks=self.total_blocks,
            table_width=self.blocks_per_request,
            max_model_len=self.max_model_len,
            num_rows=self.max_seqs + num_prefixes,
            max_seqs=self.max_seqs,
            num_requests=self.max_requests + num_prefixes,
            token_budget=self.token_budget,
            buckets=token_buckets(self.token_budget, self.min_bucket),
            chunked_prefill=self.chunked_prefill,
            watermark_blocks=int(self.watermark * self.total_blocks),
            spare_blocks=self.spare_blocks,
            sharing=sharing,
            several=several,
            max_beam_width=self.max_beam_width,
            prefix_caching=self.prefix_caching,
            host_blocks=host_blocks,
            swaps_single=swaps_single and host_blocks > 0,
            max_stop_ids=self.max_stop_ids,
            max_logprobs=self.max_logprobs,
            cache_backend=write_backend(self.attention_backend),
            log_length=self.most_steps if self.record else 0,
        )


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """The static settings of a compiled step; a static, hashable argument.

    What is not here does not recompile: the batching policy and each request's
    reservation are values in the state, so that `max`, `pow2` and `oracle`, `static`
    and `continuous` share one program.

    Attributes:
      block_size: B, tokens in a block.
      num_blocks: usable blocks; P is one more.
      table_width: T, blocks in the longest sequence.
      max_model_len: longest sequence in tokens.
      num_rows: S, sequence rows: `max_seqs` and one for each prefix that may be held.
      max_seqs: most sequences that run at once.
      num_requests: R, requests on the device: `max_requests` and one for each prefix;
        row R of the arrays is the null request.
      token_budget: most tokens in a step.
      buckets: sizes N of a step, ascending; the smallest that fits is computed.
      chunked_prefill: whether a prompt may be spread over steps.
      watermark_blocks: blocks that admission leaves free.
      spare_blocks: blocks that it leaves free for each running sequence.
      sharing: whether rows may share blocks; if not, copy-on-write is compiled out.
      several: whether a request may ask for several sequences, or beams.
      max_beam_width: most beams of a search; 1 compiles beam search out.
      prefix_caching: whether full blocks are cached.
      host_blocks: Hp, blocks of the host for what is swapped out; 0 if nothing ever is,
        and then swapping is compiled out.
      swaps_single: whether a single sequence is swapped out too, or only several of one
        request.
      max_stop_ids: stop ids of a request.
      max_logprobs: alternatives recorded for each sampled token.
      cache_backend: what copies blocks on write, see `kv_cache.copy_blocks`.
      log_length: rows of the log; 0 compiles the recording out.
    """

    block_size: int
    num_blocks: int
    table_width: int
    max_model_len: int
    num_rows: int
    max_seqs: int
    num_requests: int
    token_budget: int
    buckets: tuple[int, ...]
    chunked_prefill: bool
    watermark_blocks: int
    spare_blocks: int
    sharing: bool
    several: bool
    max_beam_width: int
    prefix_caching: bool
    host_blocks: int
    swaps_single: bool
    max_stop_ids: int
    max_logprobs: int
    cache_backend: str
    log_length: int

    @property
    def beams(self) -> bool:
        """Whether there may be beam searches."""
        return self.max_beam_width > 1

    @property
    def forks(self) -> bool:
        """Whether the sequences of a request share their prompt."""
        return self.several and self.sharing

    @property
    def groups(self) -> bool:
        """Whether there are groups (see `groups`): beams are one in any case."""
        return self.forks or self.beams

    @property
    def num_candidates(self) -> int:
        """C, extensions of a beam that are looked at.

        As many as beams, even if each stop id is among the likeliest tokens.
        """
        return self.max_beam_width + self.max_stop_ids


def token_buckets(token_budget: int, min_bucket: int = 8) -> tuple[int, ...]:
    """Returns step sizes: powers of two from 8 up and, from 16 on, what lies halfway.

    A step is padded to the smallest that fits, from 16 tokens by a third at most. The
    last one is the whole budget.

    Args:
      token_budget: most tokens in a step.
      min_bucket: smaller sizes are left out.
    """
    sizes = [8]
    power = 16
    while power < token_budget:
        sizes += [power, power + power // 2]
        power *= 2
    sizes = (size for size in sizes if min_bucket <= size < token_budget)
    return (*sizes, token_budget)


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(
            f"{name} is {value!r}; it must be one of {', '.join(allowed)}"
        )


def _next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
