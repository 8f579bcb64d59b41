"""The check for GPUs, rehearsed on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.gpu_check import __main__ as gpu_check
from experiments.gpu_check import jobs
from experiments.gpu_check.__main__ import main
from experiments.gpu_check.summary import table
from pallas_kernels import compat

ROOT = Path(__file__).resolve().parents[2]
# What the project has beside jax and numpy, and a machine with a GPU may lack.
OTHERS = (
    "absl",
    "chex",
    "flax",
    "gguf",
    "jinja2",
    "llvmlite",
    "matplotlib",
    "ml_collections",
    "optax",
    "rich",
    "safetensors",
    "tokenizers",
)


# Rehearses one part without some packages.
PROGRAM = (
    "import sys; sys.modules.update(dict.fromkeys(sys.argv[3:])); "
    "from experiments.gpu_check.__main__ import main; "
    "sys.exit(main(['--rehearse', sys.argv[2], '--out', sys.argv[1]]))"
)


def test_without_a_gpu_it_says_so(capsys):
    assert main([]) == 2
    assert capsys.readouterr().err == (
        "gpu_check: jax finds no GPU here (--rehearse needs none)\n"
    )


@pytest.mark.skipif(not compat.has_mosaic(), reason="needs jax >= 0.11")
def test_the_kernels_part_needs_jax_and_numpy_only(tmp_path):
    out = tmp_path / "check.json"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(out), "--no-engine", *OTHERS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert {row["name"].split()[0] for row in found["numbers"]} == {
        "decode",
        "mixed",
        "cascade",
        "write",
        "copy",
        "gather",
        "scatter",
    }
    assert all(row["holds"] for row in found["numbers"])
    ran = [row["name"] for row in found["bandwidth"]]
    assert ran == ["pallas", "int8", "contiguous", "xla"]
    narrow = [row["name"] for row in found["numbers"] if row["name"].endswith(" int8")]
    assert len(narrow) == 6
    also = {row["name"].partition(" bfloat16 ")[2] for row in found["numbers"]}
    assert also == {"", "contiguous", "window cap"}
    assert found["skipped"] == []
    assert [row["name"] for row in found["prefill"]] == ["pallas", "xla"]
    assert all(row["seconds"] > 0 for row in found["bandwidth"] + found["prefill"])
    (shared,) = found["cascade"]
    assert shared["sequences"] == 5 and shared["cascade_seconds"] > 0
    assert done.stdout.endswith(table(found) + "\n")


# Of those, what the engine does without: flax brings the others.
FOR_FILES_AND_TEXT = ("gguf", "jinja2", "llvmlite", "safetensors", "tokenizers")


@pytest.mark.skipif(not compat.has_mosaic(), reason="needs jax >= 0.11")
def test_the_engines_part_needs_no_package_for_files_and_text(tmp_path):
    out = tmp_path / "check.json"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(out), "--no-kernels", *FOR_FILES_AND_TEXT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    engine = json.loads(out.read_text())["engine"]
    assert engine["weights"] == "random"
    assert engine["pallas_tokens_per_s"] > 0 and engine["xla_tokens_per_s"] > 0
    assert engine["same_first_tokens"] == engine["requests"] == 2


def some_found(**sections):
    """What was found, with nothing in the sections that are not given."""
    found: dict = dict(device="GPU", jax="1.0", copy=[dict(speed=4e12)])
    found |= {name: [] for name in jobs.SECTIONS if name != "copy"}
    return found | dict(engine=dict(why_not="No module named 'flax'")) | sections


def test_the_table_shows_shares_of_the_copy_and_what_is_wrong():
    point = dict(batch=64, length=1024, block_size=16)
    found = some_found(
        numbers=[
            dict(title="copy", holds=True),
            dict(title="write", holds=False),
            dict(title="gather", skipped=True, why_not=jobs.NO_TIME),
        ],
        bandwidth=[
            point | dict(title="", name="pallas", seconds=1.0, speed=3.6e12),
            point | dict(title="", name="cudnn", why_not="no"),
        ],
        prefill=[
            dict(title="", tokens=2048, before=0, name="pallas", share=0.5),
            dict(title="chunk", tokens=2048, before=0, name="xla", holds=False),
        ],
        cascade=[
            dict(title="cascade", plain_seconds=3.0, cascade_seconds=1.5),
            dict(title="other", why_not="it broke", holds=False),
        ],
    )
    assert table(found).splitlines() == [
        "",
        "GPU, jax 1.0; copy 4000 GB/s",
        "kernels: 2 of 3 checked, WRONG: write; chunk; other",
        "no time left for: gather",
        " batch  length  block      pallas       cudnn",
        "    64    1024     16         90%           -",
        "tokens  before      pallas         xla",
        "  2048       0         50%           -",
        "cascade: 2.00x as fast as without",
        "other: it broke",
        "engine: not run, No module named 'flax'",
    ]


@pytest.fixture
def few_jobs(monkeypatch):
    """Leaves main one check that runs a kernel, and one that cannot fail."""
    every = gpu_check.all_jobs

    def some(small):
        titles = "decode D=64 B=16 bfloat16", "pallas 2 x 40, blocks of 16"
        rest = [job for job in every(small) if job.title in titles]
        right = dict(holds=True, error=0.0, limit=0.0)
        return [*rest, jobs.Job("numbers", "right", 0, {}, lambda: right)]

    monkeypatch.setattr(gpu_check, "all_jobs", some)


@pytest.mark.skipif(not compat.has_mosaic(), reason="needs jax >= 0.11")
def test_a_kernel_that_fails_is_wrong_and_stops_nothing(
    few_jobs, monkeypatch, tmp_path, capsys
):
    from experiments.gpu_check import bandwidth, numbers

    def fail(*args, **options):
        raise RuntimeError("out of registers\nand more")

    for module in (bandwidth, numbers):
        monkeypatch.setattr(module, "paged_attention_mosaic", fail)
    out = tmp_path / "check.json"
    assert main(["--rehearse", "--no-engine", "--out", str(out)]) == 1
    printed = capsys.readouterr().out
    assert "decode D=64 B=16 bfloat16: out of registers\n" in printed
    assert (
        "kernels: 2 of 2 checked, WRONG: decode D=64 B=16 bfloat16; "
        "pallas 2 x 40, blocks of 16\n"
    ) in printed
    found = json.loads(out.read_text())
    assert [row["why_not"] for row in found["bandwidth"]] == ["out of registers"]
    assert [row["holds"] for row in found["numbers"]] == [False, True]


@pytest.mark.skipif(not compat.has_mosaic(), reason="needs jax >= 0.11")
def test_without_time_the_rest_is_named_and_the_kernels_are_not_called_right(
    few_jobs, tmp_path, capsys
):
    out = tmp_path / "check.json"
    assert main(["--rehearse", "--seconds", "1e-9", "--out", str(out)]) == 1
    found = json.loads(out.read_text())
    assert found["skipped"] == [
        "decode D=64 B=16 bfloat16",
        "right",
        "pallas 2 x 40, blocks of 16",
        "engine",
    ]
    assert f"no time left for: {'; '.join(found['skipped'])}\n" in (
        capsys.readouterr().out
    )
    assert found["seconds"] > 0


class Clock:
    """A clock that a job moves."""

    now = 50.0

    def __call__(self):
        return self.now


def test_jobs_run_by_rank_until_the_time_is_up():
    clock, done = Clock(), []
    deadline = jobs.Deadline(10, clock)

    def job(title, rank, seconds, ours=True):
        def run():
            done.append(title)
            clock.now += seconds
            if title == "fails":
                raise ValueError("")
            return dict(seconds=seconds)

        return jobs.Job("bandwidth", title, rank, dict(name=title), run, ours)

    some = [
        job("late", jobs.XLA, 1),
        job("first", jobs.CHECKED, 4),
        job("fails", jobs.CUDNN, 2, ours=False),
        job("long", jobs.TRITON, 3),
    ]
    # The kernels stop at 7 of 10 seconds: the one that began then runs to its end.
    rows = [row for _, row in jobs.run(some, deadline.part(0.7))]
    assert done == ["first", "fails", "long"]
    assert rows == [
        dict(name="first", seconds=4),
        dict(name="fails", why_not="ValueError"),
        dict(name="long", seconds=3),
        dict(name="late", skipped=True, why_not=jobs.NO_TIME),
    ]
    assert deadline.spent == 9 and not deadline.passed
    clock.now += 1
    assert deadline.passed


@pytest.mark.skipif(not compat.has_mosaic(), reason="needs jax >= 0.11")
def test_correctness_comes_first_and_the_slow_backend_last():
    order = sorted(gpu_check.all_jobs(False), key=lambda job: job.rank)
    sections = [job.section for job in order]
    assert "numbers" not in sections[sections.index("copy") :]
    names = [job.row["name"] for job in order if job.section == "bandwidth"]
    assert list(dict.fromkeys(names)) == [
        "pallas",
        "int8",
        "e4m3",
        "contiguous",
        "cudnn",
        "triton",
        "xla",
    ]
    titles = [job.title for job in order]
    assert len(set(titles)) == len(titles)
