import numpy as np
import pytest

from experiments.errors import UserError
from experiments.lengths import datasets, draw_lengths, draw_pairs, quantile


def test_the_quantiles_of_the_paper_are_met_exactly():
    shares = np.array([0.0, 0.5, 0.9, 1.0])
    assert quantile("sharegpt", "input", shares).tolist() == [1, 35, 506, 2028]
    assert quantile("sharegpt", "output", shares).tolist() == [1, 271, 754, 2009]
    shares = np.array([0.01, 0.5, 0.9, 0.99])
    assert quantile("alpaca", "input", shares).tolist() == [6, 16, 30, 75]
    assert quantile("alpaca", "output", shares).tolist() == [1, 42, 125, 269]


def test_between_two_percentiles_the_length_is_linear():
    shares = np.array([0.70, 0.725, 0.75])
    assert quantile("sharegpt", "input", shares).tolist() == [94, 113.5, 133]


@pytest.mark.parametrize(
    "dataset, which, mean",
    [
        ("sharegpt", "input", 161.31),
        ("sharegpt", "output", 337.99),
        ("alpaca", "input", 19.31),
        ("alpaca", "output", 58.45),
    ],
)
def test_the_mean_is_close_to_the_one_the_paper_prints(dataset, which, mean):
    shares = (np.arange(100_000) + 0.5) / 100_000
    assert quantile(dataset, which, shares).mean() == pytest.approx(mean, rel=0.03)


def test_a_draw_has_the_quantiles_of_the_dataset():
    drawn = draw_lengths(np.random.default_rng(0), 5000, "sharegpt", 1.0, 10_000)
    for column, which in enumerate(("input", "output")):
        for share in (0.1, 0.5, 0.9):
            wanted = quantile("sharegpt", which, np.array([share]))[0]
            assert np.quantile(drawn[:, column], share) == pytest.approx(
                wanted, rel=0.02
            )


def test_even_a_small_draw_has_the_spread():
    medians = [
        np.median(
            draw_lengths(np.random.default_rng(seed), 40, "sharegpt", 1.0, 10_000)[:, 1]
        )
        for seed in range(20)
    ]
    assert max(medians) - min(medians) < 30  # plain draws spread over some 150


def test_input_and_output_are_independent():
    drawn = draw_lengths(np.random.default_rng(1), 5000, "sharegpt", 1.0, 10_000)
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 0.05


@pytest.mark.parametrize("correlation", [-0.5, 0.3])
def test_they_may_depend_on_each_other_with_the_same_quantiles(correlation):
    rngs = (np.random.default_rng(1) for _ in range(2))
    drawn = draw_lengths(next(rngs), 5000, "alpaca", 1.0, 10_000, correlation)
    alone = draw_lengths(next(rngs), 5000, "alpaca", 1.0, 10_000)
    ranks = np.argsort(np.argsort(drawn, axis=0, kind="stable"), axis=0)
    # The rank correlation of two Gaussian variables.
    wanted = 6 / np.pi * np.arcsin(correlation / 2)
    assert np.corrcoef(ranks.T)[0, 1] == pytest.approx(wanted, abs=0.04)
    np.testing.assert_allclose(
        np.sort(drawn, axis=0)[:-50], np.sort(alone, axis=0)[:-50], atol=1
    )


@pytest.mark.parametrize("correlation", [-1.0, 1.0, float("nan")])
def test_a_correlation_out_of_range_is_refused(correlation):
    with pytest.raises(UserError, match="above -1 and below 1"):
        draw_lengths(np.random.default_rng(0), 9, "alpaca", 1.0, 99, correlation)


@pytest.mark.parametrize("dataset", datasets())
@pytest.mark.parametrize("scale,limit", [(1, 1024), (4, 256), (16, 64)])
def test_lengths_fit_the_model_and_are_positive(dataset, scale, limit):
    drawn = draw_lengths(np.random.default_rng(0), 300, dataset, scale, limit)
    assert drawn.shape == (300, 2)
    assert drawn.min() >= 1
    assert drawn.sum(1).max() <= limit


def test_scaling_divides_the_lengths():
    whole = draw_lengths(np.random.default_rng(0), 500, "sharegpt", 1.0, 10_000)
    scaled = draw_lengths(np.random.default_rng(0), 500, "sharegpt", 4.0, 10_000)
    assert scaled == pytest.approx(np.maximum(whole / 4, 1), abs=0.7)


def test_the_same_seed_draws_the_same():
    first, second = (
        draw_lengths(np.random.default_rng(7), 50, "sharegpt", 1.0, 1024)
        for _ in range(2)
    )
    assert (first == second).all()


@pytest.mark.parametrize("scale,limit", [(0.01, 256), (1e-300, 256), (1.0, 1)])
def test_lengths_that_cannot_fit_the_model_are_refused(scale, limit):
    with pytest.raises(UserError, match=r"0.0% of sharegpt's lengths, .* raise one of"):
        draw_lengths(np.random.default_rng(0), 10, "sharegpt", scale, limit)


def test_lengths_of_which_few_fit_are_drawn_all_the_same():
    drawn = draw_lengths(np.random.default_rng(0), 50, "sharegpt", 1.0, 32)
    assert drawn.shape == (50, 2) and drawn.sum(1).max() <= 32


# What the paper prints (Fig 11).
@pytest.mark.parametrize(
    "dataset, means", [("sharegpt", (161.31, 337.99)), ("alpaca", (19.31, 58.45))]
)
def test_pairs_have_the_means_of_the_paper_and_all_fit(dataset, means):
    drawn = draw_pairs(np.random.default_rng(0), 10_000, dataset, 2048)
    assert drawn.min() >= 1 and drawn.sum(1).max() <= 2048
    assert drawn.mean(0) == pytest.approx(means, rel=0.015)


def test_pairs_that_do_not_fit_swap_and_none_is_lost():
    fits, all_of_them = (
        np.sort(draw_pairs(np.random.default_rng(0), 2000, "sharegpt", longest), axis=0)
        for longest in (2048, 10_000)
    )
    np.testing.assert_array_equal(fits, all_of_them)


def test_a_lone_pair_that_does_not_fit_is_shortened():
    for seed in range(200):
        drawn = draw_pairs(np.random.default_rng(seed), 1, "sharegpt", 2048)
        assert drawn.min() >= 1 and drawn.sum() <= 2048
