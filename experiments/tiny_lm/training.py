"""The training loop: windows of a stream of texts, and two optimisers."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import muon

from experiments.tiny_lm.baselines import bits_per_byte
from experiments.tiny_lm.dense_forward import dense_logits
from experiments.tiny_lm.settings import Settings
from paged_jax.models import llama
from paged_jax.models.config import ModelConfig
from paged_jax.models.llama import Params

# How often a run looks at the held-out texts, and at how many windows of them.
_LOOKS = 20
_WINDOWS_AT_A_LOOK = 16


class Point(NamedTuple):
    """The loss at one step, in bits per byte.

    Attributes:
      step: steps taken so far.
      train: mean over the steps since the last point.
      held_out: of some held-out text; at the last point, of all.
    """

    step: int
    train: float
    held_out: float


def train(
    config: ModelConfig,
    settings: Settings,
    train_stream: np.ndarray,
    held_out_stream: np.ndarray,
    on_point: Callable[[Point], None] = lambda point: None,
) -> tuple[Params, list[Point]]:
    """Trains a model from random weights.

    Args:
      config: the model's shape.
      settings: how to train.
      train_stream: u16[N], as from `corpus.as_stream`; longer than a window.
      held_out_stream: another one.
      on_point: called with each point of the loss curve as it is known.

    Returns:
      The weights and the loss curve, which ends at the last step.
    """
    params = first_weights(config, jax.random.key(settings.seed))
    optimizer = make_optimizer(settings)
    opt_state = optimizer.init(params)
    rng = np.random.default_rng(settings.seed)
    every = max(1, settings.steps // _LOOKS)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params, opt_state, tokens):
        loss, grads = jax.value_and_grad(functools.partial(mean_loss, config))(
            params, tokens
        )
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    losses, curve = [], []
    per_byte = bits_per_byte(1.0, train_stream) * len(train_stream)
    for step in range(1, settings.steps + 1):
        tokens = draw_windows(train_stream, settings, rng)
        params, opt_state, loss = update(params, opt_state, tokens)
        losses.append(loss)
        last = step == settings.steps
        if step % every == 0 or last:
            mean = float(jnp.mean(jnp.stack(losses))) * per_byte
            windows = None if last else _WINDOWS_AT_A_LOOK
            held_out = evaluate(
                config, params, held_out_stream, settings.window, windows
            )
            curve.append(Point(step, mean, held_out))
            on_point(curve[-1])
            losses = []
    return params, curve


def first_weights(config: ModelConfig, key: jax.Array) -> Params:
    """Returns random weights that a model trains well from.

    `llama.init_params` spreads the logits like a trained model's. Here they start
    level, and the branches of the layers add little to the residual stream.
    """
    params = llama.init_params(config, key)
    params["norm"]["scale"] = jnp.ones_like(params["norm"]["scale"])
    for index in range(config.num_layers):
        layer = params[f"layer_{index}"]
        for name in ("out", "down"):
            layer[name]["kernel"] *= (2 * config.num_layers) ** -0.5
    return params


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    """Returns Muon for the kernels and Adam for the rest, rates warmed up and decayed.

    After as many tokens Muon is 0.4 bits per byte ahead of AdamW here.
    """

    def rate(highest: float) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(
            init_value=0.1 * highest,
            peak_value=highest,
            warmup_steps=settings.steps // 10,
            decay_steps=settings.steps,
            end_value=0.02 * highest,
        )

    def which(params: Params):
        return jax.tree.map_with_path(
            lambda path, _: "kernel" if path[-1].key == "kernel" else "other", params
        )

    return optax.partition(
        {
            "kernel": muon(rate(settings.muon_rate)),
            "other": optax.adam(rate(settings.adam_rate), b2=0.95),
        },
        which,
    )


def mean_loss(config: ModelConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """Returns f32[]: the mean negative log-probability, in nats, of all but the first.

    Args:
      config: the model's shape.
      params: its weights.
      tokens: i32[windows, N + 1].
    """
    logits = dense_logits(config, params, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def draw_windows(
    stream: np.ndarray, settings: Settings, rng: np.random.Generator
) -> np.ndarray:
    """Returns i32[windows, window + 1] from random places of a stream."""
    size = settings.window + 1
    starts = rng.integers(0, len(stream) - size + 1, settings.windows)
    return stream[starts[:, None] + np.arange(size)].astype(np.int32)


def evaluate(
    config: ModelConfig,
    params: Params,
    stream: np.ndarray,
    window: int,
    most_windows: int | None = None,
) -> float:
    """Returns bits per byte over a stream, cut into windows that do not overlap.

    Args:
      config: the model's shape.
      params: its weights.
      stream: u16[N], longer than a window. What is left of it at the end is left out.
      window: tokens to a window.
      most_windows: how many windows to look at, spread over the stream; None for all.
    """
    count = (len(stream) - 1) // window
    chosen = np.arange(count)
    if most_windows is not None and most_windows < count:
        chosen = np.linspace(0, count - 1, most_windows).astype(int)
    nats, seen = 0.0, []
    for start in chosen * window:
        tokens = stream[start : start + window + 1].astype(np.int32)
        nats += float(_window_loss(config, params, tokens[None])) * window
        seen.append(tokens[1:])
    return bits_per_byte(nats, np.concatenate(seen))


_window_loss = jax.jit(mean_loss, static_argnums=0)
