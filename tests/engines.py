"""Small engines for tests; equal settings share their compiled programs."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from oracles.invariants import broken_blocks, broken_groups, broken_swap

from paged_jax import Engine, EngineConfig, SamplingParams
from paged_jax.models import llama
from paged_jax.models.checkpoint import LoadedModel
from paged_jax.models.config import tiny
from paged_jax.prefix_invariants import check_prefix_cache
from paged_jax.requests import RequestStatus
from paged_jax.sequences import SequenceStatus, on_host
from paged_jax.tokenizer import Tokenizer

COMPILATION = "/jax/core/compile/backend_compile_duration"
EOS = 2

# 20 blocks of 4 for 4 sequences of up to 64 tokens, which would take 64: short of
# blocks as soon as all of them run.
SETTINGS = dict(
    block_size=4,
    num_blocks=20,
    max_model_len=64,
    max_seqs=4,
    max_requests=6,
    max_prefixes=2,
    token_budget=16,
    min_bucket=64,  # one size of step: half the compilation
    max_logprobs=3,
    watermark=0.0,
    spare_blocks=0,  # sequences run out soon
    steps_per_sync=16,
)


@functools.cache
def tiny_model(**changes) -> LoadedModel:
    """A random model, and a tokenizer whose token `i` is one character."""
    config = tiny(**changes)
    return LoadedModel(
        config, llama.init_params(config, jax.random.key(0)), letters(config.vocab_size)
    )


@functools.cache
def letters(vocab_size: int) -> Tokenizer:
    """A tokenizer of single characters: token `i` is `chr(256 + i)`."""
    vocab = {letter(i): i for i in range(vocab_size)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, letter(0)))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    return Tokenizer(backend, eos_token_ids=(EOS,))


def letter(token: int) -> str:
    """The text of a token."""
    return chr(256 + token)


def text(tokens) -> str:
    """The text of some tokens."""
    return "".join(map(letter, tokens))


def make_engine(
    model: LoadedModel | None = None, *, seed: int = 0, **changes
) -> Engine:
    """Returns an engine of `SETTINGS` with changes."""
    config = EngineConfig(**{**SETTINGS, **changes})
    return Engine(model or tiny_model(), config, seed=seed)


def greedy(max_tokens: int, **fields) -> SamplingParams:
    """Returns parameters of a greedy request that does not stop early."""
    return SamplingParams(
        temperature=0.0, max_tokens=max_tokens, **{"ignore_eos": True, **fields}
    )


def drawn(max_tokens: int | None, seed: int | None = None, **fields) -> SamplingParams:
    """Returns parameters of a request with random draws that does not stop early."""
    return SamplingParams(
        max_tokens=max_tokens, seed=seed, **{"ignore_eos": True, **fields}
    )


def prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Returns random prompts of 1 to `longest` tokens."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, count)
    return [rng.integers(3, 128, length).tolist() for length in lengths]


def all_tokens(output) -> list[tuple[int, ...]]:
    """Returns the tokens of each of a request's sequences."""
    return [completion.token_ids for completion in output.outputs]


def tokens_of(outputs) -> list[tuple[int, ...]]:
    """Returns the tokens of each request."""
    return [output.outputs[0].token_ids for output in outputs]


def serve(engine: Engine, limit: int = 1000, **kwargs) -> dict:
    """Steps until nothing is left; returns the last output of each request."""
    last = {}
    for _ in range(limit):
        if not engine.has_unfinished():
            return last
        last |= {output.request_id: output for output in engine.step(**kwargs)}
    raise AssertionError(f"requests are left after {limit} runs of steps")


def idle(engine: Engine) -> None:
    """Takes steps until the ended sequences have given their blocks back."""
    for _ in range(3):
        engine.step()


def assert_sound(engine: Engine) -> None:
    """Asserts the invariants of the blocks and of the groups; paged memory."""
    state = jax.device_get(engine.state.scheduler)
    broken = broken_blocks(state.pool, state.sequences)
    broken |= broken_groups(state) | broken_swap(state)
    if state.pool.prefix_cache:
        cached = jax.device_get(_check_prefix_cache(engine.state.scheduler.pool))
        broken |= {name for name, holds in cached.items() if not holds}
    assert not broken, f"broken: {sorted(broken)}"
    slots = state.sequences.num_blocks * engine.config.block_size
    assert (state.sequences.length <= slots).all(), "tokens have no slots"


_check_prefix_cache = jax.jit(check_prefix_cache)


def assert_all_free(engine: Engine) -> None:
    """Asserts that an idle engine has no block, row or request in use."""
    idle(engine)
    state = engine.state.scheduler
    pool = state.pool
    free = pool.num_available if engine.config.memory == "paged" else pool.num_free
    assert int(free) == engine.config.total_blocks
    if state.swap:
        assert int(state.swap.pool.num_free) == state.swap.pool.num_blocks
    assert not state.sequences.num_blocks.any()
    assert not state.sequences.status.any()
    assert (state.requests.status == RequestStatus.EMPTY).all()
    assert int(state.queue.count) == 0
    if engine.config.memory == "paged":
        assert_sound(engine)


def _poisoned(x, keep):
    """NaN where nothing is kept; in 8 bits, NaN of e4m3, or the largest int8."""
    return jnp.where(
        keep, x, jnp.asarray(jnp.nan if x.dtype.itemsize > 1 else 0x7F, x.dtype)
    )


@jax.jit
def _poison(state):
    """Writes NaN to every slot that holds no token of a sequence or cached block."""
    sequences = state.scheduler.sequences
    there = on_host(sequences)[:, None]
    position = jnp.arange(sequences.table_width * state.cache.block_size)
    used = (sequences.status != SequenceStatus.EMPTY)[:, None]
    used &= position < sequences.length[:, None]

    def poison_one(cache, used, cached=False):
        size = cache.block_size
        block = jnp.repeat(sequences.block_table, size, axis=1)
        keep = jnp.zeros((cache.k.shape[1], size), bool)
        keep = keep.at[jnp.where(used, block, 0), position % size].max(used)
        keep = (keep | cached).at[0].set(False)
        mask = keep[None, :, :, None, None]
        k, v = (_poisoned(x, mask) for x in (cache.k, cache.v))
        mask = keep[None, :, None]
        scales = None, None
        if cache.k_scales is not None:
            scales = (_poisoned(x, mask) for x in (cache.k_scales, cache.v_scales))
        return type(cache)(k, v, *scales), keep.sum()

    cached = False
    if prefix_cache := getattr(state.scheduler.pool, "prefix_cache", ()):
        cached = (prefix_cache.parent >= 0)[:, None]
    cache, kept = poison_one(state.cache, used & ~there, cached)
    host = poison_one(state.host, used & there)[0] if state.host else ()
    return dataclasses.replace(state, cache=cache, host=host), kept


def poison(engine):
    """Poisons the memory that nobody may read; returns the slots that are left."""
    device = engine._device
    device.state, kept = _poison(device.state)
    return int(kept)


def clean(engine: Engine) -> None:
    """Takes the NaN out again: tests that follow may be about something else."""
    device = engine._device
    cache, host = jax.tree.map(jnp.nan_to_num, (device.state.cache, device.state.host))
    device.state = dataclasses.replace(device.state, cache=cache, host=host)


@contextlib.contextmanager
def counted(event: str = COMPILATION):
    """Yields a list that gets one entry for each event of JAX, such as compilations."""
    seen = []

    def listen(name, *args, **kwargs):
        if name == event:
            seen.append(kwargs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
