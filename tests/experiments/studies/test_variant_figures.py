"""Figures of ablations show what their captions say."""

import numpy as np
import pytest

from experiments.studies import variant_figures
from experiments.studies.seeds import estimate


def test_bars_reach_from_the_lowest_to_the_highest(monkeypatch):
    drawn = []
    monkeypatch.setattr(variant_figures, "to_png", drawn.append)
    values = {"1": [1.0, 2.0, 6.0], "2": [4.0, 4.0, 7.0]}
    line = [(label, estimate(some)) for label, some in values.items()]
    panel = variant_figures.Panel("load", "requests/s", {"vllm": line})
    variant_figures.draw_variants("block size", [panel])
    [figure] = drawn
    [container] = figure.axes[0].containers
    points, _, [bars] = container.lines
    assert points.get_ydata() == pytest.approx([3.0, 5.0])
    ends = np.array(bars.get_segments())[:, :, 1]
    np.testing.assert_allclose(ends, [[1.0, 6.0], [4.0, 7.0]])
