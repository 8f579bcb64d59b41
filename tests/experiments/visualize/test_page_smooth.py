"""10,000 iterations of 1,000 blocks play smoothly."""

import copy
import json

import browser
import pytest

from experiments.visualize import page as pages


@pytest.fixture(scope="module")
def long_page(tiny_page, tmp_path_factory):
    data = copy.deepcopy(tiny_page.data)
    for name in data["runs"]:
        data["runs"][name] = long_run(data["runs"][name])
    for name in data["sharing"]:
        data["sharing"][name] = long_sharing(data["sharing"][name])
    path = tmp_path_factory.mktemp("long") / "long.html"
    path.write_text(pages.render(data), "utf-8")
    return path


@pytest.mark.parametrize("view", ["memory", "sharing", "batching", "together"])
def test_ten_thousand_iterations_of_a_thousand_blocks_are_smooth(
    chrome, long_page, view
):
    with browser.opened(chrome, long_page, f"#{view}") as found:
        assert found.page.evaluate("pagedJax.view") == view
        found.page.locator("#speed").select_option("500")
        devtools = found.page.context.new_cdp_session(found.page)
        # The processor's time: what else runs on the machine does not count.
        devtools.send("Performance.enable", {"timeDomain": "threadTicks"})

        def spent() -> float:
            metrics = devtools.send("Performance.getMetrics")["metrics"]
            return next(m["value"] for m in metrics if m["name"] == "TaskDuration")

        found.page.locator("#play").click()
        ticks, before = found.page.evaluate("pagedJax.ticks"), spent()
        browser.wait_until(found.page, "pagedJax.at > 600")
        drawn = found.page.evaluate("pagedJax.ticks") - ticks
        assert (spent() - before) / drawn <= 1 / 30
        found.page.evaluate("pagedJax.show(9999)")
        assert found.page.evaluate("pagedJax.at") == 9999
        for run in ("paged", "parallel"):
            refs = "run => pagedJax.stateAt(9999, run).refs.length"
            assert found.page.evaluate(refs, run) == 1000
        assert found.problems == []


def long_run(like: dict, frames: int = 10_000, rows: int = 50, width: int = 20) -> dict:
    """Returns a recording of 1,000 blocks: each row's sequence lives 320 iterations."""
    life, size = 320, 16
    blocks, sequences = rows * width, rows * -(-frames // life)
    tables = [[] for _ in range(frames)]
    refs = [[] for _ in range(frames)]
    activity = [[0, 0] for _ in range(sequences)]
    for k in range(frames):
        age = k % life
        for row in range(rows):
            sequence = k // life * rows + row
            if age == 0:
                tables[k] += [row, sequence, 0, 1, 0, 1, 1 + row * width]
                for block in range(width if k else 0):
                    refs[k] += [1 + row * width + block, 0]
                refs[k] += [1 + row * width, 1]
                activity[sequence] = [0, 0, k, 3, k + life, 7] if k else [0, 3, life, 7]
            elif age % size == 0:
                block = 1 + row * width + age // size
                tables[k] += [row, sequence, 0, age + 1, age // size, 1, block]
                refs[k] += [block, 1]
    request = {**like["requests"][0], "promptTokens": 1, "mostTokens": life}
    column = [rows * width // 2] * frames
    return {
        **like,
        "frames": frames,
        "iterations": frames,
        "blockSize": size,
        "numBlocks": blocks,
        "numRows": rows,
        "maxSeqs": rows,
        "requests": [request] * sequences,
        "sequences": [[i, 0] for i in range(sequences)],
        "rows": tables,
        "ref": refs,
        "text": [[]] * frames,
        "copies": [[]] * frames,
        "dropped": [[]] * frames,
        "activity": activity,
        "free": column,
        "log": {name: column for name in like["log"]} | {"reservation": [0] * frames},
    }


def long_sharing(like: dict, frames: int = 10_000) -> dict:
    """Returns four sequences of one request, which begin anew every 320 iterations."""
    life, size, rows = 320, 16, 4
    width = life // size
    tables, refs, text = ([[] for _ in range(frames)] for _ in range(3))
    for k in range(frames):
        age = k % life
        for row in range(rows):
            first = 1 + row * width
            text[k] += [row, age, 1, age % len(like["pieces"])]
            if age % size:
                continue
            if age == 0:
                refs[k] += [x for b in range(width) for x in (first + b, 0)]
            column = age // size
            tables[k] += [row, row, 0, age + 1, column, 1, first + column]
            refs[k] += [first + column, 1]
    request = {**like["requests"][0], "promptTokens": 0, "mostTokens": life}
    return {
        **like,
        "frames": frames,
        "iterations": frames,
        "blockSize": size,
        "numBlocks": 1000,
        "numRows": rows,
        "requests": [{**request, "promptPieces": []}],
        "rows": tables,
        "ref": refs,
        "text": text,
        "copies": [[]] * frames,
        "dropped": [[]] * frames,
        "activity": [[0, 3]] * rows,
        "free": [1000 - rows * width] * frames,
        "log": {name: [0] * frames for name in like["log"]},
    }


def test_the_long_run_is_well_made(tiny_page):
    run = long_run(tiny_page.data["runs"]["paged"])
    assert len(json.dumps(run["rows"])) < 3_000_000
    assert run["numBlocks"] == 1000
