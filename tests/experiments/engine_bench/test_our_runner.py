"""This project's engine behind the protocol."""

import dataclasses

import jax
import pytest

from experiments.engine_bench import engines
from experiments.engine_bench.equality import Reference, compare_tokens
from experiments.engine_bench.random_llama import SHAPES, write_random_llama
from experiments.engine_bench.runners import Runner
from experiments.engine_bench.workload import Request

pytestmark = pytest.mark.long

MICRO = dataclasses.replace(
    SHAPES["tiny"], vocab_size=512, hidden_size=64, num_layers=2, head_dim=8
)
REQUESTS = [Request([5, 6, 7], 6), Request([8], 3), Request([9, 10], 9)]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What it answers to two runs in a batch, and one by one."""
    folder = tmp_path_factory.mktemp("ours")
    write_random_llama(folder / "model", MICRO)
    found = {}
    for mode in ("", "one_by_one"):
        runner = Runner(
            engines.command(engines.BY_NAME["paged_jax"]), 1, folder / "log"
        )
        try:
            ready = runner.ask(
                "start",
                model=str(folder / "model"),
                program="",
                mode=mode,
                dtype="float32",
                threads=1,
                kv_tokens=128,
                max_seqs=4,
                max_model_len=64,
                cache=jax.config.jax_compilation_cache_dir,
                requests=REQUESTS,
            )
            found[mode] = ready, [runner.ask("run") for _ in range(2)]
        finally:
            runner.close()
    return found


def test_all_tokens_are_generated_and_nothing_is_compiled(answers):
    ready, runs = answers[""]
    assert ready["version"] == f"jax {jax.__version__}"
    assert ready["settings"]["compile_s"] > 0
    for run in runs:
        assert [len(tokens) for tokens in run["tokens"]] == [6, 3, 9]
        assert run["details"]["compilations"] == 0
        # One look at the end, which brings the tokens.
        assert run["details"]["host_syncs_per_token"] == pytest.approx(1 / 18)
        assert 9 <= run["details"]["iterations"] <= 11
    assert runs[0]["tokens"] == runs[1]["tokens"]


def test_one_by_one_it_is_a_reference(answers):
    _, (run, _) = answers["one_by_one"]
    gaps = run["details"]["gaps"]
    assert [len(each) for each in gaps] == [6, 3, 9]
    assert 0 <= min(map(min, gaps)) and max(map(max, gaps)) < 20
    reference = Reference(run["tokens"], gaps)
    found = compare_tokens(reference, answers[""][1][0]["tokens"], "float32")
    assert found.equal + found.near_ties == 3
