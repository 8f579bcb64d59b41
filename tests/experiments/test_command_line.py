import pytest

from experiments.command_line import config_files, first_line, flat, parse
from experiments.errors import UserError


def settings(*words):
    return flat(parse(list(words)).config)


def test_no_arguments_run_the_quick_headline():
    command = parse([])
    assert command.config_path.stem == "headline"
    assert command.preset == "quick"
    assert command.out is None and not command.resume


@pytest.mark.parametrize(
    "words",
    [
        ["--config=configs/budget.py"],
        ["--config", "configs/budget.py"],
        ["--config=budget"],
        ["-config", "budget"],
    ],
)
def test_a_configuration_is_given_by_path_or_by_name(words):
    assert settings(*words)["name"] == "budget"


def test_a_preset_scales_lengths_and_model_together():
    quick, full = settings(), settings("--preset=full")
    assert full["engine.max_model_len"] == 1024 and full["workload.length_scale"] == 1
    factor = full["engine.max_model_len"] / quick["engine.max_model_len"]
    assert quick["workload.length_scale"] == factor


def test_overrides_win_over_the_preset_in_any_order():
    words = ["--config.engine.max_model_len=128", "--preset=full", "--config=budget"]
    found = settings(*words)
    assert found["engine.max_model_len"] == 128 and found["name"] == "budget"


def test_overrides_have_the_types_of_the_settings():
    found = settings(
        "--config.workload.rate=2",
        "--noconfig.engine.chunked_prefill",
        "--config.engine.num_blocks=99",
        "--config.workload.prompts=a.json",
        "--seed=3",
    )
    assert found["workload.rate"] == 2.0
    assert found["engine.chunked_prefill"] is False
    assert found["engine.num_blocks"] == 99
    assert found["workload.prompts"] == "a.json"
    assert found["seed"] == 3


def test_two_command_lines_do_not_touch_each_other():
    parse(["--config.engine.block_size=32", "--seed=9"])
    assert settings()["engine.block_size"] == 16
    assert settings()["seed"] == 0


@pytest.mark.parametrize(
    "words,message",
    [
        (["--config.engine.blok_size=8"], "did you mean engine.block_size"),
        (["--config.block_size=8"], "did you mean engine.block_size"),
        (["--config.zzz=8"], "unknown config key 'zzz': there is "),
        (["--config.engine.block_size=abc"], "block_size=abc"),
        (["--config.engine.chunked_prefill=maybe"], "chunked_prefill=maybe"),
        (["--config=headlin"], "no such configuration; did you mean headline"),
        (["--config=configs/nothing.py"], "no such configuration"),
        (["--preset=ful"], "did you mean full"),
        (["--preset"], "--preset needs a value"),
        (["--outt=x"], "Did you mean: out"),
        (["--seed=one"], "--seed=one"),
        (["headline"], "unexpected argument 'headline'"),
    ],
)
def test_mistakes_are_told_in_one_line(words, message):
    with pytest.raises(UserError) as raised:
        parse(words)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "source,message",
    [
        ("def get_config(preset): return 3", "must return a ConfigDict"),
        ("x = 1", "get_config"),
        ("import nothing_like_this", "No module named"),
        ("def get_config(:", "SyntaxError"),
    ],
)
def test_a_broken_configuration_is_told_in_one_line(source, message, tmp_path):
    path = tmp_path / "broken.py"
    path.write_text(source)
    with pytest.raises(UserError) as raised:
        parse([f"--config={path}"])
    assert message in str(raised.value) and str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_every_configuration_says_what_it_is_and_how_to_run_it():
    assert {"headline", "block_size", "budget"} <= set(config_files())
    for name, path in config_files().items():
        assert len(first_line(path)) > 20, name
        assert "python -m experiments.run" in path.read_text("utf-8"), name
        for preset in ("quick", "full"):
            assert settings(f"--config={name}", f"--preset={preset}")["name"] == name
