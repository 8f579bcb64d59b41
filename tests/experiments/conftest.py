"""A model so small that a whole experiment runs in a test, and the settings for it."""

import json

import jax
import pytest
from prompt_texts import TEXTS, byte_tokenizer

from experiments import run
from paged_jax import LoadedModel
from paged_jax.models import llama
from paged_jax.models.config import tiny
from paged_jax.tokenizer import Tokenizer

# Whole runs of the commands, and one of the simulator: what they import and compile
# meets the oldest Python and jax there.
ON_EVERY_PYTHON = (
    "test_run.py::test_the_headline_runs_all_its_cells",
    "test_run.py::test_all_cells_generate_the_same_tokens",
    "test_run.py::test_the_folder_is_self_contained",
    "test_run.py::test_mistakes_are_one_line_and_exit_code_2[words0",
    "test_run.py::test_the_list_names_every_configuration",
    "test_demo.py",
    "test_simulate.py::test_a_lone_request_takes_a_step_for_each_token",
)
NEWEST = pytest.mark.newest(
    reason="experiments are plain Python around the engine, which each Python tests"
)


def pytest_itemcollected(item):
    """Marks what is in this folder for the newest Python alone, with few exceptions."""
    if not any(name in item.nodeid for name in ON_EVERY_PYTHON):
        item.add_marker(NEWEST)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def tiny_model(tokenizer) -> LoadedModel:
    config = tiny(vocab_size=256)
    params = llama.init_params(config, jax.random.key(0))
    return LoadedModel(config, params, tokenizer)


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [
        json.dumps({"id": f"p{i}", "category": "chat", "text": text})
        for i, text in enumerate(TEXTS)
    ]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def tiny_flags(prompts_file) -> list[str]:
    """Flags that make every configuration small; all cells then share two programs."""
    return [
        f"--config.workload.prompts={prompts_file}",
        "--config.workload.num_requests=12",
        "--config.workload.length_scale=16",
        "--config.engine.max_model_len=64",
        "--config.engine.full_length_requests=4",
        "--config.engine.max_seqs=8",
        "--config.engine.max_requests=16",
        "--config.engine.token_budget=8",
        "--config.engine.steps_per_sync=16",
    ]


@pytest.fixture
def run_tiny(tiny_model, tiny_flags, monkeypatch, capsys):
    """Returns a function that runs the command on the tiny model.

    It returns the exit code, what was printed, and what went to the error stream.
    """
    monkeypatch.setattr(run, "load_model", lambda name, dtype: tiny_model)

    def call(*words: str):
        code = run.main([*tiny_flags, *map(str, words)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


@pytest.fixture
def summary_of(run_tiny, tmp_path):
    """Returns a function that runs an experiment on the tiny model, to `tmp_path / r`.

    It returns the rows by label, without the words that all share, and the claims by
    id.
    """

    def call(*words):
        code, out, err = run_tiny(*words, f"--out={tmp_path / 'r'}")
        assert code == 0, err
        assert "Sharing and preemption" in out
        summary = json.loads((tmp_path / "r/summary.json").read_text())
        claims = {c["id"]: c for c in summary["claims"]}
        return {r["label"].split(", ", 1)[1]: r for r in summary["rows"]}, claims

    return call
