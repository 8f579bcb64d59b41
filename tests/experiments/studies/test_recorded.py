"""The study of recorded traces: from a file to its claims."""

import dataclasses
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


def machine_file(path, **changes):
    metrics = {"gb_per_s": 2000.0, "gflops": 3e5, "memory_gib": 80.0}
    metrics |= {"step_s": 0.02, "row_s": 0.001} | changes
    row = {"cell": {"study": "machine_costs"}, "metrics": metrics}
    path.write_text(json.dumps({"rows": [row]}))
    return path


def test_overheads_of_the_software_are_chosen_and_said(tmp_path):
    path = lengths_file(tmp_path / "t.csv", 4)
    machine = machine_file(tmp_path / "summary.json")
    on_machine = f"serving.hardware={machine}"
    seconds = {}
    for words, said in (
        (["serving.overheads=none"], "no overheads of software"),
        (["serving.overheads=paper"], "of the paper's vLLM: 17 ms a step, 0.214 ms a"),
        ([on_machine], "no overheads of software"),
        (
            [on_machine, "serving.overheads=measured"],
            "of this engine, as fitted to it: 20 ms a step, 1 ms a sequence",
        ),
    ):
        some = scale(path, 'serving.memory=("paged",)', *words)
        rows = served(some)
        claims = by_id(rows, some)
        assert all(said in claim["note"] for claim in claims.values())
        measured = on_machine in words
        for claim in claims.values():
            assert ("a machine that was measured" in claim["source"]) is measured
        seconds[words[-1]] = rows[0]["metrics"]["total_mean_s"]
    # Each request takes 5 to 8 steps.
    assert seconds["serving.overheads=paper"] > seconds["serving.overheads=none"] + 0.07
    assert seconds["serving.overheads=measured"] > seconds[on_machine] + 0.09


def test_a_task_has_the_numbers_of_the_machine_that_was_measured(tmp_path):
    path = lengths_file(tmp_path / "t.csv", 4)
    found = {}
    for gib in (80.0, 40.0):
        machine = machine_file(tmp_path / "summary.json", memory_gib=gib)
        some = scale(path, 'serving.memory=("max",)', f"serving.hardware={machine}")
        (task,) = recorded.tasks(some)
        machine.unlink()  # what runs later does not depend on the file
        found[gib] = recorded.run(task.settings)["num_blocks"]
    assert found[80.0] > 2 * found[40.0] > 0


def test_there_is_a_task_for_each_seed_only_where_arrivals_are_drawn(tmp_path):
    path = lengths_file(tmp_path / "t.csv")
    assert len(recorded.tasks(scale(path))) == 4
    drawn = recorded.tasks(scale(path, "recording.rate=2.0"))
    assert len({task.key for task in drawn}) == 12
    named = recorded.tasks(scale(path, format="mooncake"))
    assert len(named) == 5


def test_claims_speak_of_seeds_only_where_arrivals_are_drawn(tmp_path):
    path = lengths_file(tmp_path / "t.csv", 4)
    for rate, seeds in ((0.0, None), (2.0, 1)):
        words = ('serving.memory=("max",)', f"recording.rate={rate}")
        some = scale(path, *words)
        some = dataclasses.replace(some, seeds=(7,))
        claims = by_id(served(some), some)
        assert {claim["seeds"] for claim in claims.values()} == {seeds}
        assert all(("one seed" in c["note"]) is bool(seeds) for c in claims.values())


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
        (["serving.hardware=tpu"], "or the summary.json of a run of"),
        (["serving.overheads=some"], "'some'; use one of none, paper, measured"),
        (["serving.overheads=measured"], "'measured', and nothing was on h100"),
        (["serving.token_budget=0"], "token_budget is 0"),
        (['serving.memory=("slab",)'], "'slab'; use some of"),
    ],
)
def test_what_cannot_be_used_is_told_before_anything_runs(words, message, tmp_path):
    path = lengths_file(tmp_path / "t.csv")
    with pytest.raises(UserError, match="is|has") as raised:
        recorded.tasks(scale(path, *words))
    assert message in str(raised.value)


def test_a_machine_that_was_measured_has_no_link_to_others(tmp_path):
    path = lengths_file(tmp_path / "t.csv")
    machine = machine_file(tmp_path / "summary.json")
    words = f"serving.hardware={machine}", "serving.num_devices=2"
    with pytest.raises(UserError, match="num_devices is 2; .* must be 1"):
        recorded.tasks(scale(path, *words))
    with pytest.raises(UserError, match="has no measured machine"):
        recorded.tasks(scale(path, f"serving.hardware={path}"))


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
