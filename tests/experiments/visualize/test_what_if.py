"""The sliders of view 4 show runs of the simulator as they are."""

import browser
import pytest
from page_numbers import shares_in_percent

from experiments.visualize import page as pages
from experiments.visualize import simulations

POINTS = [simulations.Point(*row) for row in pages.simulations()["points"]]
FOUND = {point[:4]: point for point in POINTS}
BUDGETS, RATES = simulations.BUDGETS, simulations.RATES
NAMES = {
    "vllm": "paged",
    "orca_oracle": "oracle",
    "orca_pow2": "pow2",
    "orca_max": "max",
    "ft": "static batches",
}


@pytest.fixture
def sliders(page):
    """View 4, its sliders where they are at first."""
    page.locator("#tab-together").click()
    move(page, BUDGETS[1], 16, RATES[5], "vllm")
    yield page
    move(page, BUDGETS[1], 16, RATES[5], "vllm")


def move(page, budget, block_size, rate, policy):
    """Moves the sliders, and chooses a system."""
    values = {
        "budget": BUDGETS.index(budget),
        "blockSize": simulations.BLOCK_SIZES.index(block_size),
        "rate": RATES.index(rate),
    }
    for key, value in values.items():
        page.locator(f"#what-if-{key}").fill(str(value))
    page.get_by_role("radio", name=NAMES[policy], exact=True).click()
    browser.wait_for_drawing(page)


@pytest.mark.parametrize(
    "policy, budget, block_size, rate",
    [
        ("vllm", BUDGETS[1], 16, RATES[5]),
        ("vllm", BUDGETS[0], 64, RATES[4]),
        ("vllm", BUDGETS[2], 1, RATES[9]),
        ("orca_oracle", BUDGETS[1], 4, RATES[2]),
        ("orca_max", BUDGETS[1], 256, RATES[0]),
        ("ft", BUDGETS[2], 16, RATES[0]),
    ],
)
def test_a_point_is_said_as_it_ships(sliders, policy, budget, block_size, rate):
    move(sliders, budget, block_size, rate, policy)
    # What reserves does so in blocks of 16.
    point = FOUND[policy, budget, block_size if policy == "vllm" else 16, rate]
    shares = [point.live, point.ahead, point.internal]
    parts = shares_in_percent([*shares, max(0, 1 - sum(shares))])
    when = "while others wait" if point.waits else "over the whole run"
    assert sliders.locator(".what-if .caption").inner_text() == (
        f"{point.latency:.3f} s per token. {point.running:.1f} sequences in a batch. "
        f"Of the memory, {parts[0]} holds tokens, in the mean {when}. "
        f"{point.served:.2f} requests done per second, until the last answer ended. "
        f"{point.preemptions} preemptions."
    )
    legend = sliders.locator(".what-if .parts + .legend li").all_inner_texts()
    assert [line.split()[-1] for line in legend] == parts
    assert ("lost to gaps and rounding" in legend[-1]) == (policy != "vllm")


@pytest.mark.parametrize("policy", ["orca_max", "ft"])
def test_where_the_queue_only_grows_nothing_is_left_of_the_last_system(sliders, policy):
    parts = sliders.locator(".what-if .parts")
    legend = sliders.locator(".what-if .parts + .legend")
    assert (parts.locator("i").count(), legend.locator("li").count()) == (4, 4)
    move(sliders, BUDGETS[1], 16, RATES[5], policy)
    assert "only grows" in sliders.locator(".what-if .caption").inner_text()
    assert (parts.locator("i").count(), legend.locator("li").count()) == (0, 0)
    assert not parts.is_visible() and not legend.is_visible()
    move(sliders, BUDGETS[1], 16, RATES[5], "vllm")
    assert parts.is_visible() and legend.locator("li").count() == 4


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_line_that_leaves_the_chart_ends_at_its_top(sliders, budget):
    move(sliders, budget, 16, RATES[0], "vllm")
    curves = [[p for p in POINTS if p[:3] == (name, budget, 16)] for name in NAMES]
    chart = sliders.locator(".what-if .chart")
    leaving = [curve for curve in curves if max(p.latency for p in curve) > 1]
    exits = chart.locator("path.exit").evaluate_all(
        "(paths) => paths.map((p) => p.getAttribute('transform').match(/[\\d.]+/g))"
    )
    assert len(exits) == len(leaving) > 0
    # Points are those that were simulated, and are in the chart.
    inside = sum(p.latency <= 1 for curve in curves for p in curve)
    assert chart.locator("circle").count() == inside
    (top,) = {float(y) for _, y in exits}
    lines = chart.locator("path.series").evaluate_all(
        "(paths) => paths.map((p) => p.getAttribute('d').slice(1).split('L'))"
    )
    at_top = 0
    for line in lines:
        heights = [float(point.split(",")[1]) for point in line]
        assert min(heights) > top - 0.01
        along = [i for i, y in enumerate(heights) if y < top + 0.01]
        assert along in ([], [len(heights) - 1])
        at_top += len(along)
    assert at_top == len(exits)
