"""The study of recorded traces: from a file to its claims."""

import itertools
import json

import numpy as np
import pytest

from experiments.command_line import parse
from experiments.errors import UserError
from experiments.simulator.serve_recorded import Recording, serve_recorded
from experiments.studies import recorded
from experiments.studies.base_config import scale_of

# Two conversations: the second round of each begins with all of its first.
MOONCAKE = [
    (0, 1024, 8, [1, 2]),
    (1000, 600, 8, [7, 8]),
    (60_000, 1500, 8, [1, 2, 3]),
    (61_000, 1100, 8, [7, 9, 10]),
]


def lengths_file(path, count=24):
    lines = [f"{0.05 * i},{100 + 7 * i},{5 + i % 9}" for i in range(count)]
    lines.insert(3, "1.0,many,5")
    path.write_text("\n".join(["start_offset_s,input_tokens,output_tokens", *lines]))
    return path


def mooncake_file(path):
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = [json.dumps(dict(zip(keys, row, strict=True))) for row in MOONCAKE]
    path.write_text("\n".join(lines))
    return path


def scale(path, *words, format="lengths"):
    options = "--config.options"
    command = parse(
        [
            "--config=recorded",
            f"{options}.recording.path={path}",
            f"{options}.recording.format={format}",
            f"{options}.serving.max_seqs=8",
            *(f"{options}.{word}" for word in words),
        ]
    )
    return scale_of(command.config)


def served(scale):
    return [
        {"cell": task.settings, "metrics": recorded.run(task.settings)}
        for task in recorded.tasks(scale)
    ]


def by_id(rows, scale):
    return {claim["id"]: claim for claim in recorded.claims(rows, scale)}


def test_a_file_of_lengths_is_served_and_its_malformed_line_named(tmp_path):
    some = scale(lengths_file(tmp_path / "t.csv"), 'serving.memory=("paged", "max")')
    rows = served(some)
    json.dumps(rows)
    assert [row["cell"]["way"] for row in rows] == ["paged", "max"]
    for row in rows:
        metrics = row["metrics"]
        assert (metrics["requests"], metrics["rejected"]) == (24, 0)
        assert metrics["malformed"] == 1
        # The last one comes after 1.15 s, and takes a few steps.
        assert 1.15 < metrics["seconds"] < 3
        assert metrics["max_model_len"] == 100 + 7 * 23 + 5 + 23 % 9
    claims = by_id(rows, some)
    assert claims["recorded.tokens_per_s.paged"]["measured"] > 0
    assert "line 5" in claims["recorded.utilization.max"]["note"]
    # A paged pool reserves next to nothing.
    paged, contiguous = (
        claims[f"recorded.utilization.{way}"]["measured"] for way in ("paged", "max")
    )
    assert paged > 90 > contiguous
    assert list(recorded.draw(rows, some)) == ["recorded.png"]


def test_a_prefix_cache_finds_what_the_names_allow(tmp_path):
    path = mooncake_file(tmp_path / "m.jsonl")
    some = scale(path, 'serving.memory=("paged, prefix cache",)', format="mooncake")
    rows = served(some)
    # 1024 of one prompt, and 512 of the other.
    asked = sum(row[1] for row in MOONCAKE)
    found = 100 * (1024 + 512) / asked
    metrics = rows[0]["metrics"]
    assert metrics["hit_ratio"] == pytest.approx(found)
    assert metrics["infinite_ratio"] == pytest.approx(found)
    claim = by_id(rows, some)["recorded.prefix_hit_ratio"]
    assert claim["holds"] and claim["expected"] == pytest.approx(found)
    assert claim["paper"] is None


def test_arrivals_are_as_recorded_or_faster_or_drawn(tmp_path):
    path = str(lengths_file(tmp_path / "t.csv", 3000))
    recording = Recording(path, "lengths")

    def arrivals(**changes):
        changed = Recording(path, "lengths", **changes)
        return list(
            itertools.chain.from_iterable(t.arrival.tolist() for t in changed.traces())
        )

    as_recorded = arrivals()
    assert as_recorded == [row.arrival for row in recording.rows()]
    assert arrivals(speedup=4.0) == [x / 4 for x in as_recorded]
    drawn = arrivals(rate=5.0)
    assert len(drawn) == 3000 and drawn == sorted(drawn)
    assert drawn[-1] == pytest.approx(600, rel=0.1)
    assert arrivals(rate=5.0, seed=1) != drawn == arrivals(rate=5.0)
    bursts = np.diff(arrivals(rate=5.0, cv=4.0))
    assert np.std(bursts) / np.mean(bursts) == pytest.approx(4.0, rel=0.25)
    assert len(arrivals(num_requests=1500)) == 1500


def test_clients_of_a_closed_loop_wait_for_their_answers(tmp_path):
    path = lengths_file(tmp_path / "t.csv")
    words = ('serving.memory=("paged",)', "recording.clients=3")
    some = scale(path, *words, "recording.think_s=10.0")
    (row,) = served(some)
    assert row["metrics"]["requests"] == 24
    # Each of three clients sends 8, and thinks between them.
    assert 70 < row["metrics"]["seconds"] < 72


def test_there_is_a_task_for_each_seed_only_where_arrivals_are_drawn(tmp_path):
    path = lengths_file(tmp_path / "t.csv")
    assert len(recorded.tasks(scale(path))) == 4
    drawn = recorded.tasks(scale(path, "recording.rate=2.0"))
    assert len({task.key for task in drawn}) == 12
    named = recorded.tasks(scale(path, format="mooncake"))
    assert len(named) == 5


@pytest.mark.parametrize(
    "words, message",
    [
        (["recording.path="], "path is empty"),
        (["recording.path=no.csv"], "'no.csv', which is no file"),
        (["recording.format=xml"], "'xml'; use one of lengths, azure"),
        (["recording.speedup=0.0"], "speedup is 0.0"),
        (["recording.num_requests=-1"], "num_requests is -1"),
        (["recording.format=alpaca"], "no times"),
        (["recording.cv=0.0"], "cv is 0.0"),
        (["recording.clients=-1"], "clients is -1"),
        (["recording.clients=2", "recording.rate=1.0"], "leave one of them out"),
        (["serving.model=gpt"], "'gpt'; use one of opt-13b"),
        (["serving.hardware=tpu"], "'tpu'; use one of a100"),
        (["serving.token_budget=0"], "token_budget is 0"),
        (['serving.memory=("slab",)'], "'slab'; use some of"),
    ],
)
def test_what_cannot_be_used_is_told_before_anything_runs(words, message, tmp_path):
    path = lengths_file(tmp_path / "t.csv")
    with pytest.raises(UserError, match="is|has") as raised:
        recorded.tasks(scale(path, *words))
    assert message in str(raised.value)


def test_a_malformed_line_is_an_error_if_asked_and_so_is_a_file_of_none(tmp_path):
    path = lengths_file(tmp_path / "t.csv")
    with pytest.raises(UserError, match="line 5"):
        list(Recording(str(path), "lengths", strict=True).rows())
    path.write_text("start_offset_s,input_tokens,output_tokens\n1,2,x\n")
    with pytest.raises(UserError, match=r"no requests; 1 malformed \(.*line 2"):
        serve_recorded(Recording(str(path), "lengths"), "llama-3-8b", "h100")
    with pytest.raises(UserError, match="without names of blocks"):
        serve_recorded(
            Recording(str(lengths_file(path)), "lengths"),
            "llama-3-8b",
            "h100",
            prefix_caching=True,
        )
