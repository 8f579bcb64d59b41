"""The decoder in NumPy, float64, without a cache: every token from the whole text."""

import numpy as np


def logits(config, params, tokens) -> np.ndarray:
    """Returns f64[N, V], the logits that follow each of N tokens."""
    p = Weights(params)
    x = p["embedding"][np.asarray(tokens)]
    for layer in range(config.num_layers):
        w = Weights(p.tree[f"layer_{layer}"])
        x = x + attention(config, w, norm(config, x, w["attention_norm", "scale"]))
        y = norm(config, x, w["mlp_norm", "scale"])
        gate, up = np.split(y @ w["gate_up", "kernel"], 2, axis=-1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["down", "kernel"]
    x = norm(config, x, p["norm", "scale"])
    return x @ (p["embedding"] if config.tie_embeddings else p["head"]).T


class Weights:
    """Reads a tree of weights as float64, by path."""

    def __init__(self, tree):
        self.tree = tree

    def __getitem__(self, path):
        value = self.tree
        for name in path if isinstance(path, tuple) else (path,):
            value = value[name]
        return np.asarray(value, np.float64)


def norm(config, x, scale):
    """RMSNorm."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * scale


def rotate(config, x):
    """Turns pair (i, i + D / 2) of each head by position / theta ** (2 i / D)."""
    half = config.head_dim // 2
    frequency = config.rope_theta ** (-np.arange(half) / half)
    turn = np.exp(1j * np.arange(len(x))[:, None, None] * frequency)
    turned = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([turned.real, turned.imag], axis=-1)


def attention(config, w, y):
    """Grouped-query attention of every token to itself and those before."""
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    qkv = y @ w["qkv", "kernel"]
    if config.qkv_bias:
        qkv = qkv + w["qkv", "bias"]
    qkv = qkv.reshape(len(y), heads + 2 * kv_heads, dim)
    q, k, v = np.split(qkv, [heads, heads + kv_heads], axis=1)
    if config.qk_norm:
        q = norm(config, q, w["q_norm", "scale"])
        k = norm(config, k, w["k_norm", "scale"])
    q, k = rotate(config, q), rotate(config, k)
    k, v = (np.repeat(x, heads // kv_heads, axis=1) for x in (k, v))
    scores = np.einsum("nhd,mhd->hnm", q, k) / np.sqrt(dim)
    scores = np.where(np.tri(len(y), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("hnm,mhd->nhd", weights, v)
    return out.reshape(len(y), heads * dim) @ w["out", "kernel"]


def generate(config, params, prompt, count) -> list[int]:
    """Returns `count` greedy tokens, each from the whole text before it."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits(config, params, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def assert_greedy(config, params, prompt, output, tie=1e-4) -> None:
    """Asserts that each output token is a best one after those before it.

    Any that is within `tie` of the best logit is accepted, and what follows is then
    judged by the text as it stands.
    """
    every = logits(config, params, [*prompt, *output])
    for place, token in enumerate(output):
        row = every[len(prompt) + place - 1]
        gap = row.max() - row[token]
        assert gap <= tie, (
            f"output token {place} is {token}, {gap:.2g} below the best, {row.argmax()}"
        )
