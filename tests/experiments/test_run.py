"""The whole command, on a model that is small enough."""

import copy
import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from experiments import run
from experiments.command_line import CONFIGS
from experiments.metrics import TIMED
from experiments.report.pages import render_run
from experiments.report.run_record import read_run

CELLS = 12
# A sweep that compiles nothing: of so few blocks, both shares are none.
SAME_PROGRAM = "--sweep=engine.watermark=0.01,0.02"
METRICS = {
    "kv_utilization", "kv_breakdown", "output_tokens_per_s", "mean_running",
    "normalized_latency_s", "ttft_s", "tpot_s", "preemptions", "blocks_saved",
    "block_table_bytes", "schedule_us", "compilations", "host_syncs_per_token",
    "peak_rss_bytes", "cow_bytes", "block_saving", "hit_tokens",
    "host_read_bytes_per_token",
    "cow_bytes_per_token", "swapped_bytes_per_token", "recomputed_per_token",
}  # fmt: skip


@pytest.fixture(scope="module")
def headline(tmp_path_factory):
    """One run of the headline, which several tests look at."""
    return tmp_path_factory.mktemp("headline") / "out"


@pytest.fixture
def summary(headline, run_tiny):
    if not headline.exists():
        code, _, err = run_tiny(f"--out={headline}")
        assert code == 0, err
    return json.loads((headline / "summary.json").read_text())


def test_the_headline_runs_all_its_cells(summary):
    assert len(summary["rows"]) == CELLS
    for row in summary["rows"]:
        assert set(row["metrics"]) == METRICS
        assert set(row["cell"]) == {
            "memory", "batching", "sharing", "block_size", "workload"
        }  # fmt: skip
        assert sum(row["metrics"]["kv_breakdown"].values()) == pytest.approx(1)
        assert row["metrics"]["output_tokens_per_s"] > 0
        assert row["details"]["output_tokens"] > 0
    assert summary["config"]["engine"]["block_size"] == 16
    assert summary["environment"]["packages"]["jax"]


def test_all_cells_generate_the_same_tokens(summary):
    equal = next(c for c in summary["claims"] if c["id"] == "headline.tokens_equal")
    assert equal["holds"], equal["note"]


def test_arrivals_over_time_serve_some_of_the_same_requests(summary, headline):
    def digests(key):
        lines = (headline / "outputs" / f"{key}.jsonl").read_text().splitlines()
        return {json.loads(line)["digest"] for line in lines}

    offline, poisson = (
        digests(next(r["key"] for r in summary["rows"] if r["cell"]["workload"] == w))
        for w in ("offline", "poisson")
    )
    assert poisson < offline


def test_nothing_is_compiled_while_requests_are_served(summary):
    assert [row["metrics"]["compilations"] for row in summary["rows"]] == [0] * CELLS


def test_paged_memory_wastes_least(summary):
    used = {
        (row["cell"]["memory"], row["cell"]["batching"]): row["metrics"]
        for row in summary["rows"]
        if row["cell"]["workload"] == "offline"
    }
    paged = used.pop(("paged", "continuous"))
    assert all(
        paged["kv_utilization"] > other["kv_utilization"] for other in used.values()
    )


def test_sharing_saves_blocks_and_copies_on_write(summary):
    off, on = (
        row["metrics"]
        for row in summary["rows"]
        if row["cell"]["workload"] == "system_prompt"
    )
    assert off["blocks_saved"] == 0 and off["cow_bytes"] == 0
    assert on["blocks_saved"] > 0 and on["cow_bytes"] > 0


def test_the_poisson_rate_lies_between_the_two_capacities(summary):
    rows = {
        (r["cell"]["workload"], r["cell"]["memory"], r["cell"]["batching"]): r[
            "details"
        ]
        for r in summary["rows"]
    }
    ends = ("max", "static"), ("paged", "continuous")
    slow, fast = (rows["offline", *end]["requests_per_s"] for end in ends)
    for end in ends:
        rate = rows["poisson", *end]["arrival_rate"]
        assert rate == pytest.approx((slow * fast) ** 0.5)


def test_the_folder_is_self_contained(summary, headline):
    names = {str(p.relative_to(headline)) for p in headline.rglob("*") if p.is_file()}
    assert {
        "config.json",
        "environment.json",
        "cells.jsonl",
        "cells.csv",
        "summary.json",
        "report.html",
        "figures/utilization.png",
        "figures/throughput.png",
        "figures/occupancy.png",
    } <= names
    assert sum(name.startswith("outputs/") for name in names) == CELLS
    assert sum(name.startswith("logs/") for name in names) == CELLS
    assert not any(name.endswith(".part") for name in names)
    html = (headline / "report.html").read_text()
    assert html.count("data:image/png;base64,") == 3
    assert 'src="' in html and 'src="http' not in html


def test_the_folder_holds_all_that_its_report_shows(summary, headline):
    run = dataclasses.replace(read_run(headline), folder="")
    assert render_run(run) == (headline / "report.html").read_text("utf-8")


def test_the_terminal_shows_plan_cells_gains_and_claims(run_tiny, tmp_path):
    code, out, _ = run_tiny(
        "--config=budget",
        "--sweep=engine.full_length_requests=4",
        f"--out={tmp_path / 'r'}",
    )
    assert code == 0
    assert "Memory plan" in out and "full-length requests" in out
    assert "max + static" in out and "paged + continuous" in out
    assert "budget.tokens_equal" in out
    assert "report.html" in out


def test_the_same_seed_and_settings_give_the_same_summary_but_for_times(
    run_tiny, tmp_path
):
    found = []
    for name in ("first", "second"):
        words = (
            "--config=budget",
            "--sweep=engine.full_length_requests=4",
            "--seed=5",
            f"--out={tmp_path / name}",
        )
        assert run_tiny(*words)[0] == 0
        found.append(json.loads((tmp_path / name / "summary.json").read_text()))
    first, second = map(untimed, found)
    assert first == second


def untimed(summary):
    """Returns the summary without what depends on the machine and on the time."""
    summary = copy.deepcopy(summary)
    del summary["environment"]
    for row in summary["rows"]:
        for name in TIMED:
            row["metrics"].pop(name)
        for name in ("wall_s", "device_s", "warmup_s", "other_cores", "requests_per_s"):
            row["details"].pop(name)
    summary["claims"] = [c for c in summary["claims"] if c["kind"] != "speed"]
    return summary


def summary_of(run_tiny, folder, *words):
    """Runs the command with its results in a folder; returns its summary."""
    code, _, err = run_tiny(*words, f"--out={folder}")
    assert code == 0, err
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.long
def test_claims_are_made_for_each_value_of_another_sweep(run_tiny, tmp_path):
    summary = summary_of(
        run_tiny,
        tmp_path / "r",
        "--config=budget",
        "--sweep=engine.full_length_requests=4",
        SAME_PROGRAM,
    )
    assert [claim["id"] for claim in summary["claims"]] == [
        f"budget.{claim}.watermark.{value}"
        for value in (0.01, 0.02)
        for claim in ("speedup_real.paged_continuous.4", "tokens_equal")
    ]
    assert "watermark.0.02)" in (tmp_path / "r" / "report.html").read_text()


@pytest.mark.long
def test_block_sizes_are_studied_on_one_budget(run_tiny, tmp_path):
    summary = summary_of(
        run_tiny,
        tmp_path / "r",
        "--config=block_size",
        "--sweep=engine.block_size=8,16,32",
        "--config.engine.num_blocks=64",
    )
    tables = [row["metrics"]["block_table_bytes"] for row in summary["rows"]]
    assert tables == sorted(tables, reverse=True)
    assert (tmp_path / "r" / "figures" / "against_block_size.png").stat().st_size > 1000


def test_an_interrupted_run_is_resumed(run_tiny, tmp_path, monkeypatch):
    served = []
    whole = run.run_cell

    def interrupted(*args, **kwargs):
        if len(served) == 2:
            raise KeyboardInterrupt
        served.append(args)
        return whole(*args, **kwargs)

    words = (
        "--config=budget",
        "--sweep=engine.full_length_requests=4",
        SAME_PROGRAM,
        f"--out={tmp_path / 'r'}",
    )
    monkeypatch.setattr(run, "run_cell", interrupted)
    code, _, err = run_tiny(*words)
    assert code == 130
    assert "2 of 4 cells are kept" in err and "--resume" in err
    assert len(err.strip().splitlines()) == 1
    assert len((tmp_path / "r/cells.jsonl").read_text().splitlines()) == 2

    monkeypatch.setattr(run, "run_cell", whole)
    code, out, err = run_tiny(*words, "--resume")
    assert code == 0, err
    assert "2 of 4 cells are done already" in out
    summary = json.loads((tmp_path / "r/summary.json").read_text())
    assert len(summary["rows"]) == 4


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("when", ["before", "while"])
def test_ctrl_c_is_heard_in_the_garbage_collector(
    run_tiny, tmp_path, monkeypatch, when
):
    """Python drops exceptions there: the run went on as if nothing had happened."""
    runs = []
    whole = run.run_cell

    def press(phase, info):
        if phase == "start":
            gc.callbacks.remove(press)
            signal.raise_signal(signal.SIGINT)

    def pressed(*args, on_progress, **kwargs):
        def progress(done):
            if len(runs) == 2 and when == "while" and press not in gc.callbacks:
                gc.callbacks.append(press)
                gc.collect()
            on_progress(done)

        runs.append(args)
        done = whole(*args, on_progress=progress, **kwargs)
        if len(runs) == 1 and when == "before":
            gc.callbacks.append(press)
            gc.collect()
        return done

    monkeypatch.setattr(run, "run_cell", pressed)
    code, _, err = run_tiny(
        "--config=budget",
        "--sweep=engine.full_length_requests=4",
        f"--out={tmp_path / 'r'}",
    )
    assert code == 130
    assert "1 of 2 cells are kept" in err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_command_that_an_interrupted_run_names_is_complete(tmp_path):
    folder = type("Folder", (), {"path": tmp_path, "rows": {}})
    experiment = type("Experiment", (), {"folder": folder, "cells": [1, 2]})
    words = ["--seed=1", "--out", str(tmp_path), "--resume", "--config=a b"]
    said = run._interrupted(experiment, words)
    assert said.endswith(
        f"python -m experiments.run --seed=1 '--config=a b' --out={tmp_path} --resume"
    )


def test_resuming_with_other_settings_says_what_differs(summary, headline, run_tiny):
    code, _, err = run_tiny(f"--out={headline}", "--resume", "--seed=3")
    assert code == 2
    assert "config.seed was 0 and is 3" in err


def test_a_finished_run_can_be_resumed_for_its_report(summary, headline, run_tiny):
    (headline / "report.html").unlink()
    code, out, err = run_tiny(f"--out={headline}", "--resume")
    assert code == 0, err
    assert "12 of 12 cells are done already" in out
    assert (headline / "report.html").exists()


@pytest.mark.parametrize(
    "words,message",
    [
        (["--config.engine.blok_size=8"], "did you mean engine.block_size"),
        (["--config=headlin"], "did you mean headline"),
        (["--sweep=engine.block_size=3"], "block_size is 3"),
        (["--sweep=engine.memory=pagd"], "memory is 'pagd'; it must be one of"),
        (["--config.engine.full_length_requests=0.5"], "the KV budget is 2 blocks"),
        (["--config.engine.full_length_requests=nan"], "must be finite"),
        (["--config.engine.max_model_len=257"], "made for 256 tokens"),
        (["--config.engine.attention_backend=pallas"], "pallas attention backend"),
        (["--config.workload.length_scale=0.01"], "of sharegpt's lengths"),
        (["--seed=-1"], "--seed=-1: -1 is not an integer"),
        (["--config.workload.prompts=nothing.json"], "nothing.json"),
        (["--config.claims=nothing"], "claims is 'nothing'"),
        (["--sweep=engine.batching=static"], "set --config.workload.rate"),
        (["--out=/proc/nothing"], "--out=/proc/nothing"),
        (["--resume", "--out=/tmp/no/such/folder"], "holds no results"),
        (["--sweep=workload.temperature=1", "--sweep=workload.n=3"], "max_n=3"),
        (["--config=shared_prefix"], "max_model_len is 64"),
        (["--config=preemption"], "preempted_tokens is 256 and engine.max_model_len"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(words, message, run_tiny, tmp_path):
    if not any(word.startswith("--out") for word in words):
        words = [*words, f"--out={tmp_path / 'r'}"]
    code, _, err = run_tiny(*words)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1 and err.startswith("error: ")


def test_a_compilation_cache_that_cannot_be_written_is_named(
    run_tiny, tmp_path, monkeypatch
):
    monkeypatch.setenv("PAGED_JAX_CACHE", "/proc/nothing")
    code, _, err = run_tiny(f"--out={tmp_path / 'r'}")
    assert code == 2
    assert "compilation cache /proc/nothing cannot be written" in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "model,message",
    [
        ("no-such-model", "no-such-model"),
        ("EMPTY", "config.json"),
    ],
)
def test_a_malformed_checkpoint_is_named(model, message, tmp_path, capsys):
    if model == "EMPTY":
        model = str(tmp_path)
    code = run.main([f"--config.model={model}", f"--out={tmp_path / 'r'}"])
    err = capsys.readouterr().err
    assert code == 2
    assert message in err and len(err.strip().splitlines()) == 1
    assert not (tmp_path / "r").exists()  # the name stays free


def test_a_prompt_longer_than_the_model_length_is_named(run_tiny, tmp_path):
    code, _, err = run_tiny(
        "--config.workload.prompt_lengths=as_is",
        "--config.engine.max_model_len=32",
        f"--out={tmp_path / 'r'}",
    )
    assert code == 2
    assert "prompt p4 has 45 tokens and engine.max_model_len is 32" in err


def test_the_list_names_every_configuration(run_tiny):
    code, out, _ = run_tiny("--list")
    assert code == 0
    names = [line.split()[0] for line in out.splitlines()]
    assert names == sorted(path.stem for path in CONFIGS.glob("*.py"))
    assert {"headline", "paper", "fig12", "ablations"} <= set(names)


def test_ctrl_c_ends_the_process_with_130_and_a_resumable_folder(tmp_path):
    """The real command and a real signal, while the model is loaded or compiled."""
    out = tmp_path / "r"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.run", f"--out={out}"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=environment,
        cwd=run.__file__.rsplit("/", 2)[0],
    )
    deadline = time.monotonic() + 60
    while not (out / "cells.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "0 of 12 cells are kept" in err and "--resume" in err
    assert json.loads((out / "config.json").read_text())["experiment"] == "headline"
