"""A page of a tiny model, made once for all processes that test it, and opened."""

import contextlib
import fcntl
import pickle
from pathlib import Path
from typing import NamedTuple

import browser
import pytest

from experiments.prompts import Prompt
from experiments.visualize import page as pages
from experiments.visualize import recorder, scenes
from experiments.visualize.timing import time_once
from paged_jax import EngineConfig

HOSTILE = ("<script>hacked=1</script><b>x</b>", "<img src=x onerror=hacked=1>")
TEXTS = (
    "Why is the sky blue?",
    HOSTILE[0],
    "Hi.",
    "Name three rivers in the north.",
    HOSTILE[1],
    "你好，世界",
    "A line\nand another",
    "Write about rain, please.",
)
# Short of blocks as soon as a few run, so that some are preempted.
SIZE = scenes.Size(
    requests=len(TEXTS),
    longest_prompt=40,
    longest_output=24,
    sharing_output=14,
    config=EngineConfig(
        block_size=4,
        num_blocks=22,
        max_model_len=64,
        max_seqs=6,
        max_requests=8,
        max_prefixes=0,
        token_budget=16,
        min_bucket=16,
        watermark=0.0,
        spare_blocks=0,
    ),
    sharing_config=EngineConfig(
        block_size=8,
        num_blocks=40,
        max_model_len=96,
        max_seqs=4,
        max_requests=4,
        max_prefixes=0,
        max_n=4,
        max_beam_width=4,
        token_budget=96,  # as on the page: the prompt is read and forked in one go
        min_bucket=16,
    ),
)


class Page(NamedTuple):
    """What was served, seen and written.

    Attributes:
      data: what the page shows.
      recorded: what the recorder saw, by the name of the run.
      path: the HTML file.
      timings: of each timed run its system, as in `scenes.SYSTEMS`, and its seconds.
    """

    data: dict
    recorded: dict[str, recorder.Recorded]
    path: Path
    timings: list[tuple[tuple[str, str, str], float]]


@pytest.fixture(scope="session")
def tiny_page(tiny_model, tmp_path_factory) -> Page:
    # Beside the folders of the workers of pytest-xdist, which share it.
    shared = tmp_path_factory.getbasetemp()
    if "popen-gw" in shared.name:
        shared = shared.parent
    kept = shared / "tiny_page.pickle"
    with _locked(shared / "tiny_page.lock"):
        if not kept.exists():
            made = _make(tiny_model, shared / "tiny_page.html")
            # Its type is of a module that each process knows by another name.
            kept.write_bytes(pickle.dumps(tuple(made)))
        return Page(*pickle.loads(kept.read_bytes()))


def _make(model, path: Path) -> Page:
    seen, timings = {}, []
    names = iter([*scenes.SYSTEMS, "parallel", "beam"])

    def keep(engine, asked):
        recorded = recorder.record(engine, asked)
        seen[next(names)] = recorded
        return recorded

    def note(model, config, asked):
        timed = time_once(model, config, asked)
        system = config.memory, config.batching, config.preemption
        timings.append((system, timed.seconds))
        return timed

    prompts = [Prompt(f"p{i}", "chat", text) for i, text in enumerate(TEXTS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scenes, "record", keep)
        patch.setattr(scenes, "time_once", note)
        data = scenes.serve_all(model, prompts, 0, SIZE, lambda line: None)
    data |= {
        "format": pages.FORMAT,
        "about": {
            "model": "tiny",
            "seed": 0,
            "command": "python -m experiments.visualize",
            "longest_output": SIZE.longest_output,
            "environment": {
                "cpu": "a processor",
                "cores": 2,
                "started": "today",
                "packages": {"jax": "0"},
            },
        },
        "simulations": pages.simulations(),
    }
    path.write_text(pages.render(data), "utf-8")
    return Page(data, seen, path, timings)


@contextlib.contextmanager
def _locked(path: Path):
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="module")
def chrome():
    with browser.chromium() as started:
        yield started


@pytest.fixture(scope="module")
def shown(chrome, tiny_page):
    with browser.opened(chrome, tiny_page.path, locale="en-GB") as found:
        yield found
        assert found.problems == []
        assert found.requests == [f"file://{tiny_page.path}"]


@pytest.fixture
def page(shown):
    """The open page, at the start of the first view, in English."""
    if shown.page.locator("html").get_attribute("lang") != "en":
        shown.page.locator("#language").click()
    shown.page.locator("#tab-memory").click()
    shown.page.evaluate("pagedJax.show(0)")
    browser.wait_for_drawing(shown.page)
    yield shown.page
    assert shown.problems == []
