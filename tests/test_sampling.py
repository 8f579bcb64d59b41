"""Sampling: cut-offs against plain NumPy, and draws against their distribution."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import often
import pytest
from pythons import newest_but

from paged_jax.requests import SamplingState
from paged_jax.sampling import keep_top_k, keep_top_p, sample

VOCAB = 700  # no multiple of the group that the search sums


def _state(rows, *, temperature=1.0, top_p=1.0, min_p=0.0, top_k=0, seed=0):
    def full(value, dtype):
        return jnp.full(rows, value, dtype)

    keys = jnp.stack([full(seed, jnp.uint32), jnp.arange(rows, dtype=jnp.uint32)], 1)
    return SamplingState(
        temperature=full(temperature, jnp.float32),
        top_p=full(top_p, jnp.float32),
        min_p=full(min_p, jnp.float32),
        top_k=full(top_k, jnp.int32),
        key=keys,
    )


_sample = often.jit(sample, static_argnums=3)


def _logits(rows, scale=3.0, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(0, scale, (rows, VOCAB)), jnp.float32)


@pytest.mark.parametrize("k", [1, 2, 5, 50, VOCAB])
def test_top_k_keeps_the_k_largest(k):
    scores = _logits(8)
    kept = keep_top_k(scores, jnp.full(8, k))
    threshold = np.sort(np.asarray(scores), axis=1)[:, -k][:, None]
    np.testing.assert_array_equal(np.isfinite(kept), np.asarray(scores) >= threshold)


def test_top_k_of_0_keeps_all_and_excluded_scores_stay_excluded():
    scores = _logits(2).at[:, 10:20].set(-jnp.inf)
    np.testing.assert_array_equal(keep_top_k(scores, jnp.array([0, 0])), scores)
    kept = np.asarray(keep_top_k(scores, jnp.array([VOCAB, 3])))
    assert np.isfinite(kept[0]).sum() == VOCAB - 10
    assert np.isfinite(kept[1]).sum() == 3


@pytest.mark.parametrize("negative", [False, True])
def test_top_k_orders_floats_of_either_sign(negative):
    scores = jnp.array([[-0.0, 0.0, 1e-30, -1e-30, 2.0, -2.0]])
    scores = scores - 5 if negative else scores
    kept = np.isfinite(keep_top_k(scores, jnp.array([2])))[0]
    assert kept[4] and kept.sum() >= 2 and not kept[5]


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_smallest_sufficient_set(top_p):
    weights = jax.nn.softmax(_logits(8), axis=-1)
    kept = np.asarray(keep_top_p(weights, jnp.full(8, top_p)))
    for row, all_weights in zip(kept, np.asarray(weights)):
        chosen = np.sort(row[row > 0])
        assert chosen.sum() >= top_p * all_weights.sum() - 1e-6
        assert chosen[1:].sum() < top_p * all_weights.sum() + 1e-6, "one too many"
        assert chosen.min() > np.max(all_weights[row == 0]), "not the likeliest ones"


def test_top_p_of_1_keeps_all():
    weights = jax.nn.softmax(_logits(3, scale=20.0), axis=-1)
    np.testing.assert_array_equal(keep_top_p(weights, jnp.ones(3)), weights)


def test_greedy_takes_the_likeliest():
    logits = _logits(9)
    samples = _sample(logits, _state(9, temperature=0.0), jnp.zeros(9, jnp.int32), 0)
    np.testing.assert_array_equal(samples.tokens, np.argmax(logits, axis=-1))


def test_greedy_and_random_rows_mix():
    logits = _logits(4)
    state = _state(4)
    mixed = SamplingState(
        **{**vars(state), "temperature": jnp.array([0.0, 1.0, 0.0, 1.0])}
    )
    got = _sample(logits, mixed, jnp.full(4, 5), 0).tokens
    alone = _sample(logits, state, jnp.full(4, 5), 0).tokens
    greedy = np.argmax(logits, axis=-1)
    np.testing.assert_array_equal(got, np.where([1, 0, 1, 0], greedy, alone))


def test_logprobs_are_those_of_the_model_before_temperature():
    logits = _logits(5)
    samples = _sample(logits, _state(5, temperature=2.0), jnp.zeros(5, jnp.int32), 3)
    expected = np.asarray(jax.nn.log_softmax(logits))
    rows = np.arange(5)
    chex.assert_trees_all_close(
        samples.logprobs, expected[rows, samples.tokens], atol=1e-5
    )
    top = np.argsort(-expected, axis=1)[:, :3]
    np.testing.assert_array_equal(samples.top_ids, top)
    chex.assert_trees_all_close(
        samples.top_logprobs, np.take_along_axis(expected, top, 1), atol=1e-5
    )


SETTINGS = [
    dict(),
    dict(temperature=0.5),
    dict(top_k=3),
    dict(top_p=0.7),
    dict(min_p=0.2),
    dict(top_k=6, top_p=0.8, min_p=0.05, temperature=1.5),
]


@pytest.mark.parametrize(
    "settings",
    newest_but([SETTINGS[0], SETTINGS[-1]], SETTINGS, "the last has all of them"),
    ids=str,
)
def test_draws_follow_the_distribution(settings):
    draws = 20_000
    one = np.array([2.0, 1.5, 1.0, 0.0, -1.0, 0.5, -3.0, 1.9], np.float32)
    logits = jnp.full((draws, VOCAB), -60.0).at[:, 300:308].set(one)
    tokens = np.asarray(
        _sample(logits, _state(draws, **settings), jnp.full(draws, 7), 0).tokens
    )
    probability = np.exp(one / settings.get("temperature", 1.0))
    probability /= probability.sum()
    probability[probability < settings.get("min_p", 0) * probability.max()] = 0
    if settings.get("top_k"):
        probability[np.argsort(-probability)[settings["top_k"] :]] = 0
    if settings.get("top_p"):
        probability /= probability.sum()
        order = np.argsort(-probability)
        before = np.cumsum(probability[order]) - probability[order]
        probability[order[before >= settings["top_p"]]] = 0
    probability /= probability.sum()
    counts = np.bincount(tokens - 300, minlength=8)
    assert counts[probability == 0].sum() == 0, "an excluded token was drawn"
    error = np.abs(counts / draws - probability)
    assert (error <= 5 * np.sqrt(probability / draws)).all(), (counts, probability)


def test_a_draw_depends_on_key_and_position_only():
    logits = jnp.tile(_logits(1), (6, 1))
    state = _state(6, seed=3)
    positions = jnp.arange(6, dtype=jnp.int32)
    together = np.asarray(_sample(logits, state, positions, 0).tokens)
    for row in range(6):
        one = jax.tree.map(lambda x, row=row: x[row : row + 1], state)
        alone = _sample(logits[:1], one, positions[row : row + 1], 0).tokens
        assert alone[0] == together[row]
    other = _sample(logits, _state(6, seed=4), positions, 0).tokens
    assert (np.asarray(other) != together).any(), "the seed changes nothing"


def test_a_token_of_no_weight_is_never_drawn_at_the_edges():
    logits = jnp.full((4096, VOCAB), -jnp.inf).at[:, VOCAB - 1].set(0.0)
    tokens = _sample(logits, _state(4096), jnp.arange(4096), 0).tokens
    assert (np.asarray(tokens) == VOCAB - 1).all()
