"""The command, and the cache, on a model and a text that take seconds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import models
from experiments.tiny_lm import checkpoint_cache, run
from experiments.tiny_lm.__main__ import main
from experiments.tiny_lm.corpus import load_corpus
from experiments.tiny_lm.settings import MODEL, Settings
from experiments.tiny_lm.tokens import VOCAB_SIZE
from paged_jax import load_model
from paged_jax.models.config import tiny

pytestmark = pytest.mark.long

FILES = {
    "config.json",
    "loss_curve.csv",
    "loss_curve.png",
    "model.safetensors",
    "tokenizer.json",
    "training.json",
}
SMALL = tiny(
    vocab_size=VOCAB_SIZE,
    tie_embeddings=True,
    eos_token_ids=MODEL.eos_token_ids,
    max_position_embeddings=64,
)


@pytest.fixture
def command(monkeypatch, tmp_path, capsys):
    """Returns a function that runs the command; its cache is the test's own.

    It returns the exit code, the lines printed and those on the error stream.
    """
    monkeypatch.setattr(run, "MODEL", SMALL)
    monkeypatch.setattr(run, "load_corpus", lambda: load_corpus(["optax"]))
    cache = tmp_path / "cache"
    monkeypatch.setattr(checkpoint_cache, "cache_folder", lambda: cache)

    def call(*words):
        code = main([*map(str, words)])
        printed = capsys.readouterr()
        return code, printed.out.splitlines(), printed.err.splitlines()

    return call


@pytest.fixture
def no_training(monkeypatch):
    def fail(*args):
        raise AssertionError("it trained")

    def forbid():
        monkeypatch.setattr(checkpoint_cache, "train_and_save", fail)

    return forbid


def test_a_first_call_trains_and_a_second_one_finds_it(command, no_training, tmp_path):
    code, out, err = command("--steps=4")
    assert (code, err) == (0, [])
    (folder,) = (p for p in (tmp_path / "cache").iterdir() if p.is_dir())
    assert {p.name for p in folder.iterdir()} == FILES
    assert any(line.startswith("trained 4 steps in") for line in out)
    assert any("bits per byte: train" in line for line in out)
    assert f"checkpoint: {folder}" in out
    assert load_model(folder).config == SMALL

    no_training()
    code, again, _ = command("--steps=4")
    assert code == 0
    assert again[0].startswith("found, trained before: 4 steps in")
    assert again[1:] == out[-len(again) + 1 :]


def test_the_curve_and_the_report_say_the_same(command, tmp_path):
    command("--steps=4", f"--out={tmp_path / 'm'}")
    report = json.loads((tmp_path / "m/training.json").read_text())
    lines = (tmp_path / "m/loss_curve.csv").read_text().splitlines()
    assert lines[0] == "step,train_bits_per_byte,held_out_bits_per_byte"
    assert [line.split(",")[0] for line in lines[1:]] == ["1", "2", "3", "4"]
    assert float(lines[-1].split(",")[2]) == pytest.approx(
        report["held_out_bits_per_byte"], abs=1e-4
    )
    baselines = report["baseline_bits_per_byte"]
    assert 3 < baselines["bigram"] < baselines["unigram"] < 6
    assert report["samples"]["count"] == 8
    assert (tmp_path / "m/loss_curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_seed_decides_every_byte_of_the_checkpoint(command, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        command("--steps=2", f"--seed={seed}", f"--out={tmp_path / name}")
    a, b, c = (
        [
            (tmp_path / n / f).read_bytes()
            for f in ("model.safetensors", "loss_curve.csv")
        ]
        for n in "abc"
    )
    assert a == b
    assert a[0] != c[0] and a[1] != c[1]


def test_settings_versions_and_code_each_have_a_place_of_their_own(monkeypatch):
    keys = {Settings(steps=s, seed=i).key() for s in (1, 2) for i in (0, 1)}
    assert len(keys) == 4
    assert Settings(steps=1).key() in keys
    described = Settings(steps=1).describe()
    assert described["versions"]["jax"] and described["code"]
    monkeypatch.setattr("experiments.tiny_lm.settings._code_digest", lambda: "other")
    assert Settings(steps=1).key() not in keys


def test_a_model_of_other_settings_is_replaced_by_force_only(command, tmp_path):
    out = f"--out={tmp_path / 'm'}"
    command("--steps=1", out)
    code, _, err = command("--steps=2", out)
    assert code == 2 and len(err) == 1
    assert "holds a model of other settings" in err[0] and "--force" in err[0]
    assert command("--steps=2", out, "--force")[0] == 0
    assert {p.name for p in (tmp_path / "m").iterdir()} == FILES
    report = json.loads((tmp_path / "m/training.json").read_text())
    assert report["steps"] == 2


def test_force_trains_anew_what_is_there(command, no_training):
    command("--steps=1")
    no_training()
    with pytest.raises(AssertionError, match="it trained"):
        command("--steps=1", "--force")


def test_what_is_no_tiny_model_is_never_replaced(command, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for words in ([f"--out={tmp_path}"], [f"--out={tmp_path}", "--force"]):
        code, _, err = command(*words)
        assert code == 2 and len(err) == 1 and "holds something else" in err[0]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_interrupted_run_leaves_nothing(command, monkeypatch, tmp_path):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "write_curve", interrupt)
    code, _, err = command("--steps=1")
    assert (code, err) == (130, ["interrupted; nothing is kept"])
    assert [p.name for p in (tmp_path / "cache").iterdir() if p.is_dir()] == []


@pytest.mark.parametrize(
    "words,message",
    [
        (["--steps=0"], "--steps is 0; it must be 1 or more"),
        (["--steps=many"], "argument --steps: invalid int value: 'many'"),
        (["--seed=-1"], "--seed is -1; it must be from 0"),
        (["--stepps=3"], "unrecognized arguments: --stepps=3"),
        (["--out=/proc/nothing/m"], "/proc/nothing/m cannot be written"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(command, words, message):
    code, out, err = command(*words)
    assert code == 2 and out == []
    assert len(err) == 1 and err[0].startswith("error: ") and message in err[0]


def test_the_module_is_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "experiments.tiny_lm", "--steps=-3"],
        cwd=Path(models.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr == "error: --steps is -3; it must be 1 or more\n"


def test_an_experiment_trains_the_model_on_first_use(command, monkeypatch, tmp_path):
    monkeypatch.setattr(Settings, "__init__", small_settings)
    said = []
    model = models.load_model("tiny_lm", "float32", said.append)
    assert model.config == SMALL and said
    assert models.load_model("tiny_lm", "bfloat16", pytest.fail).config.dtype == (
        "bfloat16"
    )


def small_settings(self):
    """Settings whose defaults take a second."""
    for name, value in {
        "steps": 2,
        "seed": 0,
        "windows": 2,
        "window": 32,
        "muon_rate": 0.02,
        "adam_rate": 0.01,
    }.items():
        object.__setattr__(self, name, value)
