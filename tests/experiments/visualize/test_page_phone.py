"""On a phone: what is wider than the screen shows that there is more."""

import collections
import io

import browser
import matplotlib.image
import numpy as np
import pytest

PAPER = (252, 251, 248)


def edges(scroller) -> list[tuple[int, ...]]:
    """Returns the colour that is most of the left and of the right edge."""
    image = matplotlib.image.imread(io.BytesIO(scroller.screenshot()))
    pixels = np.rint(255 * image[..., :3]).astype(int)
    columns = (map(tuple, pixels[:, x].tolist()) for x in (1, -2))
    return [collections.Counter(column).most_common(1)[0][0] for column in columns]


@pytest.mark.parametrize("view", ["sharing", "together"])
def test_there_is_a_shadow_where_more_is_to_see(chrome, tiny_page, view):
    options = {"viewport": {"width": 360, "height": 800}, "color_scheme": "light"}
    with browser.opened(chrome, tiny_page.path, f"#{view}", **options) as found:
        scroller = found.page.locator(".scroller")
        scroller.evaluate("(e) => e.scrollIntoView({ block: 'center' })")
        wide, seen = scroller.evaluate("(e) => [e.scrollWidth, e.clientWidth]")
        assert wide > seen
        for left, shaded in ((0, [False, True]), ((wide - seen) // 2, [True, True])):
            scroller.evaluate("(e, left) => { e.scrollLeft = left; }", left)
            dark = [sum(PAPER) - sum(colour) > 60 for colour in edges(scroller)]
            assert dark == shaded
        scroller.evaluate("(e) => { e.scrollLeft = e.scrollWidth; }")
        assert edges(scroller)[1] == PAPER
        assert found.problems == []


def test_there_is_none_where_all_is_in_sight(chrome, tiny_page):
    options = {"viewport": {"width": 2560, "height": 1200}, "color_scheme": "light"}
    with browser.opened(chrome, tiny_page.path, "#together", **options) as found:
        scroller = found.page.locator(".scroller")
        wide, seen = scroller.evaluate("(e) => [e.scrollWidth, e.clientWidth]")
        assert wide == seen
        scroller.evaluate("(e) => e.scrollIntoView({ block: 'center' })")
        assert edges(scroller) == [PAPER, PAPER]
