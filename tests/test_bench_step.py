"""The benchmark of a step, on a model that is small enough."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers

pytestmark = pytest.mark.newest(reason="a benchmark, and what it refuses")

ROOT = Path(__file__).resolve().parents[1]
PARTS = {"schedule", "products", "attention", "head", "sampling", "rest"}
POINT = {
    "batch", "context", "step_ms", "bound_ms", "of_bound", "output_tokens_per_s",
    "parts_ms", "bounds_ms",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A whole Llama directory, tokenizer included."""
    path = tmp_path_factory.mktemp("model") / "llama"
    shutil.copytree(ROOT / "tests/goldens/llama", path)
    vocab = {f"t{i}": i for i in range(96)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="t0"))
    backend.save(str(path / "tokenizer.json"))
    return path


def bench_step(*words):
    return subprocess.run(
        [sys.executable, ROOT / "scripts/bench_step", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.long
def test_json_is_one_object_and_nothing_else(model):
    small = ("--batches", 1, 3, "--contexts", 9, 40, "--steps", 2, "--repeats", 1)
    small += ("--dtype", "bfloat16", "--quick")  # fewer repeats of the scheduling, too
    done = bench_step("--model", model, *small, "--json")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    result = json.loads(done.stdout)
    for name in ("us_64", "us_256", "us_100k"):
        assert 1 < result[f"schedule_{name}"] < 1e4
    assert result["machine"]["gflops"] > 0 and result["machine"]["gb_per_s"] > 0
    assert result["wide_table_ratio"] == max(result["wide_table_ratios"].values()) > 0
    assert set(result["compile_seconds"]) == {"8"}
    assert all(seconds > 0 for seconds in result["compile_seconds"].values())
    points = result["points"]
    assert [(p["batch"], p["context"]) for p in points] == [
        (1, 9), (1, 40), (3, 9), (3, 40)
    ]  # fmt: skip
    for point in points:
        assert set(point) == POINT
        assert set(point["parts_ms"]) == set(point["bounds_ms"]) == PARTS
        assert sum(point["parts_ms"].values()) == pytest.approx(point["step_ms"])
        assert sum(point["bounds_ms"].values()) == pytest.approx(point["bound_ms"])
        assert point["of_bound"] == pytest.approx(point["bound_ms"] / point["step_ms"])
        # The model is in the processor's cache, where there is no such bound.
        parts = set(point["parts_ms"]) - {"rest"}
        assert all(point["parts_ms"][name] > 0 for name in parts)
    slowest = min(p["step_ms"] for p in points if p["batch"] == 3)
    share = result["schedule_us_64"] / 1e3 / slowest
    assert result["schedule_share"] == pytest.approx(share)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--batches", 0), "--batches is [0]; it must be 1 or more"),
        (("--repeats", -1), "--repeats is -1; it must be 1 or more"),
        (("--contexts", 8, 119), "--contexts has 119 and the model can see 118 tokens"),
        (("--steps", "x"), "argument --steps: invalid int value: 'x'"),
        (("--dtype", "int4"), "argument --dtype: invalid choice: 'int4'"),
        (("--model", "nowhere"), "There is no model 'nowhere'"),
    ],
)
def test_what_it_cannot_measure_is_refused_in_one_line(model, words, message):
    done = bench_step("--model", model, "--json", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"bench_step: {message}")
    assert done.stderr.count("\n") == 1
