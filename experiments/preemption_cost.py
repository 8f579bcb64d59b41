"""What a preempted sequence costs: swapped out and in, or computed again (Fig 19a)."""

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.errors import UserError
from paged_jax import Engine, SamplingParams
from paged_jax.compat import host_memory
from paged_jax.kv_cache import init_kv_cache, move_blocks

_REPEATS = 5


class PreemptionCost(NamedTuple):
    """Seconds for one sequence, the fastest of several times.

    Attributes:
      tokens: how long the sequence is.
      swap_out_s: copying its blocks to the host.
      swap_in_s: copying them back.
      recompute_s: computing it as a prompt, nothing else running.
    """

    tokens: int
    swap_out_s: float
    swap_in_s: float
    recompute_s: float


def measure_preemption(engine: Engine, tokens: int) -> PreemptionCost:
    """Measures both ways of preempting a sequence, with an engine that is idle.

    Args:
      engine: it serves nothing.
      tokens: length of the sequence; with one more it fits the model length.

    Raises:
      UserError: it does not fit.
    """
    config = engine.config
    if tokens >= config.max_model_len:
        raise UserError(
            f"workload.preempted_tokens is {tokens} and engine.max_model_len "
            f"{config.max_model_len}, which must hold one more; lower one or raise the "
            "other"
        )
    swap_out_s, swap_in_s = _swap_seconds(engine, tokens)
    return PreemptionCost(
        tokens, swap_out_s, swap_in_s, _recompute_seconds(engine, tokens)
    )


def _swap_seconds(engine: Engine, tokens: int) -> tuple[float, float]:
    """Moves a sequence's blocks between two caches as a step does, one by one."""
    config, model = engine.config, engine.model.config
    count = -(-tokens // config.block_size)
    shape = (model.num_layers, config.total_blocks, config.block_size)
    heads = (model.num_kv_heads, model.head_dim)
    dtype = jnp.dtype(config.kv_dtype or model.dtype)
    device = init_kv_cache(*shape, *heads, dtype)
    host = init_kv_cache(*shape, *heads, dtype, sharding=host_memory())
    # Blocks lie about in a pool that is in use.
    rng = np.random.default_rng(0)
    order = rng.permutation(config.total_blocks)[:count].astype(np.int32) + 1
    blocks, number = jnp.asarray(order), jnp.int32(count)
    move = jax.jit(move_blocks, donate_argnums=1)
    outs, ins = [], []
    for _ in range(_REPEATS + 1):
        started = time.perf_counter()
        host, _ = jax.block_until_ready(move(device, host, blocks, blocks, number))
        outs.append(time.perf_counter() - started)
        started = time.perf_counter()
        device, _ = jax.block_until_ready(move(host, device, blocks, blocks, number))
        ins.append(time.perf_counter() - started)
    # The first one compiles, or touches its memory for the first time.
    return min(outs[1:]), min(ins[1:])


def _recompute_seconds(engine: Any, tokens: int) -> float:
    """Computes prompts that have nothing in common; one token ends each of them."""
    rng = np.random.default_rng(0)
    ask = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    seconds = []
    for _ in range(_REPEATS):
        prompt = rng.integers(engine.model.config.vocab_size, size=tokens)
        engine.submit(prompt.tolist(), ask)
        started = time.perf_counter()
        while engine.has_unfinished():
            engine.step()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
