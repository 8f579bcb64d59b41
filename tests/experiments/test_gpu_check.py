"""The check for GPUs, rehearsed on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.gpu_check.__main__ import main, table
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


def test_without_a_gpu_it_says_so(capsys):
    assert main([]) == 2
    assert capsys.readouterr().err == (
        "gpu_check: jax finds no GPU here (--rehearse needs none)\n"
    )


@pytest.mark.skipif(not compat.has_mosaic(), reason="needs jax >= 0.11")
def test_the_kernels_part_needs_jax_and_numpy_only(tmp_path):
    out = tmp_path / "check.json"
    program = (
        "import sys; sys.modules.update(dict.fromkeys(sys.argv[2:])); "
        "from experiments.gpu_check.__main__ import main; "
        "sys.exit(main(['--rehearse', '--no-engine', '--out', sys.argv[1]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(out), *OTHERS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
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
    assert ran == ["pallas", "contiguous", "int8", "xla"]
    narrow = [row["name"] for row in found["numbers"] if row["name"].endswith(" int8")]
    assert len(narrow) == 6
    assert [row["name"] for row in found["prefill"]] == ["pallas", "xla"]
    assert all(row["seconds"] > 0 for row in found["bandwidth"] + found["prefill"])
    (shared,) = found["cascade"]
    assert shared["sequences"] == 5 and shared["cascade_seconds"] > 0
    assert done.stdout.endswith(table(found) + "\n")


def test_the_table_shows_shares_of_the_copy_and_what_is_wrong():
    point = dict(batch=64, length=1024, block_size=16)
    found = dict(
        device="GPU",
        jax="1.0",
        copy_speed=4e12,
        numbers=[dict(name="copy", holds=True), dict(name="write", holds=False)],
        bandwidth=[
            point | dict(name="pallas", seconds=1.0, speed=3.6e12),
            point | dict(name="cudnn", seconds=None, why_not="no"),
        ],
        prefill=[
            dict(tokens=2048, before=0, name="pallas", seconds=1.0, share=0.5),
            dict(tokens=2048, before=0, name="cudnn", seconds=None, why_not="no"),
        ],
        cascade=[
            dict(
                sequences=64,
                shared=4096,
                own=256,
                plain_seconds=3.0,
                cascade_seconds=1.5,
            )
        ],
        engine=dict(why_not="No module named 'flax'"),
    )
    assert table(found).splitlines() == [
        "",
        "GPU, jax 1.0; copy 4000 GB/s",
        "kernels: 2 checked, WRONG: write",
        " batch  length  block      pallas       cudnn",
        "    64    1024     16         90%           -",
        "tokens  before      pallas       cudnn",
        "  2048       0         50%           -",
        "cascade, 64 sequences that share 4096 tokens and have 256 of their own: "
        "2.00x as fast as without",
        "engine: not run, No module named 'flax'",
    ]
