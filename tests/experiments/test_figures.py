import io

import matplotlib.image
import numpy as np
import pytest
from test_claims import headline_rows, row
from test_metrics import LOG

from experiments import figures


def read_log(key):
    return LOG, np.arange(1.0, len(LOG) + 1)


def with_details(rows):
    for one in rows:
        one["label"] = f"{one['cell']['memory']} + {one['cell']['batching']}"
        one["details"]["total_slots"] = 100
        one["metrics"] |= {"mean_running": 3.0, "schedule_us": 20.0}
    return rows


def assert_drawn(png):
    image = matplotlib.image.imread(io.BytesIO(png))
    assert image.shape[0] > 200 and image.shape[1] > 400
    assert image[..., :3].std() > 0.05


def test_the_headline_has_its_three_figures():
    drawn = figures.draw_all(with_details(headline_rows()), read_log, [])
    assert set(drawn) == {"utilization.png", "throughput.png", "occupancy.png"}
    for caption, png in drawn.values():
        assert caption.endswith(".")
        assert_drawn(png)


def test_a_sweep_over_numbers_is_drawn_against_them():
    rows = [row(str(size), size, block_size=size) for size in (1, 16, 256)]
    for one in rows:
        one["cell"]["engine.block_size"] = one["cell"]["block_size"]
    drawn = figures.draw_all(with_details(rows), read_log, ["engine.block_size"])
    assert set(drawn) == {"against_block_size.png", "occupancy.png"}
    for _, png in drawn.values():
        assert_drawn(png)


def test_a_sweep_over_names_is_drawn_as_bars():
    drawn = figures.draw_all(
        with_details(headline_rows()), read_log, ["engine.batching"]
    )
    assert "throughput.png" in drawn


def test_figures_are_the_same_each_time():
    rows = with_details(headline_rows())
    assert figures.draw_throughput(rows) == figures.draw_throughput(rows)


@pytest.mark.parametrize("count", [1, 2])
def test_occupancy_has_a_panel_for_each_run(count):
    runs = [("a", *read_log("a"), 100)] * count
    assert_drawn(figures.draw_occupancy(runs))
