"""The command: what it measures, how it says it, and what it refuses."""

import json
import re

import pytest

from experiments.engine_bench import bench, bound, engines, plot, report
from experiments.engine_bench.equality import Reference
from experiments.engine_bench.measure import Contender, Measured, Timed, compare
from experiments.engine_bench.runners import Runner
from experiments.engine_bench.workload import Request
from experiments.machine_speed import Speed

FAKE_ENGINES = ("paged_jax", "transformers", "llamacpp")
REQUESTS = [Request([5], 3), Request([6], 2)]
REFERENCE = Reference([[5, 5, 5], [6, 6]], [[0.5] * 3, [0.5] * 2])


def silent(line):
    del line


@pytest.fixture
def contender(fake_command, tmp_path):
    """Makes fake engines, and notes their starts."""
    starts = []

    def contender(name, model="good", compiles=False):
        fields = {"model": model, "program": "", "mode": "", "dtype": "float32"}
        fields |= {"threads": 1, "kv_tokens": 64, "max_seqs": 2, "max_model_len": 32}
        fields |= {"cache": "", "requests": REQUESTS}

        def start(cold):
            starts.append((name, cold))
            return Runner(fake_command, 1, tmp_path / "log"), fields

        return Contender(name, start, compiles)

    contender.starts = starts
    return contender


def test_engines_take_turns(contender):
    lines = []
    found = compare([contender("a"), contender("b")], 2, [3, 2], lines.append)
    rounds = [line.split(",")[0] for line in lines if "round" in line]
    assert rounds == [
        "a: round 0",
        "b: round 0",
        "b: round 1",
        "a: round 1",
        "a: round 2",
        "b: round 2",
    ]
    for one in found:
        assert one.problem is None
        assert len(one.runs) == 2
        assert one.wall_s == sum(run.wall_s for run in one.runs) / 2
        assert one.tokens == REFERENCE.tokens
        assert one.peak_rss_bytes > 1e6
        assert one.cold_startup_s is None


def test_an_engine_that_compiles_starts_twice(contender):
    (found,) = compare([contender("a", compiles=True)], 1, [3, 2], silent)
    assert contender.starts == [("a", True), ("a", False)]
    assert found.cold_startup_s > 0 and found.startup_s > 0


@pytest.mark.parametrize(
    "model, problem",
    [
        ("no_start", "no such model"),
        ("no_run", "out of blocks"),
        ("death", "it died"),
        ("short", "generated 3 tokens instead of 5"),
    ],
)
def test_one_engine_that_fails_does_not_end_the_others(contender, model, problem):
    broken, good = compare(
        [contender("broken", model), contender("good")], 2, [3, 2], silent
    )
    assert problem in broken.problem
    assert broken.wall_s is None
    assert good.problem is None and len(good.runs) == 2


def measured(name, *seconds, **more):
    runs = [Timed(wall, 1.0, 0.0) for wall in seconds]
    fields = {"version": "1", "startup_s": 2.0, "peak_rss_bytes": 2**30}
    return Measured(name, runs=runs, **(fields | {"tokens": REFERENCE.tokens} | more))


def describe(threads=1, dtype="float32", **seconds):
    found = [measured(name, *each) for name, each in seconds.items()]
    return report.describe_run(threads, dtype, found, REQUESTS, REFERENCE)


def test_the_ratio_is_of_medians_to_the_best_other():
    run = describe(paged_jax=(1, 2, 9), vllm=(4, 4, 4), openvino=(3, 3, 8))
    assert run["best_other"] == "openvino"
    assert run["ratio_vs_best"] == pytest.approx(1.5)
    assert run["engines"]["vllm"]["output_tokens_per_s"] == pytest.approx(5 / 4)


@pytest.mark.parametrize("seconds", [{"paged_jax": (1,)}, {"vllm": (1,)}])
def test_without_two_engines_there_is_no_ratio(seconds):
    assert describe(**seconds)["ratio_vs_best"] is None


def test_best_dtypes_are_compared_for_each_number_of_threads():
    result = report.summarise(
        [
            describe(1, "float32", paged_jax=(2,), vllm=(4,)),
            describe(2, "float32", paged_jax=(1,), vllm=(3,)),
            describe(1, "bfloat16", paged_jax=(3,), vllm=(1,)),
            describe(2, "bfloat16", paged_jax=(9,), vllm=(2,)),
        ],
        model="tiny",
    )
    assert result["ratio_of_best_dtypes"] == {
        "1": pytest.approx(1 / 2),
        "2": pytest.approx(2),
    }
    assert result["dtype"] == "bfloat16" and result["threads"] == 2
    assert result["ratio_vs_best"] == result["runs"][-1]["ratio_vs_best"]


def test_compiling_is_what_a_cold_start_takes_longer():
    found = measured("paged_jax", 1.0, cold_startup_s=7.0)
    run = report.describe_run(1, "float32", [found], REQUESTS, REFERENCE)
    assert run["engines"]["paged_jax"]["compile_s"] == 5.0


def test_the_table_has_a_row_for_each_engine():
    found = [
        measured("paged_jax", 1.0, tokens=[[5, 5, 9], [6, 6]]),
        measured("vllm", 2.0),
        Measured("openvino", problem="not installed; run this"),
    ]
    run = report.describe_run(2, "float32", found, REQUESTS, REFERENCE)
    title, _, headings, _, *rows = report.table(run).splitlines()
    assert title == "float32, 2 threads"
    assert len({len(row) for row in (headings, *rows)}) == 1
    ours, vllm, openvino = ([c.strip() for c in row.split("|")] for row in rows)
    assert ours[1:6] == ["paged_jax (1)", "5", "2.00x", "1/2", "0"]
    assert vllm[3:5] == ["1.00x", "2/2"]
    assert openvino[1:3] == ["openvino", "-"]
    assert openvino[-2] == "not installed; run this"


def test_what_is_promised_of_ours_is_below_the_table():
    details = {"host_syncs_per_token": 0.00031, "compilations": 0}
    details |= {"iterations": 336, "recomputed_tokens": 12}
    found = [measured("paged_jax", 1.0, details=details)]
    run = report.describe_run(2, "float32", found, REQUESTS, REFERENCE)
    assert report.table(run).endswith(
        "|\n\npaged_jax: 0.0003 host syncs a token, 0 compilations while serving, "
        "336 iterations, 12 tokens computed again"
    )


def test_the_share_of_what_the_machine_allows_is_below_the_table():
    limit = {"gflops": 100.0, "gigabytes_per_s": 20.0, "output_tokens_per_s": 10.0}
    found = [measured("paged_jax", 1.0), measured("vllm", 2.0)]
    run = report.describe_run(1, "float32", found, REQUESTS, REFERENCE, limit)
    assert run["share_of_bound"] == 0.5
    assert report.table(run).endswith(
        "|\n\nThe machine allows 10 output tokens/s (100 GFLOP/s, 20.0 GB/s); "
        "paged_jax reaches 50% of that"
    )
    assert report.summarise([run])["share_of_bound"] == 0.5


@pytest.mark.parametrize("suffix", plot.SUFFIXES)
def test_the_figure_shows_all_engines(tmp_path, suffix):
    run = describe(paged_jax=(1,), vllm=(2,))
    run["engines"]["openvino"] = run["engines"]["vllm"] | {"output_tokens_per_s": None}
    path = tmp_path / f"figure{suffix}"
    plot.draw([run, run], path)
    content = path.read_bytes()
    if suffix == ".svg":
        assert content.count(b"not run") >= 2
    else:
        assert content.startswith(b"\x89PNG")
    plot.draw([run, run], path)
    assert path.read_bytes() == content


@pytest.fixture
def fakes(home, fake_command, monkeypatch):
    """Three fake engines, one of them not installed, on a machine of known speed."""
    monkeypatch.setattr(bound, "measure", lambda threads: Speed(2e10, 1e11))
    by_name = {
        name: engines.BY_NAME[name]._replace(form="any") for name in FAKE_ENGINES
    }
    monkeypatch.setattr(engines, "BY_NAME", by_name)
    monkeypatch.setattr(report, "BY_NAME", by_name)
    monkeypatch.setattr(engines, "command", lambda engine: fake_command)
    (home / "transformers").mkdir()
    (home / "transformers/ready").touch()
    return home


ARGUMENTS = "--model tiny --requests 2 --threads 1 --repeats 1".split()


def test_json_is_one_object_and_lists_what_is_missing(fakes, capsys):
    assert bench.main([*ARGUMENTS, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["engines"]) == list(FAKE_ENGINES)
    for name in ("paged_jax", "transformers"):
        entry = result["engines"][name]
        assert entry["output_tokens_per_s"] > 0
        assert entry["equal_outputs"] == entry["requests"] == 2
        assert entry["peak_rss_bytes"] > 1e6
        assert entry["problem"] is None
    absent = result["engines"]["llamacpp"]
    assert absent["output_tokens_per_s"] is absent["equal_outputs"] is None
    assert absent["note"] == "not installed; run ./scripts/setup_engines llamacpp"
    assert result["ratio_vs_best"] == pytest.approx(
        result["engines"]["paged_jax"]["output_tokens_per_s"]
        / result["engines"]["transformers"]["output_tokens_per_s"]
    )
    assert result["share_of_bound"] == pytest.approx(
        result["engines"]["paged_jax"]["output_tokens_per_s"]
        / result["bound"]["output_tokens_per_s"]
    )
    assert result["reference"] == "transformers"
    assert result["workload"]["output_tokens"] == sum(
        len(tokens) for tokens in json.loads(reference_file(fakes))["tokens"]
    )


def reference_file(home):
    (path,) = (home / "references").iterdir()
    return path.read_text()


def test_why_an_engine_could_not_be_installed_is_in_the_table(fakes, capsys):
    (fakes / "llamacpp.failed").write_text("no C++ compiler\n")
    bench.main([*ARGUMENTS, "--engines", "llamacpp", "paged_jax"])
    out = capsys.readouterr().out
    assert "| could not be installed: no C++ compiler" in out
    assert out.index("| llamacpp") < out.index("| paged_jax (fake 1.0)")


def test_the_reference_is_decoded_once(fakes, monkeypatch, capsys):
    arguments = [*ARGUMENTS, "--engines", "paged_jax"]
    assert bench.main(arguments) == 0
    kept = json.loads(reference_file(fakes))
    kept["tokens"][0][0] += 1
    (path,) = (fakes / "references").iterdir()
    path.write_text(json.dumps(kept))
    capsys.readouterr()
    assert bench.main([*arguments, "--json"]) == 0
    assert (
        json.loads(capsys.readouterr().out)["engines"]["paged_jax"]["equal_outputs"]
        == 1
    )


def test_ours_failing_is_an_error(fakes, monkeypatch, capsys):
    bench.main([*ARGUMENTS, "--engines", "paged_jax"])
    monkeypatch.setattr(
        bench.models.Model, "path", lambda *args: str(fakes / "no_start")
    )
    assert bench.main([*ARGUMENTS, "--engines", "paged_jax"]) == 1
    assert "no such model" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--engines", "sglang"], "invalid choice: 'sglang'"),
        (["--threads", "0"], r"--threads is \[0\]; it must be from 1 to"),
        (["--threads", "4096"], r"--threads is \[4096\]; it must be from 1 to"),
        (["--repeats", "0"], "--repeats is 0; it must be 1 or more"),
        (["--requests", "-1"], "--requests is -1; it must be 1 or more"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--plot", "figure.pdf"], "--plot is figure.pdf; its name must end in"),
        (["--plot", "nowhere/x.svg"], "there is no folder nowhere"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments)
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert re.search(message, err)
