"""The engine's whole step, compiled for a GPU: its memory, and what bounds its time."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.aot.compile import compile_for, on_host
from experiments.aot.targets import Target
from experiments.smollm2_shape import SMOLLM2
from paged_jax.config import EngineConfig
from paged_jax.kv_cache import init_kv_cache
from paged_jax.memory_managers import MANAGERS
from paged_jax.model_forward import ModelForward
from paged_jax.models.config import ModelConfig
from paged_jax.models.llama import param_shapes
from paged_jax.step import Program, run_steps
from paged_jax.submit import init_state
from pallas_kernels import compat

CONFIG = EngineConfig(
    dtype="bfloat16",
    attention_backend="pallas",
    block_size=16,
    num_blocks=256 * 2048 // 16,
    max_model_len=2048,
    max_seqs=256,
    token_budget=256,
    preemption="recompute",
)
# Without a cache on the host and groups to swap out, and with them. The host has fewer
# blocks, so that in the program's text the two caches differ.
CONFIGS = (
    CONFIG,
    dataclasses.replace(
        CONFIG, preemption="swap", max_n=4, host_blocks=CONFIG.total_blocks // 2
    ),
)
# (sequences that decode, tokens in the context of each).
POINTS = ((1, 1024), (16, 1024), (64, 1024), (256, 1024), (256, 2048))


class Roofline(NamedTuple):
    """The least time that a decode step can take on a target.

    Attributes:
        batch: sequences.
        context: tokens in the context of each.
        weight_bytes: of weights, read once.
        kv_bytes: of keys and values, read and written.
        flops: of all products.
        memory_s: seconds that the bytes take.
        compute_s: seconds that the products take.
    """

    batch: int
    context: int
    weight_bytes: int
    kv_bytes: int
    flops: int
    memory_s: float
    compute_s: float

    @property
    def seconds(self) -> float:
        """The larger of the two."""
        return max(self.memory_s, self.compute_s)


def roofline(
    model: ModelConfig, kv_dtype: str, target: Target, batch: int, context: int
) -> Roofline:
    """Bounds a decode step of `batch` sequences of `context` tokens each."""
    shapes = jax.tree.leaves(param_shapes(model))
    weights = sum(x.size * x.dtype.itemsize for x in shapes)
    # Of an embedding apart from the head, only the rows of the step's tokens are read.
    embedding = model.vocab_size * model.hidden_size
    multiplied = sum(x.size for x in shapes)
    if not model.tie_embeddings:
        multiplied -= embedding
        weights -= (embedding - batch * model.hidden_size) * jnp.dtype(
            model.dtype
        ).itemsize
    kv = batch * (context + 1) * model.kv_bytes_per_token(kv_dtype)
    scores = 4 * model.num_layers * model.num_heads * model.head_dim * context
    flops = batch * (2 * multiplied + scores)
    return Roofline(
        batch,
        context,
        weights,
        kv,
        flops,
        (weights + kv) / target.bandwidth,
        flops / target.flops,
    )


def compile_step(
    target: Target,
    dump: Path,
    num_layers: int = SMOLLM2.num_layers,
    config: EngineConfig = CONFIG,
) -> dict[str, Any]:
    """Compiles the loop over the engine's steps, and accounts for device memory.

    The layers are unrolled, as an engine on a GPU does it, and what it swaps out is in
    the host's pinned memory.

    Args:
        target: the GPU.
        dump: what `environment.enter` returned.
        num_layers: of the model; fewer compile faster.
        config: the engine's settings, one of `CONFIGS`.

    Returns:
        The report's JSON of the step: bytes, and a roofline for each of `POINTS`.
    """
    model = dataclasses.replace(SMOLLM2, num_layers=num_layers)
    # One bucket, the largest, which needs the most memory: the others would be further
    # copies of the model in the same program.
    with compat.for_gpu():
        static = config.step_config()
    static = dataclasses.replace(static, buckets=static.buckets[-1:])
    manager = MANAGERS[config.memory]
    kv_dtype = config.kv_dtype or model.dtype

    def make_state():
        cache = init_kv_cache(
            model.num_layers,
            static.num_blocks,
            static.block_size,
            model.num_kv_heads,
            model.head_dim,
            jnp.dtype(kv_dtype),
        )
        return init_state(static, manager, cache)

    state, params = jax.eval_shape(make_state), param_shapes(model)
    host = on_host(state.host)
    on_device = dataclasses.replace(state, host=())
    state = dataclasses.replace(state, host=host)
    forward = ModelForward(model, config.attention_backend, unroll=True)
    compiled = compile_for(
        target,
        dump,
        run_steps,
        (
            Program(static, forward, manager.on_device()),
            params,
            state,
            jax.ShapeDtypeStruct((), jnp.int32),
        ),
        donate=(2,),
        static=(0,),
    )
    weights, cache = _bytes(params), _bytes(state.cache)
    total = compiled.argument_bytes + compiled.temporary_bytes
    return {
        "model": f"SmolLM2-135M's shape, {model.num_layers} layers",
        "target": target.name,
        "config": f"{static.max_seqs} sequences, {static.num_blocks} blocks of "
        f"{static.block_size}, {config.attention_backend}, {config.preemption}",
        "weight_bytes": weights,
        "kv_bytes": cache,
        "state_bytes": compiled.argument_bytes - weights - cache,
        "activation_bytes": compiled.temporary_bytes,
        "device_bytes": total,
        "device_share": total / target.memory_bytes,
        "donated_bytes": _bytes(on_device),
        "aliased_bytes": compiled.aliased_bytes,
        "cache_copies": _copies(compiled.text, state.cache.k.shape),
        "host_bytes": compiled.host_bytes,
        "host_donated_bytes": _bytes(host),
        "host_aliased_bytes": compiled.host_aliased_bytes,
        "host_temporary_bytes": compiled.host_temporary_bytes,
        "host_cache_copies": _copies(compiled.text, host.k.shape) if host else 0,
        "rooflines": [
            {**bound._asdict(), "seconds": bound.seconds}
            for bound in (roofline(model, kv_dtype, target, *at) for at in POINTS)
        ],
    }


def _bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _copies(text: str, shape: tuple[int, ...]) -> int:
    """Returns how many instructions of a program copy an array of `shape`."""
    dims = ",".join(map(str, shape))
    return sum(
        f"[{dims}]" in line.split(" copy")[0]
        for line in text.splitlines()
        if " copy(" in line or " copy-start(" in line
    )
