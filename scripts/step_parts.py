"""The parts of a step apart: what each takes alone, and what the machine allows it."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.machine_speed import Speed
from paged_jax.batch import TokenBatch
from paged_jax.kv_cache import KVCache
from paged_jax.model_forward import ModelForward
from paged_jax.models.config import ModelConfig
from paged_jax.models.packed import PackedWeights, is_packed
from paged_jax.pack import pack
from paged_jax.requests import SamplingState
from paged_jax.sampling import sample
from paged_jax.scheduler import schedule
from paged_jax.state import EngineState
from paged_jax.step import Program
from pallas_kernels.api import paged_attention


class Work(NamedTuple):
    """What the parts of one step work on.

    Attributes:
        batch: the step's tokens.
        cache: keys and values.
        sampling: how the next tokens are chosen.
        positions: i32[M], where they go.
        kv_tokens: tokens whose keys and values are read in each layer.
    """

    batch: TokenBatch
    cache: KVCache
    sampling: SamplingState
    positions: jax.Array
    kv_tokens: int


def next_work(program: Program, state: EngineState, bucket: int) -> Work:
    """Returns what the next step of a state works on; the state stays as it is.

    Args:
        program: the static part.
        state: a state in which all rows decode.
        bucket: N, the size of the step.
    """

    @jax.jit
    def plan_and_pack(scheduler):
        scheduler, plan = schedule(program.config, program.manager, scheduler)
        batch, _ = pack(program.config, scheduler, plan, bucket)
        rows = batch.attention.rows[batch.sample_index]
        slot = scheduler.sequences.request[rows]
        requests = scheduler.requests
        sampling = jax.tree.map(lambda x: x[slot], requests.sampling)
        return batch, sampling, requests.length[slot]

    batch, sampling, positions = plan_and_pack(state.scheduler)
    kv_tokens = int(jnp.sum(batch.attention.lengths))
    return Work(batch, state.cache, sampling, positions, kv_tokens)


def parts_of(
    forward: ModelForward, params: Any, work: Work
) -> dict[str, Callable[[], Any]]:
    """Returns functions that do one part of a step each, in all layers.

    The dense products of the layers, attention, the head's product, and sampling. Each
    layer works on what the one before gave, as in the model.
    """
    c, key = forward.config, jax.random.key(0)
    # Between packed products activations stay float32.
    dtype = jnp.dtype("float32" if is_packed(params) else c.dtype)
    tokens, places = work.batch.tokens.shape[0], work.positions.shape[0]
    x = jax.random.normal(key, (tokens, c.hidden_size), dtype)
    q = jax.random.normal(key, (tokens, c.num_heads, c.head_dim), dtype)
    logits = jax.random.normal(key, (places, c.vocab_size))
    return {
        "products": functools.partial(_products, c, params, x, work.batch),
        "attention": functools.partial(
            _attend, c, forward.backend, q, work.cache, work.batch
        ),
        "head": functools.partial(_head, c, params, x[:places], work.batch),
        "sampling": functools.partial(_sample, logits, work.sampling, work.positions),
    }


# Bytes of a weight; in int8 each 32 share a scale.
WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1 + 4 / 32}


def least_seconds(
    config: ModelConfig, dtype: str, speed: Speed, num_rows: int, kv_tokens: int
) -> dict[str, float]:
    """Returns the least time that this machine needs for each part of a step.

    Weights, keys and values, and logits are read once; each weight is multiplied with
    each row. What is not named (scheduling, norms, rotary embedding, writing keys and
    values) should take no time beside them. The speed of arithmetic was measured in
    float32: with other weights only bytes count.
    """
    c, size = config, WEIGHT_BYTES[dtype]
    if dtype != "float32":
        speed = speed._replace(flops=float("inf"))
    layer = c.hidden_size * (c.qkv_size + 3 * c.intermediate_size)
    layer += c.num_heads * c.head_dim * c.hidden_size
    layers, head = c.num_layers * layer, c.vocab_size * c.hidden_size
    pairs = 2 * c.num_layers * c.num_heads * c.head_dim * kv_tokens
    return {
        "products": speed.least_seconds(layers * size, 2 * layers * num_rows),
        "attention": speed.least_seconds(c.kv_bytes_per_token() * kv_tokens, 2 * pairs),
        "head": speed.least_seconds(head * size, 2 * head * num_rows),
        "sampling": speed.least_seconds(4 * c.vocab_size * num_rows),
    }


@functools.partial(jax.jit, static_argnums=0)
def _products(c: ModelConfig, params, x, batch):
    def layer(index, x, product):
        qkv = product("qkv", index, x)
        attended = qkv[:, : c.num_heads * c.head_dim]
        x = x + 0.1 * product("out", index, attended)
        wide = product("gate_up", index, x)[:, : c.intermediate_size]
        return x + 0.1 * product("down", index, wide)

    if is_packed(params):
        product = PackedWeights(c, params, batch).product
        return jax.lax.fori_loop(
            0, c.num_layers, lambda index, x: layer(index, x, product), x
        )
    for index in range(c.num_layers):
        kernels = params[f"layer_{index}"]
        x = layer(index, x, lambda name, _, x: x @ kernels[name]["kernel"])  # noqa: B023
    return x


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend(c: ModelConfig, backend: str, q, cache, batch):
    def layer(index, x):
        attended = paged_attention(
            x,
            cache.k,
            cache.v,
            index,
            batch.attention,
            scale=c.head_dim**-0.5,
            backend=backend,
            k_scales=cache.k_scales,
            v_scales=cache.v_scales,
        )
        return q + 0.1 * attended

    return jax.lax.fori_loop(0, c.num_layers, layer, q)


@functools.partial(jax.jit, static_argnums=0)
def _head(c: ModelConfig, params, x, batch):
    if is_packed(params):
        return PackedWeights(c, params, batch).logits(x)
    kernel = params["embedding"] if c.tie_embeddings else params["head"]
    return jnp.einsum("nh,vh->nv", x, kernel, preferred_element_type=jnp.float32)


@jax.jit
def _sample(logits, sampling, positions):
    return sample(logits, sampling, positions)
